"""Paged attention on TPUs by kernels of our own."""

from .attend import paged_attention_tpu

__all__ = ["paged_attention_tpu"]
