"""What the kernels in Pallas' Mosaic GPU flavour share, for each generation of GPUs: PartialMosaic, in mosaic_attention."""
