"""NVIDIA's GPUs that aren't here: what they are, how to compile for them, and what can be read of the kernels made."""
