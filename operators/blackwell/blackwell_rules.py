"""What the Blackwell kernels support, as data."""

from __future__ import annotations

from ..mosaic.mosaic_rules import Generation, mosaic_rules
from .blackwell_sizes import BLACKWELL_FIELDS

__all__ = ["BLACKWELL_RULES"]

BLACKWELL_RULES = mosaic_rules(
    Generation(
        "blackwell",
        BLACKWELL_FIELDS,
        "tensor memory",
        lambda columns: f"{columns} columns of tensor memory beside those of a tile, of 512",
        vma=False,
    )
)
