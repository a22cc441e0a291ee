"""Split sequences, one strategy per file: keys are gathered, sent around a ring or left in place; or heads are split instead."""
