"""NVIDIA GPUs that aren't here: their figures, how to compile for them, and how to read the compiled kernels."""
