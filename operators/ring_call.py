"""A LocalCall whose keys come around a ring, with whichever kernel can work on parts of them."""

from __future__ import annotations

import jax

from .kernels.operands import Operands
from .kernels.part import PartKernel
from .local import LocalCall
from .ring import ring_attention, with_sinks

__all__ = ["around_the_ring"]


def around_the_ring(
    call: LocalCall, kernel: PartKernel, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) of this device's queries and the keys of all devices; tensors in the kernel's layout."""
    assert call.ring is not None
    operands = Operands(query, key, value, None, None)
    output, lse = ring_attention(kernel, call.ring, operands, call.mask, call.dropout)
    return (output, lse) if call.sinks is None else with_sinks(output, lse, call.sinks, kernel.layout)
