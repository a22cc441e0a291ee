"""Masks that are spans of keys for each row: segment ids, in order and not, beside others. For the kernels in Mosaic GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnops import Blocks, Causal, Chunked, Mask, SegmentIds, SlidingWindow
from attnops.masks import And

from .cases import Case

__all__ = ["ORDERS", "segments"]

SEED = 11


def _rising(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.sort(rng.integers(0, 4, count))


def _padded(rng: np.random.Generator, count: int) -> np.ndarray:
    """1 1 2 2 0 0"""
    padding = count // 5
    return np.r_[1 + np.sort(rng.integers(0, 3, count - padding)), np.zeros(padding, int)]


def _unordered(rng: np.random.Generator, count: int) -> np.ndarray:
    """Documents of a few tokens, of which each comes again."""
    return np.repeat(rng.permutation(np.arange(-(-count // 9)) % 4), 9)[:count]


def _long(rng: np.random.Generator, count: int) -> np.ndarray:
    """A document that has whole tiles, and those around it."""
    return (np.arange(count) >= 30).astype(int) + (np.arange(count) >= count - 21)


ORDERS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "rising": _rising,
    "padded": _padded,
    "unordered": _unordered,
    "long": _long,
}


def _seen(part: Mask, x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which keys rows at x see."""
    if isinstance(part, Causal):
        return keys <= x
    if isinstance(part, Chunked):
        return x // part.size == keys // part.size
    if isinstance(part, Blocks):
        return np.asarray(part.layout)[0][x // part.block_q, keys // part.block_kv]
    assert isinstance(part, SlidingWindow)
    left, right = (2**30 if side is None else side for side in (part.left, part.right))
    return (keys >= x - left) & (keys <= x + right)


def segments(
    orders: Sequence[str],
    parts: Sequence[Mask] = (),
    *,
    q_len: int = 150,
    kv_len: int = 150,
    offsets: int | Sequence[int] = 0,
    lengths: Sequence[int] | None = None,
    heads: tuple[int, int] = (2, 1),
    absent: bool = False,
    either: bool = False,
    **call: Any,
) -> Case:
    """A batch with a row of each of the orders. A query has the id of the key at its position. parts: of the mask, beside ids.
    absent: some queries have an id that no key has. either: ids beside the others, of which a key passes one of two."""
    rng, batch = np.random.default_rng(SEED), len(orders)
    at = np.broadcast_to(np.asarray(offsets), (batch,))[:, None] + np.arange(q_len)
    kv = np.stack([ORDERS[order](rng, kv_len) for order in orders]).astype(np.int32)
    q = np.take_along_axis(kv, np.clip(at, 0, kv_len - 1), axis=1)
    if absent:
        q = np.where(np.arange(q_len) % 11 == 3, 9, q).astype(np.int32)
    keys = np.arange(kv_len)
    seen = q[:, :, None] == kv[:, None]
    for part in parts:
        seen &= _seen(part, at[:, :, None], keys)
    mask = [*parts]
    call |= {"q_segment_ids": q, "kv_segment_ids": kv}
    if either:
        other = np.stack([_unordered(rng, kv_len) for _ in orders]).astype(np.int32)
        of_rows = np.take_along_axis(other, np.clip(at, 0, kv_len - 1), axis=1)
        mask = [Causal() | SegmentIds(of_rows, other), *mask]
        seen &= (keys <= at[:, :, None]) | (of_rows[:, :, None] == other[:, None])
    if lengths is not None:
        seen &= keys < np.array(lengths)[:, None, None]
        call["kv_lengths"] = np.array(lengths, np.int32)
    call["mask"] = And(mask)
    call["query_offset"] = offsets if isinstance(offsets, int) else np.array(offsets, np.int32)
    return Case(
        "spans", frozenset(), call, seen[:, None], q_len=q_len, kv_len=kv_len, heads=heads[0], kv_heads=heads[1], batch=batch
    )  # fmt: skip
