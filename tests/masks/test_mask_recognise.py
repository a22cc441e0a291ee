"""recognise: arrays made of masks are found again; arrays that are none are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops.masks import Causal, Chunked, Full, Mask, Prefix, SlidingWindow
from attnops.masks.recognise import recognise

_distance = st.integers(0, 6)
_offset = st.integers(-4, 8)
_masks = st.one_of(
    st.just(Full()),
    st.builds(Prefix, st.integers(1, 8)),
    st.builds(Causal, _offset),
    st.builds(SlidingWindow, _distance, st.none(), _offset),
    st.builds(SlidingWindow, _distance, _distance, _offset),
)


def _cells(mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
    row, column = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    return np.broadcast_to(mask.test(row, row, column), (q_len, kv_len))


@given(_masks, st.integers(2, 8), st.integers(2, 8))
def test_what_is_found_says_the_same_cells(mask: Mask, q_len: int, kv_len: int) -> None:
    cells = _cells(mask, q_len, kv_len)
    found = recognise(np.stack([cells, cells]), np.arange(q_len), q_len, kv_len)
    assert (found is None) == (not cells.any())
    if found is not None:
        np.testing.assert_array_equal(_cells(found, q_len, kv_len), cells)


@given(st.integers(0, 2**16 - 1))
def test_any_cells_are_found_only_as_what_they_are(bits: int) -> None:
    cells = (bits >> np.arange(16) & 1).astype(bool).reshape(4, 4)
    found = recognise(cells[None], np.arange(4), 4, 4)
    if found is not None:
        np.testing.assert_array_equal(_cells(found, 4, 4), cells)


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "text"),
    [
        (Causal(0), 8, 8, "causal"),
        (Causal(5), 4, 9, "causal(offset=5)"),
        (SlidingWindow(2, 0, 0), 8, 8, "window(left=2, right=0)"),
        (SlidingWindow(2, 1, 0), 8, 8, "window(left=2, right=1)"),
        (SlidingWindow(2, 0, 5), 4, 9, "window(left=2, right=0, offset=5)"),
        (Prefix(3), 8, 8, "prefix(length=3)"),
        (Full(), 3, 5, "full"),
    ],
)
def test_in_the_plainest_words(mask: Mask, q_len: int, kv_len: int, text: str) -> None:
    found = recognise(_cells(mask, q_len, kv_len)[None], np.arange(q_len), q_len, kv_len)
    assert found is not None
    assert found.describe() == text


def test_what_has_no_such_words() -> None:
    causal = _cells(Causal(0), 8, 8)
    rows = np.arange(8)
    hole = causal.copy()
    hole[7, 3] = False
    assert recognise(hole[None], rows, 8, 8) is None
    assert recognise(_cells(Chunked(3, 0), 8, 8)[None], rows, 8, 8) is None
    assert recognise((causal & (np.arange(8) < 5))[None], rows, 8, 8) is None
    assert recognise(np.stack([causal, causal.T]), rows, 8, 8) is None, "two planes that differ"
    assert recognise(np.zeros((1, 8, 8), bool), rows, 8, 8) is None


def test_some_of_the_rows() -> None:
    rows = np.array([0, 3, 7])
    found = recognise(_cells(SlidingWindow(2, 0, 0), 8, 8)[None, rows], rows, 8, 8)
    assert found is not None
    assert found.describe() == "window(left=2, right=0)"
