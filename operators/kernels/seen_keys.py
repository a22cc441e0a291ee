"""Seen keys: those that some query of their batch row and kv head sees. The others count as zeros, whatever they hold.

A weight of 0 doesn't remove a NaN or an infinity: 0 times either is NaN. So a key that no query sees must not reach a product
with weights, nor its value. Keys that some queries see and others don't are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...masks import And, Full, Mask
from ...masks.causal_window import is_band, key_bounds
from ...masks.seen_keys import certainly_seen
from ...symbolic import is_symbolic, surely
from .local_mask import LocalMask
from .primitives import numbers, shifted, where
from .tiles import TilePosition, TileSource
from .varying import vary, varying

__all__ = ["Seen", "seen_keys", "zero_where_hidden"]


class Seen(NamedTuple):
    """Which keys some query sees: bool [batch | 1, kv heads | 1, kv].

    clean: None, or whether all tensors are finite. Then all keys count as seen, and nothing has to be zero.
    """

    keys: jax.Array
    clean: jax.Array | None = None


_AT_ONCE = 1 << 22  # pairs of a query and a key that are tested at once
_FEW = 1  # queries for each number of a head's key and value: so many are tested in less time than these are read


def seen_keys(mask: LocalMask, kv_heads: int, tensors: Sequence[jax.Array | None]) -> Seen | None:
    """Which keys some query sees; None if all. tensors: the key, the value and their scales, in which NaN and infinities matter.

    Where only a test of every pair of a query and a key tells, it is asked first whether all tensors are finite. That takes less
    time, and if they are, the result doesn't depend on what is hidden.
    """
    if not mask.hides_keys or isinstance(mask.mask, Full):
        return None
    of_keys, others = (Full(), mask.mask.conjuncts()) if mask.mask.is_static else _split_by_keys(mask.mask)
    visible = _of_others(mask, others, kv_heads)
    if visible is NotImplemented:
        return _of_pairs(mask, kv_heads, tensors)
    if not isinstance(of_keys, Full):
        first_row = replace(mask, mask=of_keys, q_len=1).array()  # of all rows alike
        assert first_row is not None
        seen = _by_kv_head(jnp.asarray(first_row)[:, :, 0], kv_heads)
        visible = seen if visible is None else visible & seen
    if visible is None:
        return None
    return Seen(jnp.broadcast_to(visible, (*visible.shape[:2], mask.kv_len)))


def zero_where_hidden(x: jax.Array, seen: Seen, layout: str) -> jax.Array:
    """A tensor in the layout, or a scale [batch, heads, kv], with zeros where no query sees the key."""
    keys = seen.keys
    if x.ndim == 4:
        keys = (keys if layout == "bhtd" else keys.swapaxes(1, 2))[..., None]
    return where(jnp.broadcast_to(keys, x.shape), x, 0)


def _split_by_keys(mask: Mask) -> tuple[Mask, tuple[Mask, ...]]:
    """(the And of the conjuncts that are the same for all queries, the others)."""
    alike: list[Mask] = []
    others: list[Mask] = []
    for part in mask.conjuncts():
        (alike if all(_is_of_keys(atom) for atom in part.leaves()) else others).append(part)
    return And(alike), tuple(others)


def _is_of_keys(atom: Mask) -> bool:
    if atom.kind == "dense_mask":
        return bool(atom.arrays()[0].shape[2] == 1)
    return atom.kind in ("full", "prefix", "kv_lengths")


def _of_others(mask: LocalMask, others: tuple[Mask, ...], kv_heads: int) -> Any:
    """Seen keys of conjuncts that differ from query to query; None for all, NotImplemented where only testing pairs tells."""
    if not others:
        return None
    offset = 0 if mask.query_offset is None else mask.query_offset
    if all(is_band(part) for part in others):
        return _of_band(mask, others, offset)
    known = all(isinstance(n, int) for n in (mask.q_start, mask.k_start, offset, mask.q_len, mask.kv_len))
    if not known or not all(part.is_static for part in others):
        return NotImplemented
    seen = certainly_seen(
        And(others),
        mask.q_len,
        mask.kv_len,
        q_start=mask.q_start,  # type: ignore[arg-type]
        query_offset=offset,  # type: ignore[arg-type]
        k_start=mask.k_start,  # type: ignore[arg-type]
    )
    if seen is None:
        return NotImplemented
    return None if seen.all() else _by_kv_head(_constant(seen), kv_heads)


def _constant(seen: np.ndarray) -> jax.Array:
    """[1, heads, keys]; if the seen keys follow one another, without an array as long as they are."""
    if len(seen) == 1:
        places = np.flatnonzero(seen[0])
        first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        if end - first == len(places):
            keys = numbers((1, 1, seen.shape[1]), 2)
            return (keys >= np.int32(first)) & (keys < np.int32(end))
    return jnp.asarray(seen)[None]


def _of_band(mask: LocalMask, parts: Sequence[Mask], offset: Any) -> Any:
    """Of causal masks and windows: rows that follow one another see keys that do."""
    greater, smaller = partial(_of, max, jnp.maximum), partial(_of, min, jnp.minimum)
    min_distance, max_distance = key_bounds(filter(is_band, parts), offset, greater, smaller)
    first_row, last_row = mask.q_start, mask.q_start + (mask.q_len - 1)
    first_key, last_key = mask.k_start, mask.k_start + (mask.kv_len - 1)
    keys, tests = shifted(numbers((1, 1, mask.kv_len), 2), mask.k_start), []
    if min_distance is not None and not _surely(lambda: first_row + min_distance <= first_key):
        tests.append(keys >= _column(first_row + min_distance))
    if max_distance is not None and not _surely(lambda: last_row + max_distance >= last_key):
        tests.append(keys <= _column(last_row + max_distance))
    if min_distance is not None and max_distance is not None and not _surely(lambda: min_distance <= max_distance):
        tests.append(_column(min_distance) <= _column(max_distance))  # otherwise no row sees a key
    visible = None
    for test in tests:
        visible = jnp.asarray(test) if visible is None else visible & test
    return visible


def _of(of_numbers: Any, of_arrays: Any, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return of_numbers(a, b)
    return of_arrays(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32))


def _surely(test: Any) -> bool:
    """Whether a comparison is known to hold before the program runs."""

    def known() -> bool:
        answer = test()
        return isinstance(answer, bool) and answer

    return surely(known)


def _column(x: Any) -> Any:
    """A number, or one per batch row, beside [batch, heads, keys]."""
    if not hasattr(x, "ndim") or x.ndim == 0:
        return jnp.asarray(x, jnp.int32)[None, None, None]
    return x.astype(jnp.int32)[:, None, None]


def _by_kv_head(seen: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, heads | 1, keys] of query heads as that of kv heads: seen by any head of the group."""
    batch, heads, keys = seen.shape
    return seen if heads in (1, kv_heads) else seen.reshape(batch, kv_heads, heads // kv_heads, keys).any(2)


def _of_pairs(mask: LocalMask, kv_heads: int, tensors: Sequence[jax.Array | None]) -> Seen:
    """By testing pairs, unless that takes longer than reading the tensors and these turn out to be finite."""
    arrays = [lax.stop_gradient(x) for x in tensors if x is not None]
    axes = varying(
        ([leaf.array for leaf in mask.mask.split()[1]], mask.q_start, mask.query_offset, mask.k_start, arrays)
    )

    batch, heads = _planes(mask)
    shape = (batch, 1 if heads == 1 else kv_heads, mask.kv_len)

    def tested() -> jax.Array:
        return vary(jnp.broadcast_to(_by_kv_head(_any_query(mask), kv_heads), shape), axes)

    read = sum(x.shape[-1] for x in arrays if x.ndim == 4)
    if surely(lambda: mask.q_len <= _FEW * read):
        return Seen(tested())
    finite = jnp.asarray(True)
    for x in arrays:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = x if x.dtype.itemsize > 1 else x.astype(jnp.float32)
            finite = finite & jnp.isfinite(wide).all()
    return Seen(lax.cond(finite, lambda: vary(jnp.ones(shape, bool), axes), tested), finite)


def _any_query(mask: LocalMask) -> jax.Array:
    """[batch | 1, heads | 1, keys], from a test of each pair."""
    shape = _planes(mask)
    if surely(lambda: math.prod(shape) * mask.q_len * mask.kv_len <= _AT_ONCE) or is_symbolic(mask.q_len * mask.kv_len):
        array = mask.array()
        assert array is not None
        seen = jnp.asarray(array).any(2)
        return jnp.broadcast_to(seen, (*seen.shape[:2], mask.kv_len))
    batch, heads = shape
    block = min(mask.kv_len, max(128, _AT_ONCE // (heads * mask.q_len) // 128 * 128))
    source, blocks = TileSource(mask, None, mask.q_len, block, every_tile=True), -(-mask.kv_len // block)

    def tile(number: jax.Array) -> jax.Array:
        place = TilePosition(number // blocks, 0, heads, 0, number % blocks)
        seen = source.seen(place)
        assert seen is not None
        return jnp.broadcast_to(seen.any(1), (heads, block))

    any_seen = lax.map(tile, numbers((batch * blocks,), 0))
    any_seen = any_seen.reshape(batch, blocks, heads, block).swapaxes(1, 2).reshape(batch, heads, blocks * block)
    return lax.slice_in_dim(any_seen, 0, mask.kv_len, axis=2)


def _planes(mask: LocalMask) -> tuple[int, int]:
    """(batch rows, heads) that the mask tells apart."""
    batch = heads = 1
    for leaf in mask.mask.split()[1]:
        for dim, size in zip(leaf.dims, leaf.array.shape, strict=True):
            if dim in ("batch", "heads") and (is_symbolic(size) or size > 1):
                batch, heads = (size, heads) if dim == "batch" else (batch, size)
    for atom in mask.mask.leaves():
        heads = max(heads, getattr(atom, "heads", 1))
    offset: Any = mask.query_offset
    if hasattr(offset, "ndim") and offset.ndim and (is_symbolic(offset.shape[0]) or offset.shape[0] > 1):
        batch = offset.shape[0]
    return batch, heads
