"""What surrounds a forward method on a split sequence: keys are gathered, or heads are split instead.

Source of the exchange of heads: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import jax
from jax import lax

from ...planning import Placement
from ...sharding import ATTENTION
from ..call.local import LocalOutput
from ..call.sharded_operands import ShardedOperands

__all__ = ["gather_sequence", "split_output"]


def gather_sequence(operands: ShardedOperands, placement: Placement, layout: str) -> ShardedOperands:
    """All keys for these queries, or longer parts of the sequence for fewer heads.

    Operands without a sequence, or with all of it, were split by heads before. The gradient of keys gathered
    here is summed and split again in one step; a sum followed by a slice would send twice as much.
    """
    split = placement.sequence
    changed = dict(operands.operands)
    for name, x in operands.operands.items():
        if name not in ATTENTION or not ATTENTION[name].moves:
            continue
        dims = ATTENTION[name].dims_inside(layout)
        (time,) = (index for index, dim in enumerate(dims) if dim in ("q_len", "kv_len"))
        (head,) = (index for index, dim in enumerate(dims) if dim in ("heads", "kv_heads"))
        if split.gathers and ATTENTION[name].moves == "keys":
            changed[name] = lax.all_gather(x, split.axes, axis=time, tiled=True)
        elif split.head_axes:
            changed[name] = _all_to_all(x, placement, split=head, joined=time)
    return operands._replace(operands=changed)


def split_output(result: LocalOutput, placement: Placement, layout: str) -> LocalOutput:
    """A forward method's output and lse, changed back to this device's part of the sequence with all of its heads."""
    if not placement.sequence.head_axes:
        return result
    time, head = layout.index("t"), layout.index("h")
    lse = result.lse if result.lse is None else _all_to_all(result.lse, placement, split=2, joined=1)
    return result._replace(output=_all_to_all(result.output, placement, split=time, joined=head), lse=lse)


def _all_to_all(x: jax.Array, placement: Placement, *, split: int, joined: int) -> jax.Array:
    return lax.all_to_all(x, placement.sequence.head_axes, split, joined, tiled=True)
