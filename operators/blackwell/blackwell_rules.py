"""What the Blackwell kernels support, as data."""

from __future__ import annotations

from ...planning import Rule
from ..mosaic.mosaic_rules import Generation, asked, mosaic_rules
from .kernel.blackwell_sizes import KEYS, ROWS

__all__ = ["BLACKWELL_RULES"]

_FORWARD_ONLY = Rule(
    "blackwell.train",
    "mode",
    lambda p, c: p.mode != "__train__" or asked(c),
    "mode='train': the gradients have no kernel in Mosaic GPU for Blackwell",
    "Nothing to change: the kernels in Triton run forward and backward. kernel='mosaic' runs this one, and gradients in XLA.",
)
BLACKWELL_RULES = (
    *mosaic_rules(
        Generation(
            "blackwell",
            ROWS,
            2 * ROWS,
            {"block_q": (ROWS, 2 * ROWS), "block_kv": KEYS},
            "tensor memory",
            warps=("num_warps",),
        )
    ),
    _FORWARD_ONLY,
)
