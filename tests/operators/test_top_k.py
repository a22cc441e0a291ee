"""The keys that an indexer selects: exactly the best ones, against a sort in Python; and the memory that it takes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selection_reference as reference
from covering import covering

from attnops.errors import InputError, InputTypeError
from attnops.operators.selection import Selection, top_k_keys
from attnops.operators.selection.kernel.ordering import greatest, nth_bit, ordered

B, Q, KV, HEADS, DIM = 2, 37, 83, 3, 8
RNG = np.random.default_rng(5)
SEGMENTS = np.sort(RNG.integers(0, 3, (B, KV)), 1).astype(np.int32)

CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "offset": {"query_offset": KV - Q},
    "offsets": {"query_offset": np.array([3, 46], np.int32)},
    "window": {"query_offset": 20, "sliding_window": (9, 0)},
    "around": {"causal": False, "sliding_window": 6},
    "ahead": {"causal": False, "sliding_window": (None, 4)},
    "lengths": {"causal": False, "kv_lengths": np.array([0, 50], np.int32)},
    "segments": {"query_offset": 46, "q_segment_ids": SEGMENTS[:, 46:], "kv_segment_ids": SEGMENTS},
    "positions": {"q_positions": RNG.integers(0, KV, (B, Q)).astype(np.int32)},
    "positions and window": {"q_positions": RNG.integers(0, KV, (B, Q)).astype(np.int32), "sliding_window": (7, 2)},
}
BLOCKS: dict[str, dict[str, int]] = {
    "chosen": {},
    "8x32": {"block_q": 8, "block_kv": 32},
    "37x96": {"block_q": 37, "block_kv": 96},
    "64x64": {"block_q": 64, "block_kv": 64},
}


def _arrays(dtype: Any = np.float32, key_dtype: Any = None, most: int = 2) -> tuple[Any, Any, Any]:
    """Small whole numbers: float32 has their scores exactly, and many are equal."""
    query = RNG.integers(-most, most + 1, (B, Q, HEADS, DIM))
    key = RNG.integers(-most, most + 1, (B, KV, DIM))
    weights = RNG.integers(-1, 3, (B, Q, HEADS))
    return jnp.asarray(query, dtype), jnp.asarray(key, key_dtype or dtype), jnp.asarray(weights, np.float32)


def _check(got: Selection, score: np.ndarray, call: dict[str, Any], k: int) -> None:
    positions, counts = reference.best(score, reference.visible_keys(*score.shape, **call), k)
    np.testing.assert_array_equal(np.asarray(got.counts), counts)
    np.testing.assert_array_equal(np.asarray(got.positions), positions)


@pytest.mark.parametrize(("call", "k", "blocks"), covering(itertools.product(CALLS, (1, 7, 40, 83, 100), BLOCKS), 2))
def test_selects_exactly_the_best(call: str, k: int, blocks: str) -> None:
    query, key, weights = _arrays()
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in CALLS[call].items()}
    got = top_k_keys(query, key, weights, k=k, softmax_scale=0.5, **options, **BLOCKS[blocks])
    assert got.positions.dtype == got.counts.dtype == np.int32
    _check(got, reference.scores(query, key, weights, 0.5), CALLS[call], k)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("key_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_dtypes(dtype: str, key_dtype: str, scaled: bool) -> None:
    query, key, weights = _arrays(dtype, key_dtype)
    scale = jnp.asarray(2.0 ** RNG.integers(-3, 4, (B, KV)), np.float32) if scaled else None
    got = top_k_keys(query, key, weights, k=9, softmax_scale=1.0, key_scale=scale, block_q=16, block_kv=32)
    _check(got, reference.scores(query, key, weights, 1.0, scale), {}, 9)


def test_int8_of_full_range() -> None:
    query, key, weights = _arrays(np.int8, np.int8, most=127)
    got = top_k_keys(query, key, weights, k=9, softmax_scale=1.0, causal=False)
    _check(got, reference.scores(query, key, weights, 1.0), {"causal": False}, 9)


def test_all_scores_equal_select_the_first() -> None:
    query, key, weights = _arrays()
    got = top_k_keys(query * 0, key, weights, k=5, softmax_scale=1.0, causal=False, block_q=8, block_kv=32)
    np.testing.assert_array_equal(np.asarray(got.positions), np.broadcast_to(np.arange(5), (B, Q, 5)))


def test_negative_zero_equals_zero() -> None:
    """relu gives 0, which a negative weight makes -0: it ties with 0, and the lower position is selected."""
    query = jnp.ones((1, 1, 1, 1))
    key = jnp.asarray([-1.0, 0.0, -2.0, 3.0])[None, :, None]
    got = top_k_keys(query, key, -jnp.ones((1, 1, 1)), k=2, softmax_scale=1.0, causal=False)
    assert got.positions.tolist() == [[[0, 1]]]


def test_nan_and_infinity() -> None:
    """NaN after every number, also -inf; of several the lower position. What isn't visible is never selected."""
    score = np.full((1, 1, 70), -5.0)
    score[0, 0, [0, 3, 64]] = np.nan
    score[0, 0, [1, 65]] = -np.inf
    score[0, 0, 66] = np.inf
    key = np.where(np.isnan(score), np.nan, -score)[0, 0]
    query = jnp.asarray([[[[1.0], [-1.0]]]], jnp.float32)  # -relu(key) + relu(-key) is -key
    weights = jnp.asarray([[[-1.0, 1.0]]], jnp.float32)
    keys = jnp.asarray(key, jnp.float32)[None, :, None]
    for k in (1, 2, 60, 66, 68, 70):
        got = top_k_keys(query, keys, weights, k=k, softmax_scale=1.0, causal=False, block_q=1, block_kv=32)
        _check(got, score, {"causal": False}, k)
    got = top_k_keys(query, keys, weights, k=3, softmax_scale=1.0, kv_lengths=jnp.asarray([2]), causal=False)
    assert got.positions.tolist() == [[[0, 1, -1]]]
    assert got.counts.tolist() == [[2]]


