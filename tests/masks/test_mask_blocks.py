"""Blocks, by a layout and by a choice, and the named patterns, against brute force and their definitions."""

from __future__ import annotations

import copy
import json
import pickle
import time

import brute_masks as brute
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops.errors import MaskError
from attnops.masks import (
    Blocks,
    Causal,
    ChosenBlocks,
    a_shape,
    bigbird,
    dilated_blocks,
    local_blocks,
    longformer,
    mask_from_dict,
    strided_blocks,
)
from attnops.masks.bounds import Blocks as BlockGrid
from attnops.masks.bounds import Extent

LEAVES = brute.LEAVES | brute.BLOCKS
lengths = st.integers(1, 40)
some = settings(deadline=None, max_examples=150)


@given(brute.trees(LEAVES | brute.FUNCTIONS, 2), lengths, lengths, lengths, lengths, st.integers(-20, 45))
@some
def test_materialise(spec, start, q, kv_start, kv, query_offset):
    where = slice(start, start + q), slice(kv_start, kv_start + kv)
    seen = brute.build(spec).materialise(*where, query_offset=query_offset)
    want = brute.dense(spec, range(start, start + q), range(kv_start, kv_start + kv), query_offset)
    np.testing.assert_array_equal(seen[0, 0], want)


@given(
    brute.trees(LEAVES | brute.FUNCTIONS, 2),
    st.tuples(lengths, lengths, st.integers(1, 30), st.integers(1, 30), st.integers(0, 20), st.integers(0, 30)),
    st.integers(-20, 45),
)
@some
def test_live_blocks_and_dead_rows_are_exact(spec, sizes, query_offset):
    q_len, kv_len, block_q, block_kv, q_start, k_start = sizes
    mask, rows = brute.build(spec), range(q_start, q_start + q_len)
    at = {"q_start": q_start, "query_offset": query_offset}
    seen = brute.dense(spec, rows, range(k_start, k_start + kv_len), query_offset)
    found = mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, k_start=k_start, **at)
    assert found.dtype == np.int8
    assert found.tolist() == brute.blocks(seen, block_q, block_kv)
    dead = ~brute.dense(spec, rows, range(kv_len), query_offset).any(axis=1)
    assert mask.may_have_dead_rows(q_len, kv_len, **at) is bool(dead.any())


@given(brute.trees(LEAVES, 2), lengths, lengths, st.integers(0, 20))
@some
def test_row_intervals(spec, q_len, kv_len, start):
    lo, hi = brute.build(spec).row_intervals(np.arange(start, start + q_len), kv_len)
    for column in range(q_len):
        seen = [j for a, b in zip(lo[:, column], hi[:, column], strict=True) for j in range(a, b)]
        assert seen == [j for j in range(kv_len) if brute.sees(spec, start + column, j)]


@given(brute.trees(LEAVES, 2))
@some
def test_json_pickle_and_equality(spec):
    mask = brute.build(spec)
    data = json.loads(json.dumps(mask.to_dict(), allow_nan=False))
    assert mask_from_dict(data) == mask
    assert hash(mask_from_dict(data)) == hash(mask)
    assert pickle.loads(pickle.dumps(mask)) == mask == copy.deepcopy(mask)


