"""Flash attention for GPUs in Pallas' Triton flavour, forward and backward: FlashPart, in flash_attention."""
