"""Paged attention on Hopper GPUs with attnops' own kernel, in Pallas' Mosaic GPU flavour."""
