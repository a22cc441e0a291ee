"""Attention in plain XLA on raw arrays: whole logits, blocks, few queries."""
