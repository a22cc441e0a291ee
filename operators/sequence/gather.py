"""What surrounds a forward method on a split sequence: keys are gathered, or heads are split instead.

Source of the exchange of heads: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ...planning import Placement
from ..local import LocalOutput
from ..sharded_operands import ShardedOperands

__all__ = ["bring_together", "split_output"]


def bring_together(operands: ShardedOperands, placement: Placement, layout: str) -> ShardedOperands:
    """All keys for these queries, or longer parts of the sequence for fewer heads.

    Operands without a sequence, or with all of it, were split by heads before. The gradient of keys gathered
    here is summed and split again in one step; a sum followed by a slice would send twice as much.
    """
    split = placement.sequence
    time, head = layout.index("t"), layout.index("h")
    tensors, scales = ["query", "key", "value"], ["key_scale", "value_scale"]  # a scale is [batch, kv heads, kv]
    changed: dict[str, Any] = {}
    for name in tensors + scales:
        x = getattr(operands, name)
        if x is None:
            continue
        to_split, to_join = (head, time) if name in tensors else (1, 2)
        if split.gathers and name != "query":
            changed[name] = lax.all_gather(x, split.axes, axis=to_join, tiled=True)
        elif split.head_axes:
            changed[name] = _exchanged(x, placement, split=to_split, joined=to_join)
    return operands._replace(**changed)


def split_output(result: LocalOutput, placement: Placement, layout: str) -> LocalOutput:
    """A forward method's output and lse, changed back to this device's part of the sequence with all of its heads."""
    if not placement.sequence.head_axes:
        return result
    time, head = layout.index("t"), layout.index("h")
    lse = result.lse if result.lse is None else _exchanged(result.lse, placement, split=2, joined=1)
    return result._replace(output=_exchanged(result.output, placement, split=time, joined=head), lse=lse)


def _exchanged(x: jax.Array, placement: Placement, *, split: int, joined: int) -> jax.Array:
    return lax.all_to_all(x, placement.sequence.head_axes, split, joined, tiled=True)
