"""What the Blackwell kernels support, as data."""

from __future__ import annotations

from ...planning import AttentionProblem, Rule
from ..flash.flash_config import FlashAttention2Config
from ..mosaic.mosaic_rules import Generation, is_asked, mosaic_rules
from .blackwell_sizes import BLACKWELL_FIELDS

__all__ = ["BLACKWELL_RULES"]

_FEW = 16  # rows of the smallest tile of the kernel in Triton


def _few_int8(problem: AttentionProblem, config: FlashAttention2Config) -> bool:
    rows = problem.q_len * (problem.q_heads // problem.kv_heads)
    return "int8" in problem.quantised.values() and rows <= _FEW and not is_asked(config)


_GENERATION = Generation("blackwell", BLACKWELL_FIELDS, "tensor memory", vma=False)
BLACKWELL_RULES = (
    *mosaic_rules(_GENERATION),
    Rule(
        "blackwell.few_int8",
        "key",
        lambda p, c: not _few_int8(p, c),
        f"int8, and q_len={{p.q_len}} with {{p.q_heads}} query heads of {{p.kv_heads}}: up to {_FEW} rows of a tile of 128, "
        "beside which its keys and values take longer to widen than in the kernel in Triton",
        "Nothing to change: the kernel in Triton runs. kernel='mosaic' runs this one.",
    ),
)