def test_heads_have_layouts_of_their_own():
    layout = np.random.default_rng(0).random((3, 5, 4)) < 0.5
    mask = Causal() & Blocks(layout, 7, 9)
    i, j = np.arange(31)[:, None], np.arange(36)[None, :]
    want = np.stack([head[i // 7, j // 9] & (j <= i) for head in layout])
    np.testing.assert_array_equal(mask.materialise(slice(0, 31), slice(0, 36))[0], want)
    by_head = mask.live_blocks_by_head(8, 8, q_len=31, kv_len=36)
    assert by_head.tolist() == [brute.blocks(head, 8, 8) for head in want]
    joined = np.where(by_head.min(0) == 2, 2, np.minimum(by_head.max(0), 1))
    np.testing.assert_array_equal(mask.live_blocks(8, 8, q_len=31, kv_len=36), joined)
    assert mask.may_have_dead_rows(31, 36) is bool((~want.any(-1)).any())
    assert mask_from_dict(json.loads(json.dumps(mask.to_dict()))) == mask
    assert "3 heads of 5x4" in str(mask)
    assert Blocks(np.repeat(layout[:1], 3, 0), 7, 9) == Blocks(layout[0], 7, 9)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("how", ["indices", "bools"])
def test_a_choice_means_what_it_says(how, array):
    """Indices beyond the keys, negative ones and repeated ones among them; 45 is a multiple of neither block."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(-2, 9, (2, 3, 6, 4))
    cells = (chosen[..., None, :] == np.arange(7)[:, None]).any(-1)  # [batch, heads, q blocks, kv blocks]
    mask = Blocks(array(chosen.astype(np.int32) if how == "indices" else cells), 8, 7) & Causal()
    assert isinstance(mask.masks[0], ChosenBlocks)
    i, j = np.arange(45)[:, None], np.arange(45)[None, :]
    want = cells[:, :, i // 8, j // 7] & (j <= i)
    np.testing.assert_array_equal(np.asarray(mask.materialise(slice(0, 45), slice(0, 45))), want)
    part = jax.jit(lambda m: m.materialise(slice(5, 20), slice(30, 45)))(mask)
    np.testing.assert_array_equal(np.asarray(part), want[:, :, 5:20, 30:45])
    assert mask.features() == {"causal", "chosen_blocks"}
    assert str(mask) == "chosen_blocks(block_q=8, block_kv=7) & causal"
    structure, leaves = mask.split()
    assert leaves[0].dims == ("batch", "heads", "q_blocks", "chosen")
    assert hash(structure) == hash(mask.split()[0])
    assert structure.merge([leaves[0].array]).describe() == str(mask)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 8), st.integers(0, 8), st.integers(0, 99))
@settings(deadline=None, max_examples=5)
def test_bounds_of_blocks_are_exact(block_q, block_kv, q_start, k_start, seed):
    """Of a choice and of a layout, with a first key that is traced and one that isn't."""
    rng = np.random.default_rng(seed)
    layout, cells = rng.random((2, 6, 4)) < 0.5, np.zeros((2, 48, 44), bool)
    cells[:, :42, :36] = layout.repeat(7, 1).repeat(9, 2)
    chosen = jnp.asarray([[np.where(row, np.arange(4), -1) for row in head] for head in layout])[None]
    seen = cells[:, q_start : q_start + 30, k_start : k_start + 33]
    want = [brute.blocks(head, block_q, block_kv) for head in seen]
    first = np.arange(0, 30, block_q)[:, None], np.arange(0, 33, block_kv)[None, :]
    ends = [np.minimum(a + n, size) - 1 for a, n, size in zip(first, (block_q, block_kv), (30, 33), strict=True)]

    def kinds(mask, row_start, key_start):
        rows, keys = (Extent(a + s, b + s) for a, b, s in zip(first, ends, (row_start, key_start), strict=True))
        some, every = mask.block_bounds(BlockGrid(rows, rows, keys, block_q, block_kv))
        return np.asarray(some)[0].astype(np.int8) + np.asarray(every)[0]

    for mask in (Blocks(layout, 7, 9), Blocks(chosen, 7, 9)):
        assert np.asarray(kinds(mask, q_start, k_start)).tolist() == want
        traced = kinds(mask, jnp.int32(q_start), jnp.int32(k_start))
        assert np.asarray(traced).tolist() == want


def test_a_layout_of_128k_takes_milliseconds():
    layout = np.random.default_rng(0).random((1024, 1024)) < 0.1
    mask = Causal() & Blocks(layout | np.eye(1024, dtype=bool), 128, 128)
    began = time.perf_counter()
    kinds = mask.live_blocks(512, 512, q_len=131072, kv_len=131072)
    assert time.perf_counter() - began < 0.5  # 10 ms on an idle machine
    cells = np.tril(layout | np.eye(1024, dtype=bool)).reshape(256, 4, 256, 4).any((1, 3))
    np.testing.assert_array_equal(kinds > 0, cells)


def test_bigbird():
    mask = bigbird(500, block=10, window=3, first=2, random=4, seed=3, heads=2)
    assert mask.layout.shape == (2, 50, 50)
    i, j = np.arange(50)[:, None], np.arange(50)[None, :]
    fixed = (abs(i - j) <= 1) | (i < 2) | (j < 2)
    assert mask.layout[:, fixed].all()
    assert ((mask.layout & ~fixed).sum(-1)[:, 2:] == 4).all()
    assert (mask.layout[0] != mask.layout[1]).any()
    assert mask == bigbird(500, block=10, window=3, first=2, random=4, seed=3, heads=2)
    assert mask != bigbird(500, block=10, window=3, first=2, random=4, seed=4, heads=2)
    # Row 2 is the first with blocks to draw from; the numbers of NumPy's legacy generator don't change.
    drawn = np.random.RandomState(3).permutation(np.arange(4, 50))[:4]
    assert np.flatnonzero((mask.layout & ~fixed)[0, 2]).tolist() == sorted(drawn) == [22, 29, 37, 47]


def test_patterns_by_their_definitions():
    i, j = np.arange(70)[:, None], np.arange(70)[None, :]
    a, b = i // 8, j // 8
    wanted = {
        longformer(70, window=10): abs(i - j) <= 5,
        longformer(70, window=10, first=3): (abs(i - j) <= 5) | (i < 3) | (j < 3),
        local_blocks(70, block=8, window=2): (j <= i) & (a - b < 2),
        strided_blocks(70, block=8, stride=3): (j <= i) & ((a - b) % 3 == 0),
        dilated_blocks(70, block=8, window=2, dilation=2): (abs(a - b) <= 4) & ((a - b) % 2 == 0),
        a_shape(first=4, window=6): (j <= i) & ((j < 4) | (j > i - 6)),
    }
    for mask, want in wanted.items():
        np.testing.assert_array_equal(mask.materialise(slice(0, 70), slice(0, 70))[0, 0], want)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks(np.ones((2, 2)), 8, 8), r"array of float64; wanted a NumPy bool array, .*astype\(bool\)"),
        (lambda: Blocks(np.ones(3, bool), 8, 8), r"shape \(3,\); wanted a NumPy bool array"),
        (lambda: Blocks(np.ones((0, 2), bool), 8, 8), r"shape \(0, 2\)"),
        (lambda: Blocks(jnp.ones((2, 2), bool), 8, 8), r"np\.asarray\(layout\)"),
        (lambda: Blocks("bigbird", 8, 8), "is a str; wanted"),
        (lambda: Blocks([[True], [True, False]], 8, 8), "different lengths"),
        (lambda: Blocks(["01", "0x"], 8, 8), "'0x'; wanted a string of 0 and 1"),
        (lambda: Blocks(np.ones((2, 2), bool), 0, 8), "block_q=0; wanted an int of at least 1"),
        (lambda: Blocks(np.ones((2, 2), bool), 8, 8.0), "block_kv=8.0 is a float"),
        (lambda: Blocks(jnp.ones((1, 1, 2, 2)), 8, 8), "dtype float32; wanted integers"),
        (lambda: Blocks(np.zeros((1, 0, 2, 2), int), 8, 8), r"shape \(1, 0, 2, 2\)"),
        (lambda: Blocks(np.ones((2, 2), bool), 8, 8).materialise(slice(0, 17), slice(0, 4)), "16 rows; wanted 17"),
        (lambda: Blocks(np.ones((2, 2), bool), 8, 8).live_blocks(4, 4, q_len=17, kv_len=4), "16 rows; wanted 17"),
        (lambda: Blocks(np.zeros((1, 1, 2, 2), int), 8, 8).to_dict(), "holds arrays"),
        (lambda: bigbird(64, window=2), "odd number of blocks"),
        (lambda: bigbird(64, heads=0), "heads=0; wanted an int of at least 1"),
        (lambda: mask_from_dict({"kind": "chosen_blocks"}), "a config can't"),
        (lambda: mask_from_dict({"kind": "blocks", "layout": ["1"], "block_q": 4}), 'add "block_kv"'),
    ],
)
def test_refusals(make, message):
    with pytest.raises(MaskError, match=message):
        make()
