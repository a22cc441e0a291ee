"""Split sequences: the strategy of a call, what it does to the tensors, and reasons against it."""
