"""Ulysses: inside the operation each device has whole sequences of a share of the heads, and outside a share of the sequence.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax import lax

from ..registry import Placement
from .local import LocalOutput

if TYPE_CHECKING:
    from .execute import Operands

__all__ = ["heads_for_sequence", "sequence_for_heads"]

_T = TypeVar("_T", bound="Operands")


def heads_for_sequence(operands: _T, placement: Placement, layout: str) -> _T:
    """Whole sequences of fewer heads. Operands without a sequence, or with all of it, were split by heads before."""
    if placement.strategy != "ulysses":
        return operands
    time, head = layout.index("t"), layout.index("h")
    changed: dict[str, Any] = {
        name: _exchanged(getattr(operands, name), placement, split=head, joined=time)
        for name in ("query", "key", "value")
    }
    for name in ("key_scale", "value_scale"):  # [batch, kv heads, kv]
        if (scale := getattr(operands, name)) is not None:
            changed[name] = _exchanged(scale, placement, split=1, joined=2)
    return operands._replace(**changed)


def sequence_for_heads(result: LocalOutput, placement: Placement, layout: str) -> LocalOutput:
    """The inverse, of a forward method's output and lse."""
    if placement.strategy != "ulysses":
        return result
    time, head = layout.index("t"), layout.index("h")
    lse = result.lse if result.lse is None else _exchanged(result.lse, placement, split=2, joined=1)
    return result._replace(output=_exchanged(result.output, placement, split=time, joined=head), lse=lse)


def _exchanged(x: jax.Array, placement: Placement, *, split: int, joined: int) -> jax.Array:
    return lax.all_to_all(x, placement.sequence_axes, split, joined, tiled=True)
