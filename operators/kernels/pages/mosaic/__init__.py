"""Paged attention on Hopper and Blackwell GPUs with attnops' own kernels, in Pallas' Mosaic GPU flavour."""
