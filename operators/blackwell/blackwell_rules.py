"""What the Blackwell kernels support, as data."""

from __future__ import annotations

from ..mosaic.mosaic_rules import Generation, mosaic_rules
from .blackwell_sizes import BLACKWELL_FIELDS
from .kernel.blackwell_sizes import ROWS

__all__ = ["BLACKWELL_RULES"]

BLACKWELL_RULES = mosaic_rules(Generation("blackwell", ROWS, 2 * ROWS, BLACKWELL_FIELDS, "tensor memory", vma=False))
