"""Selected attention in plain XLA on raw arrays: scores of an indexer, the best keys, attention to them, the indexer's loss."""
