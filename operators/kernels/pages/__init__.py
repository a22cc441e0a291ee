"""Attention over pages on raw arrays: plain XLA, and Pallas for TPUs in `tpu`."""
