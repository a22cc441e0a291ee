"""A step over pages, in which a ragged batch attends to a declared cache: what is requested, what will run, and why."""
