"""Flash attention for Hopper in Pallas' Mosaic GPU flavour, the forward pass: PartialHopper, in hopper_attention."""
