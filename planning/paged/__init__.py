"""A step over pages: a ragged batch that attends to a declared cache; what is asked, what will run, and why."""
