"""What is trained: the decoder, its layers, initialisation and cost. Needs torch only."""
