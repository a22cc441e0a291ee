"""Flash attention for Blackwell in Pallas' Mosaic GPU flavour: PartialBlackwell, in blackwell_attention."""
