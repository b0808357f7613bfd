"""What is studied: the `gridlaw` command and the study files."""
