"""What is known of whole blocks from extents: never wrong, and exact for single leaves at aligned blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import Causal, Chunked, Dense, Full, Lengths, Mask, Positions, Prefix, SegmentIds, SlidingWindow
from attnops.operators.kernels.local_mask import LocalMask

BATCH, Q, KV = 2, 37, 50
OFFSET = st.one_of(st.none(), st.integers(-20, 20))
NUMBER = st.integers(0, 30)


@st.composite
def arrays(draw, size: int, low: int = 0, high: int = 5):
    values = draw(st.lists(st.integers(low, high), min_size=BATCH * size, max_size=BATCH * size))
    ordered = draw(st.booleans())
    array = np.array(values, np.int32).reshape(BATCH, size)
    return np.sort(array, axis=1) if ordered else array


LEAVES = st.one_of(
    st.just(Full()),
    st.builds(Causal, OFFSET),
    st.builds(SlidingWindow, NUMBER, st.one_of(st.none(), NUMBER), OFFSET),
    st.builds(Chunked, st.integers(1, 20), OFFSET),
    st.builds(Prefix, NUMBER),
    st.builds(SegmentIds, arrays(Q), arrays(KV)),
    st.builds(Lengths, arrays(1, 0, 60).map(lambda a: a[:, 0])),
    st.builds(Positions, arrays(Q, -5, 60), arrays(KV, -5, 60), st.one_of(st.none(), NUMBER), st.just(0)),
    st.builds(lambda seed, heads: Dense(_dense(seed, heads)), st.integers(0, 99), st.sampled_from([1, 3])),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)


def _dense(seed: int, heads: int) -> np.ndarray:
    """Blocks of True and False, so that whole blocks of either occur."""
    coarse = np.random.default_rng(seed).random((BATCH, heads, 5, 5)) < 0.5
    return coarse.repeat(10, axis=2).repeat(10, axis=3)[:, :, :Q, :KV]


def _blocks(visible: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """0 dead, 1 partial, 2 full, by looking."""
    rows, cols = range(0, Q, block_q), range(0, KV, block_kv)
    found = np.zeros((visible.shape[0], len(rows), len(cols)), int)
    for i, row in enumerate(rows):
        for j, col in enumerate(cols):
            part = visible[:, :, row : row + block_q, col : col + block_kv]
            found[:, i, j] = part.any((1, 2, 3)).astype(int) + part.all((1, 2, 3))
    return found


@pytest.mark.slow
@settings(max_examples=30)
@given(TREES, st.sampled_from([(8, 16), (10, 10), (16, 8), (37, 50)]), st.integers(0, 9), st.integers(-9, 9))
def test_never_wrong(mask: Mask, blocks: tuple[int, int], q_start: int, offset: int) -> None:
    rows = np.arange(Q)[:, None] + q_start
    visible = mask.test(rows, rows + offset, np.arange(KV)[None])
    visible = np.broadcast_to(np.asarray(visible), (BATCH, np.shape(visible)[1] if np.ndim(visible) == 4 else 1, Q, KV))
    truth = _blocks(visible, *blocks)

    @jax.jit
    def traced(q_start, offset):
        return LocalMask(mask, q_start, Q, KV, jnp.full((BATCH,), offset)).kinds(*blocks)

    for found in (
        np.asarray(traced(q_start, offset)),
        np.asarray(LocalMask(mask, q_start, Q, KV, offset).kinds(*blocks)),
    ):
        found = np.broadcast_to(found, truth.shape)
        assert (truth[found == 0] == 0).all()
        assert (truth[found == 2] == 2).all()


def test_sorted_segments_are_exact() -> None:
    ids = np.repeat(np.arange(4), 8)[None].repeat(BATCH, 0).astype(np.int32)
    found = jax.jit(lambda ids: LocalMask(SegmentIds(ids, ids), 0, 32, 32, None).kinds(8, 8))(ids)
    np.testing.assert_array_equal(found, np.broadcast_to(2 * np.eye(4), (BATCH, 4, 4)))
