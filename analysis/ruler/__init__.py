"""RULER's tasks as text (arXiv 2404.06654; NVIDIA/RULER): what is asked, what counts as right."""
