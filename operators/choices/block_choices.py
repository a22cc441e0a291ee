"""Blocks in a call's mask: sizes checked against the call, heads expanded to the query's, and what a plan says of both."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import InputError
from ...masks import Blocks, Mask, Slot
from ...masks.node import Leaf
from ...planning.notes import note
from ...planning.problem import LeafShape
from ...symbolic import is_symbolic, surely

__all__ = ["block_notes", "choice_shape", "is_choice", "of_query_heads", "with_query_heads"]


def is_choice(dims: Sequence[str]) -> bool:
    """Whether an array of the mask with these dimensions is a choice of blocks."""
    return "q_blocks" in dims


def with_query_heads(mask: Mask, sizes: dict[str, int]) -> Mask:
    """The mask with each layout for all heads or for each query head. Errors: InputError for sizes that don't fit."""

    def repeated_leaf(atom: Mask) -> Mask:
        if not isinstance(atom, Blocks):
            return atom
        _check("Blocks layout", atom, atom.layout.shape, sizes)
        return atom.repeated(sizes["heads"] // atom.heads)

    return mask.map_leaves(repeated_leaf)


def choice_shape(leaf: Leaf, slot: Mask, sizes: dict[str, int]) -> LeafShape:
    """The shape of a choice with the heads of the query. Errors: InputError."""
    assert isinstance(slot, Slot)
    batch, heads, q_blocks, last = leaf.array.shape
    if batch not in (1, sizes["batch"]):
        raise InputError(f"Blocks choice has batch {batch}; wanted {sizes['batch']}, the call's, or 1 for all rows.")
    is_bool = leaf.array.dtype == jnp.bool_
    _check("Blocks choice", slot, (heads, q_blocks, last if is_bool else None), sizes)
    shape = batch, heads if heads == 1 else sizes["heads"], q_blocks, last
    return LeafShape(leaf.name, shape, tuple(leaf.dims), str(jax.dtypes.canonicalize_dtype(leaf.array.dtype)))


def of_query_heads(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A choice in that shape: a kv head's choice is repeated for each query head of its group."""
    heads = array.shape[1]
    return array if heads == shape[1] else jnp.repeat(array, shape[1] // heads, axis=1)


def block_notes(mask: Mask, leaves: Sequence[Leaf], sizes: dict[str, int]) -> list[str]:
    """Notes on how a layout or a choice for the kv heads applies to the query heads."""
    heads = [atom.heads for atom in mask.leaves() if isinstance(atom, Blocks)]
    heads += [leaf.array.shape[1] for leaf in leaves if is_choice(leaf.dims)]
    group = sizes["heads"] // sizes["kv_heads"]
    if group > 1 and any(n == sizes["kv_heads"] > 1 for n in heads):
        return [note("blocks.shared", heads=group)]
    return []


def _check(what: str, leaf: Any, shape: Sequence[int | None], sizes: dict[str, int]) -> None:
    """shape: heads, q blocks and kv blocks; None for indices, which may have any number."""
    allowed = dict.fromkeys((1, sizes["kv_heads"], sizes["heads"]))
    if shape[0] not in allowed:
        raise InputError(
            f"{what} has {shape[0]} heads; wanted {' or '.join(map(str, allowed))}: one for all, one for each kv head or one for "
            "each query head."
        )
    for axis, length, block, count in (
        ("q", sizes["q_len"], leaf.block_q, shape[1]),
        ("kv", sizes["kv_len"], leaf.block_kv, shape[2]),
    ):
        if count is not None and not surely(functools.partial(operator.ge, count * block, length)):
            hint = f": constrain it, such as '{length} <= {count * block}'" if is_symbolic(length) else ""
            raise InputError(
                f"{what} has {count} {axis} blocks of {block}, {count * block} in all; wanted {axis}_len={length}, which are "
                f"{-(-length // block)} blocks{hint}."
            )
