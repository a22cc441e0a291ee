"""jax.vmap of a backward pass that writes gradients to HBM by DMA: Pallas' own rule can't map such an output on a TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..operands import Operands, Traced

__all__ = ["mapped_pass"]

Pass = Callable[..., Operands]  # of Operands, Traced, and arrays with the batch first


def mapped_pass(run: Pass) -> Pass:
    """The same pass under jax.vmap: mapped calls become batch rows of one call, or else a loop over calls.

    They become rows if nothing but the batch tells them apart. Arrays of the mask, dropout, bias and sinks belong to a call.
    """
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def rule(size: int, mapped: Any, operands: Operands, traced: Traced, *rest: jax.Array) -> tuple[Operands, Any]:
        given, is_mapped = (operands, traced, *rest), jax.tree.leaves(mapped)
        if operands.bias is None and operands.sinks is None and not jax.tree.leaves(traced):
            made = _as_rows(call, size, is_mapped, given)
        else:
            made = _in_turn(call, is_mapped, given)
        return made, jax.tree.map(lambda _: True, made)

    return call


def _as_rows(call: Pass, size: int, is_mapped: list[bool], given: Any) -> Operands:
    leaves, tree = jax.tree.flatten(given)
    whole = [
        x if mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, mapped in zip(leaves, is_mapped, strict=True)
    ]
    made = call(*jax.tree.unflatten(tree, [x.reshape(-1, *x.shape[2:]) for x in whole]))
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), made)


def _in_turn(call: Pass, is_mapped: list[bool], given: Any) -> Operands:
    leaves, tree = jax.tree.flatten(given)

    def one(of_call: list[jax.Array]) -> Operands:
        own = iter(of_call)
        arrays = [next(own) if mapped else x for x, mapped in zip(leaves, is_mapped, strict=True)]
        return call(*jax.tree.unflatten(tree, arrays))

    return lax.map(one, [x for x, mapped in zip(leaves, is_mapped, strict=True) if mapped])