@pytest.mark.parametrize("blocks", ["chosen", "8x32"])
def test_random_scores_are_the_greatest(blocks: str) -> None:
    """float32 rounds, so the reference can't name the keys: those selected aren't less than any other, up to rounding."""
    query, key, weights = (
        jnp.asarray(RNG.standard_normal(s), np.float32) for s in ((B, Q, 3, 8), (B, KV, 8), (B, Q, 3))
    )
    got = np.asarray(
        top_k_keys(query, key, weights, k=10, softmax_scale=0.3, query_offset=46, **BLOCKS[blocks]).positions
    )
    score, seen = reference.scores(query, key, weights, 0.3), reference.visible_keys(B, Q, KV, query_offset=46)
    for b in range(B):
        for i in range(Q):
            chosen = np.isin(np.arange(KV), got[b, i])
            assert chosen.sum() == min(10, seen[b, i].sum())
            assert not (chosen & ~seen[b, i]).any()
            others = seen[b, i] & ~chosen
            assert score[b, i][chosen].min() >= score[b, i][others].max(initial=-np.inf) - 1e-5


@pytest.mark.parametrize("under", ["jit", "vmap", "grad"])
def test_transformations(under: str) -> None:
    query, key, weights = _arrays()
    score = reference.scores(query, key, weights, 1.0)

    def select(query: Any, key: Any, weights: Any) -> Selection:
        return top_k_keys(query, key, weights, k=6, softmax_scale=1.0, block_q=16, block_kv=32)

    if under == "jit":
        _check(jax.jit(select)(query, key, weights), score, {}, 6)
    elif under == "vmap":
        got = jax.vmap(select)(query[:, None], key[:, None], weights[:, None])
        _check(Selection(got.positions[:, 0], got.counts[:, 0]), score, {}, 6)
    else:
        grads = jax.grad(lambda *x: select(*x).positions.astype(jnp.float32).sum(), (0, 1, 2))(query, key, weights)
        assert all(not np.asarray(g).any() for g in grads)


