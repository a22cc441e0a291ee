"""Spans of segment ids against what each pair of ids says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal, Chunked, Mask, Prefix, SlidingWindow
from attnops.operators.kernels.operands import StaticArgs
from attnops.operators.mosaic.kernel.id_spans import id_spans
from attnops.operators.mosaic.kernel.spans import all_spans

LENGTHS = 1, 2, 127, 128, 129, 1000
LEAST, MOST = -(2**31), 2**31 - 1
SPANS = jax.jit(id_spans)


def _runs(count: int, rng: np.random.Generator, ids: np.ndarray) -> np.ndarray:
    """The ids in this order, each as often as it happens."""
    return ids[np.sort(rng.integers(0, len(ids), count))]


def _padded(count: int, rng: np.random.Generator, ids: np.ndarray) -> np.ndarray:
    """Rising ids, then zeros."""
    padding = rng.integers(0, count)
    return np.r_[_runs(count - padding, rng, ids[ids > 0]), np.zeros(padding, int)]


RISING = np.r_[-9, -3, 0, 1, 2, 5, 40, 1000]
ORDERED: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "rising": lambda n, rng: _runs(n, rng, RISING),
    "zeros_at_the_end": lambda n, rng: _padded(n, rng, RISING),
    "least_at_the_end": lambda n, rng: np.r_[_runs(n - n // 3, rng, RISING), np.full(n // 3, LEAST)],
    "around": lambda n, rng: _runs(n, rng, np.r_[5, 40, MOST, LEAST, -7, 0, 4]),
    "one": lambda n, rng: np.full(n, 7),
    "extreme": lambda n, rng: _runs(n, rng, np.r_[LEAST, LEAST + 1, -1, 0, MOST - 1, MOST]),
    "largest_first": lambda n, rng: _runs(n, rng, np.r_[MOST, LEAST, 0, MOST - 1]),
    "all_different": lambda n, rng: np.arange(n) - n // 2,
    "all_different_from_largest": lambda n, rng: (np.arange(n) + MOST - n // 2 + 2**31) % 2**32 - 2**31,
}
UNORDERED: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "comes_again": lambda n, rng: np.r_[np.full(n - n // 2, 1), np.full(n // 2 - 1, 2), 1],
    "falls_once": lambda n, rng: np.r_[5, np.full(n - 2, 9), 8],
    "falls": lambda n, rng: np.arange(n)[::-1],
    "any": lambda n, rng: rng.integers(-4, 4, n),
    "zeros_between": lambda n, rng: np.r_[np.full(n - n // 2, 3), np.zeros(n // 2 - 1), 4],
    "beyond_the_first": lambda n, rng: np.r_[np.full(n - 2, 3), 1, 6],
}


def _rises_around(ids: np.ndarray) -> bool:
    """Whether the ids rise, counted from the first: in Python's integers."""
    ahead = [(int(x) - int(ids[0])) % 2**32 for x in ids]
    return all(x <= y for x, y in itertools.pairwise(ahead))


def _check(lines: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """That spans are exact where the ids are said to be in order; which rows aren't."""
    begin, end, unordered = (
        np.asarray(x) for x in SPANS(jnp.asarray(lines, jnp.int32), jnp.asarray(columns, jnp.int32))
    )
    assert (begin.shape, end.shape, unordered.shape) == (lines.shape, lines.shape, lines.shape[:1])
    assert (begin.dtype, end.dtype, unordered.dtype) == (np.int32, np.int32, bool)
    np.testing.assert_array_equal(unordered, [not _rises_around(x) for x in columns])
    at = np.arange(columns.shape[1])
    seen = (at >= begin[:, :, None]) & (at < end[:, :, None])
    same = lines[:, :, None] == columns[:, None, :]
    np.testing.assert_array_equal(seen[~unordered], same[~unordered])
    return unordered


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", ORDERED)
def test_in_order(name: str, count: int) -> None:
    columns = np.stack([ORDERED[name](count, np.random.default_rng(seed)) for seed in range(3)])
    assert not _check(columns, columns).any()


@pytest.mark.parametrize("count", [n for n in LENGTHS if n > 4])
@pytest.mark.parametrize("name", UNORDERED)
def test_out_of_order(name: str, count: int) -> None:
    columns = np.stack([UNORDERED[name](count, np.random.default_rng(seed)) for seed in range(3)])
    assert _check(columns, columns).all()


@pytest.mark.parametrize("lines", [1, 64, 129])
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", ORDERED)
def test_lines_that_are_not_columns(name: str, count: int, lines: int) -> None:
    """Some of the lines' ids no column has: below all, between, above, and next to those that there are."""
    rng = np.random.default_rng(count)
    columns = np.stack([ORDERED[name](count, rng) for _ in range(2)])
    near = np.clip(
        rng.choice(columns, (2, lines), axis=1)[[0, 1], [0, 1]] + rng.integers(-1, 2, (2, lines)), LEAST, MOST
    )
    far = rng.choice([LEAST, -1, 0, 3, MOST], (2, lines))
    assert not _check(np.where(rng.random((2, lines)) < 0.7, near, far), columns).any()


@pytest.mark.parametrize("count", [n for n in LENGTHS if n > 4])
def test_rows_of_each_kind(count: int) -> None:
    rng = np.random.default_rng(count)
    kinds = [*ORDERED.items(), *UNORDERED.items()]
    order = rng.permutation(len(kinds))
    columns = np.stack([kinds[n][1](count, rng) for n in order])
    lines = np.roll(columns, 1, axis=1)[:, : max(1, count // 2)]
    np.testing.assert_array_equal(_check(lines, columns), [kinds[n][0] in UNORDERED for n in order])


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        (Causal(), True),
        (Causal() & SlidingWindow(1000) & Chunked(96), True),
        (Prefix(3) | Causal(), False),
        (Causal() & ~SlidingWindow(3), False),
        (SlidingWindow(None, 2**30, offset=2**30), False),  # sums of these don't fit into int32
        (Causal() & Chunked(2**30, offset=2**30), False),
    ],
)
def test_which_masks_are_spans(mask: Mask, spans: bool) -> None:
    static = StaticArgs(mask=mask, q_len=64, kv_len=64, q_start=0, query_offset=0, dropout=0.0)
    assert all_spans(static, {}, 64) == spans
