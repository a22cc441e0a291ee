"""PartKernel: a flash kernel whose passes can be run over parts of the keys, one after the other.

The log-sum-exp of a part is enough to merge its output with that of another; and with the output and the log-sum-exp of all
keys, the backward pass over a part gives exactly that part's share of every gradient.
"""

from __future__ import annotations

from typing import Protocol

import jax

from .operands import Operands, Places, Traced

__all__ = ["PartKernel"]


class PartKernel(Protocol):
    """Hashable; `layout` is that of its tensors. Sinks and biases are not for it: they belong to all keys together."""

    @property
    def layout(self) -> str:
        """bthd or bhtd."""
        ...

    @property
    def names(self) -> tuple[str, str]:
        """The names of the output and the lse for jax.checkpoint policies."""
        ...

    def attend(self, places: Places, operands: Operands, traced: Traced) -> tuple[jax.Array, jax.Array]:
        """(output in the layout, lse [batch, heads, q]) of these keys alone; rows that see none give 0 and -inf."""
        ...

    def differentiate(
        self,
        places: Places,
        operands: Operands,
        traced: Traced,
        output: jax.Array,
        lse: jax.Array,
        d_output: jax.Array,
        d_lse: jax.Array,
    ) -> Operands:
        """The share of these keys in the gradients; output, lse and their gradients are those of all keys."""
        ...
