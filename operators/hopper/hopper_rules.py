"""What the Hopper kernels support, as data."""

from __future__ import annotations

from ..mosaic.mosaic_rules import Generation, mosaic_rules
from .kernel.hopper_sizes import KEYS, ROWS

__all__ = ["HOPPER_RULES"]

_BLOCKS = (ROWS, 2 * ROWS)  # a warpgroup has 64 rows, and one or two of them compute
HOPPER_RULES = mosaic_rules(
    Generation(
        "hopper",
        dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq", "block_kv_dkv"), _BLOCKS)
        # A product with keys goes through 64 of them at once, and one for logits has at most 256 columns.
        | dict.fromkeys(("block_kv", "block_kv_dq"), KEYS),
        "registers",
        lambda columns: f"{columns // 2} registers of a thread beside the 80 of a tile, of 240",
    )
)
