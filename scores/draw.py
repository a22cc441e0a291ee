"""Drawn: draw what a score adds to logits, at the middle of each tile, without building the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..drawing import HeatPicture
from ..errors import ScoreError, is_whole, shown
from .places import Places

__all__ = ["draw_score"]

_SIDE, _LENGTH, _HEADS = 32, 256, 8  # the most tiles a side; defaults


class Drawable(Protocol):
    """What is asked of a Score."""

    def with_heads(self, heads: int) -> Any: ...
    def captures(self) -> tuple[Any, ...]: ...
    def arrays(self) -> tuple[Any, ...]: ...
    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any: ...


def draw_score(
    score: Drawable, q_len: int | None, kv_len: int | None, query_offset: int, head: int, heads: int | None, batch: int
) -> HeatPicture:
    """See Score.draw."""
    known = _sizes(score)
    length = next((n for n in (q_len, kv_len, known.get("q_len"), known.get("kv_len")) if n is not None), _LENGTH)
    sizes = {
        "q_len": q_len or known.get("q_len") or length,
        "kv_len": kv_len or known.get("kv_len") or length,
        "heads": heads or known.get("heads") or _HEADS,
        "batch": known.get("batch") or batch + 1,
    }
    for name, size in sizes.items():
        if not is_whole(size, 1, 2**30) or known.get(name, size) != size:
            wanted = known.get(name, "a positive int")
            raise ScoreError(f"{name}={shown(size)}; wanted {wanted}, as the score's arrays have it")
    for name, index, count in (("head", head, sizes["heads"]), ("batch", batch, sizes["batch"])):
        if not is_whole(index, 0, count - 1):
            raise ScoreError(f"{name}={shown(index)}; wanted 0 to {count - 1}")
    score = score.with_heads(sizes["heads"])
    block_q, block_kv = (1 << max(0, (-(-sizes[name] // _SIDE) - 1).bit_length()) for name in ("q_len", "kv_len"))
    rows, keys = _middles(sizes["q_len"], block_q), _middles(sizes["kv_len"], block_kv)
    arrays = [
        np.asarray(_given(score, name, x), np.float64) for name, x in zip(_names(score), score.arrays(), strict=True)
    ]
    values = np.stack([_row(score, arrays, sizes, row, keys, query_offset, head, batch, 0.0) for row in rows])
    logit = 0.0
    if not values.any():  # it multiplies
        logit = 1.0
        values = np.stack([_row(score, arrays, sizes, row, keys, query_offset, head, batch, 1.0) for row in rows])
    of = f"head {head}" + (f" of batch row {batch}" if known.get("batch", 1) > 1 else "")
    what = f"added to a logit of {logit:g}, {of}"
    return HeatPicture(str(score), values, sizes["q_len"], sizes["kv_len"], block_q, block_kv, what)


def _row(
    score: Drawable, arrays: Sequence[Any], sizes: dict[str, int], row: int, keys: Any, offset: int, head: int, batch: int,
    logit: float,
) -> Any:  # fmt: skip
    """What is added at some keys of a row: one query of all keys is computed, so that arrays are indexed as in a call."""
    dims = [capture.dims for capture in _fitting(score, arrays)]
    cut = [
        x[tuple(_index(dim, n, row, head, batch) for dim, n in zip(of, x.shape, strict=True))]
        for x, of in zip(arrays, dims, strict=True)
    ]
    batch_at, head_at, q_at = (np.asarray(n).reshape(1, 1, 1, 1) for n in (batch, head, row + offset))
    at = Places(batch_at, head_at, q_at, np.arange(sizes["kv_len"]).reshape(1, 1, 1, -1))
    logits = np.full((1, 1, 1, sizes["kv_len"]), logit)
    return (score.apply(logits, at, cut, np) - logits)[0, 0, 0, keys]


def _index(dim: str, size: int, row: int, head: int, batch: int) -> slice:
    place = {"batch": batch, "heads": head, "q_len": row}.get(dim)
    if place is None or size == 1:
        return slice(None)
    return slice(place, place + 1)


def _fitting(score: Drawable, arrays: Sequence[Any]) -> list[Any]:
    """The captures, with the dims that their arrays have."""
    return [
        capture._replace(dims=next(dims for dims in (capture.dims, *capture.also) if len(dims) == np.ndim(x)))
        for capture, x in zip(score.captures(), arrays, strict=True)
    ]


def _names(score: Drawable) -> tuple[str, ...]:
    return tuple(capture.name for capture in score.captures())


def _given(score: Drawable, name: str, x: Any) -> Any:
    if x is None or not (isinstance(x, tuple) or hasattr(x, "__array__")):
        raise ScoreError(f"{score} has no {name}, which is given in a call; to draw it, pass {name} to the score")
    return x


def _sizes(score: Drawable) -> dict[str, int]:
    """The sizes that a score's arrays fix."""
    sizes: dict[str, int] = {}
    held = [
        (capture, x) for capture, x in zip(score.captures(), score.arrays(), strict=True) if hasattr(x, "shape") or x
    ]
    for capture, x in held:
        for dims in (capture.dims, *capture.also):
            if len(dims) == np.ndim(x):
                named = zip(("kv_len" if d == "all_keys" else d for d in dims), np.shape(x), strict=True)
                sizes |= {dim: n for dim, n in named if n > 1 or dim == "heads"}
    return {name: n for name, n in sizes.items() if name in ("batch", "heads", "q_len", "kv_len")}


def _middles(length: int, block: int) -> np.ndarray:
    first = np.arange(0, length, block)
    return np.minimum(first + block // 2, length - 1)
