"""What implementations share in choosing sizes: shipped tables, blocks of masks, rules on mask functions."""
