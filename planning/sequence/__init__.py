"""Split sequences: which strategy a call gets, what it does to the tensors, and what stands against it."""