def test_no_keys_and_no_queries() -> None:
    for q_len, kv_len in ((0, 4), (3, 0)):
        got = top_k_keys(
            jnp.ones((1, q_len, 1, 2)), jnp.ones((1, kv_len, 2)), jnp.ones((1, q_len, 1)), k=2, softmax_scale=1.0
        )
        assert got.positions.shape == (1, q_len, 2)
        assert (np.asarray(got.positions) == -1).all()
        assert not np.asarray(got.counts).any()


@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("length", [32768, 32767])
def test_memory_of_long_sequences(length: int, heads: int) -> None:
    """The scores of 32768 queries and keys would be 4 GiB."""
    shapes = ((1, length, heads, 128), (1, length, 128), (1, length, heads))
    arrays = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    select = jax.jit(lambda *x: top_k_keys(*x, k=2048, softmax_scale=1.0))
    assert select.lower(*arrays).compile().memory_analysis().temp_size_in_bytes < 256 << 20


def test_ordered_numbers() -> None:
    values = np.array([-np.inf, -3e38, -1.0, -1e-30, 0.0, 1e-30, 1.0, 3e38, np.inf], np.float32)
    order = np.asarray(ordered(jnp.asarray(values), jnp.ones(9, bool)))
    assert (np.diff(order.astype(np.int64)) > 0).all()
    special = jnp.asarray([np.nan, -np.nan, -np.inf, 0.0, -0.0], np.float32)
    nan, other_nan, least, zero, minus_zero = np.asarray(ordered(special, jnp.ones(5, bool)))
    assert 0 < nan == other_nan < least
    assert zero == minus_zero
    assert not np.asarray(ordered(special, jnp.zeros(5, bool))).any()


def test_greatest_is_the_same_by_sorting() -> None:
    order = RNG.integers(0, 6, (50, 33)).astype(np.uint32)
    for k in (1, 5, 33, 50):
        got = np.asarray(greatest(jnp.asarray(order), k))
        for row, chosen in zip(order, got, strict=True):
            wanted = sorted(sorted(np.flatnonzero(row), key=lambda j, row=row: (-int(row[j]), j))[:k])
            assert np.flatnonzero(chosen).tolist() == wanted


def test_nth_bit() -> None:
    words = RNG.integers(1, 2**32, 40, dtype=np.uint64).astype(np.uint32)
    got = np.asarray(
        nth_bit(*(jnp.asarray(x) for x in np.broadcast_arrays(words[:, None], np.arange(1, 33, dtype=np.int32))))
    )
    for word, row in zip(words, got, strict=True):
        places = [i for i in range(32) if int(word) >> i & 1]
        assert row[: len(places)].tolist() == places


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": 0}, InputError, "k is 0"),
        ({"k": 1.0}, InputError, "k is 1.0"),
        ({"block_kv": 33}, InputError, "block_kv is 33"),
        ({"block_q": 0}, InputError, "block_q is 0"),
        ({"sliding_window": -1}, InputError, "sliding_window is -1"),
        ({"weights": jnp.ones((B, Q, 2))}, InputError, "weights has shape"),
        ({"weights": jnp.ones((B, Q, HEADS), np.int32)}, InputTypeError, "weights is int32"),
        ({"index_key": jnp.ones((B, KV, 9))}, InputError, "index_key has shape"),
        ({"index_query": jnp.ones((B, Q, DIM))}, InputError, "index_query has shape"),
        ({"index_query": [1]}, InputTypeError, "index_query is a list"),
        ({"key_scale": jnp.ones((B, KV, 1))}, InputError, "key_scale has shape"),
        ({"kv_lengths": jnp.ones((3,), np.int32)}, InputError, "kv_lengths is"),
        ({"q_segment_ids": jnp.ones((B, Q), np.int32)}, InputError, "wanted q_segment_ids and kv_segment_ids"),
        ({"q_positions": jnp.ones((B, Q), np.int32), "query_offset": 3}, InputError, "query_offset and q_positions"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    query, key, weights = _arrays()
    call = {"index_query": query, "index_key": key, "weights": weights, "k": 4, "softmax_scale": 1.0} | change
    with pytest.raises(error, match=message):
        top_k_keys(**call)
