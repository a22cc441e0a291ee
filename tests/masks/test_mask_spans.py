"""Spans of static leaves against what their tests say of each row and key."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attnops.masks import Causal, Chunked, SlidingWindow
from attnops.masks.static import SpanMask

KEYS = np.arange(70, dtype=np.int32)
ROWS = np.arange(60, dtype=np.int32)
OFFSETS = None, 0, 7, -9
SIDES = None, 0, 1, 12
FAR = 2**30  # the largest number that a leaf takes
MASKS = [
    *(Causal(offset) for offset in OFFSETS),
    *(
        SlidingWindow(left, right, offset)
        for left in SIDES for right in SIDES for offset in OFFSETS if (left, right) != (None, None)
    ),
    *(Chunked(size, offset) for size in (1, 2, 3, 7, 8, 32, 48, 100) for offset in OFFSETS),
    *(Causal(offset) for offset in (FAR, -FAR)),
    *(SlidingWindow(*sides) for sides in ((FAR, None), (None, FAR), (FAR, FAR), (0, FAR), (FAR, 3, -9))),
    *(Chunked(size) for size in (FAR, FAR - 1)),
]  # fmt: skip
KINDS = pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jnp"])
EVERY_MASK = pytest.mark.parametrize("mask", MASKS, ids=repr)


def _within(span: tuple[Any, Any], at: np.ndarray) -> np.ndarray:
    """Which of `at` lie in the span of each line."""
    begin, end = (None if x is None else np.asarray(x)[:, None] for x in span)
    seen = np.ones(1, bool) if begin is None else at >= begin
    return seen if end is None else seen & (at < end)


@EVERY_MASK
@KINDS
@pytest.mark.parametrize("query_offset", [0, 5, -23])
def test_keys_of_rows(mask: SpanMask, array: Any, query_offset: int) -> None:
    """Rows at negative positions are among them; keys have none."""
    want = mask.test(ROWS[:, None], ROWS[:, None] + query_offset, KEYS)
    rows = array(ROWS)
    span = mask.key_span(mask.position(rows, rows + query_offset))
    assert all(x is None or (x.dtype == np.int32 and type(x) is type(rows)) for x in span)
    np.testing.assert_array_equal(np.broadcast_to(_within(span, KEYS), want.shape), want)


@EVERY_MASK
@KINDS
@pytest.mark.parametrize("query_offset", [0, 5, -23])
def test_rows_of_keys(mask: SpanMask, array: Any, query_offset: int) -> None:
    """A span of x, of which a row has its position, or its number and the leaf's own offset."""
    want = mask.test(ROWS[:, None], ROWS[:, None] + query_offset, KEYS).T
    keys = array(KEYS)
    span = mask.row_span(keys)
    assert all(x is None or (x.dtype == np.int32 and type(x) is type(keys)) for x in span)
    x = mask.position(ROWS, ROWS + query_offset)
    np.testing.assert_array_equal(np.broadcast_to(_within(span, x), want.shape), want)


BOUNDS = {
    Causal(): (False, True),
    SlidingWindow(12, None): (True, False),
    SlidingWindow(None, 3): (False, True),
    SlidingWindow(0, 0): (True, True),
    Chunked(8): (True, True),
    Chunked(48): (True, True),
}


@pytest.mark.parametrize("mask", BOUNDS, ids=repr)
def test_bounds_that_there_are(mask: SpanMask) -> None:
    """A missing bound isn't one that lies far away: nothing is computed for it."""
    assert tuple(x is not None for x in mask.key_span(ROWS)) == BOUNDS[mask]
    assert tuple(x is not None for x in mask.row_span(KEYS)) == BOUNDS[mask][::-1]
