"""Split sequences, a strategy a file: keys gathered, sent around a ring or left where they lie; heads split instead."""
