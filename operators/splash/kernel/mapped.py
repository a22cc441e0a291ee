"""jax.vmap of what Pallas' own rule can't map: a pass that writes gradients to HBM by DMA, and a grid of a traced size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...kernels.operands import DynamicArgs, Operands

__all__ = ["mapped_grid", "mapped_pass"]

Pass = Callable[..., Operands]  # of Operands, DynamicArgs, and arrays with the batch first


def mapped_pass(run: Pass) -> Pass:
    """The same pass under jax.vmap: mapped calls become batch rows of one call, or else a loop over calls.

    They become rows if nothing but the batch tells them apart. Arrays of mask, dropout, bias, sinks and score belong to a call.
    """
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def rule(
        size: int, mapped: Any, operands: Operands, dynamic: DynamicArgs, *rest: jax.Array
    ) -> tuple[Operands, Any]:
        arguments, is_mapped = (operands, dynamic, *rest), jax.tree.leaves(mapped)
        of_calls = operands.bias, operands.sinks, operands.captures, dynamic
        if not jax.tree.leaves(of_calls):
            results = _as_rows(call, size, is_mapped, arguments)
        else:
            results = _in_turn(call, is_mapped, arguments)
        return results, jax.tree.map(lambda _: True, results)

    return call


def mapped_grid(run: Callable[..., Any], scalars: int) -> Callable[..., Any]:
    """The same Pallas call under jax.vmap. Its first arguments are the traced size of its grid and the scalars; if these are
    mapped, the calls run one after another. jax 0.10 and 0.12 drop the size where the scalars are mapped and it isn't.
    """
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def rule(size: int, mapped: Any, *arrays: jax.Array) -> tuple[Any, Any]:
        if any(mapped[: scalars + 1]):
            results = _in_turn(call, mapped, arrays)
        else:  # Pallas' rule, whose result may be mapped again
            results = mapped_grid(jax.vmap(run, [0 if has_axis else None for has_axis in mapped]), scalars)(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _as_rows(call: Pass, size: int, is_mapped: list[bool], arguments: Any) -> Operands:
    leaves, tree = jax.tree.flatten(arguments)
    whole = [
        x if mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, mapped in zip(leaves, is_mapped, strict=True)
    ]
    results = call(*jax.tree.unflatten(tree, [x.reshape(-1, *x.shape[2:]) for x in whole]))
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)


def _in_turn(call: Callable[..., Any], is_mapped: list[bool], arguments: Any) -> Any:
    leaves, tree = jax.tree.flatten(arguments)

    def of_one(of_call: list[jax.Array]) -> Any:
        rest = iter(of_call)
        arrays = [next(rest) if mapped else x for x, mapped in zip(leaves, is_mapped, strict=True)]
        return call(*jax.tree.unflatten(tree, arrays))

    return lax.map(of_one, [x for x, mapped in zip(leaves, is_mapped, strict=True) if mapped])
