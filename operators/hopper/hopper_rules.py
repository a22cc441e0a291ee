"""What the Hopper kernels support, as data."""

from __future__ import annotations

from ..mosaic.mosaic_rules import Generation, mosaic_rules
from .kernel.hopper_sizes import FEW, KEYS, ROWS

__all__ = ["HOPPER_RULES"]

_BLOCKS = (ROWS, 2 * ROWS)  # a warpgroup has 64 rows, and one or two of them compute
HOPPER_RULES = mosaic_rules(
    Generation(
        "hopper",
        dict.fromkeys(("block_q", "block_q_dq", "block_kv_dkv"), _BLOCKS)
        # A product with keys goes through 64 of them at once, and one for logits has at most 256 columns. Of gradients, where
        # tiles are swizzled by half as many columns, it is 32.
        | {"block_q_dkv": (FEW, *_BLOCKS), "block_kv": KEYS, "block_kv_dq": (FEW, *KEYS)},
        "registers",
    )
)
