"""Flash attention for GPUs in Pallas' Triton flavour, forward and backward: PartialFlash, in flash_attention."""
