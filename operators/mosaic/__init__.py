"""What attnops' kernels in Pallas' Mosaic GPU flavour share: their rules, sizes and fields, and how a call runs."""
