"""The indexer's loss against its formula in float64, and its gradient against the formula's by each element."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selection_reference as reference
from covering import covering

from attnops.errors import InputError, InputTypeError, RefusedError
from attnops.operators.selection import indexer_loss

B, Q, KV, HEADS, DIM, INDEX_HEADS, INDEX_DIM = 2, 7, 13, 4, 5, 3, 4
SCALES: dict[str, float] = {"softmax_scale": 0.6, "index_scale": 0.7}
RNG = np.random.default_rng(3)
SEGMENTS = np.sort(RNG.integers(0, 3, (B, KV)), 1).astype(np.int32)


def _positions() -> np.ndarray:
    chosen = np.full((B, Q, 4), -1, np.int32)
    for b, i in np.ndindex(B, Q):
        count = (4, 4, 2, 1)[i % 4]
        chosen[b, i, :count] = np.sort(RNG.permutation(KV)[:count])
    chosen[0, 3] = -1
    return chosen


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"query_offset": 6},
    "full": {"causal": False},
    "window": {"query_offset": np.array([2, 6], np.int32), "sliding_window": (3, 0)},
    "lengths": {"causal": False, "kv_lengths": np.array([0, 9], np.int32)},
    "segments": {"query_offset": 6, "q_segment_ids": SEGMENTS[:, 6:], "kv_segment_ids": SEGMENTS},
    "gather": {"positions": _positions(), "path": "gather"},
    "tiles": {"positions": _positions(), "path": "tiles"},
    "selected": {"positions": _positions()},
}
BLOCKS: dict[str, dict[str, int]] = {"chosen": {}, "small": {"block_q": 3, "block_kv": 4}}


def _arrays(kv_heads: int, dtype: Any = np.float32) -> dict[str, Any]:
    shapes = {
        "index_query": (B, Q, INDEX_HEADS, INDEX_DIM),
        "index_key": (B, KV, INDEX_DIM),
        "weights": (B, Q, INDEX_HEADS),
        "query": (B, Q, HEADS, DIM),
        "key": (B, KV, kv_heads, DIM),
    }
    return {name: jnp.asarray(RNG.standard_normal(shape), dtype) for name, shape in shapes.items()}


def _seen(call: dict[str, Any]) -> np.ndarray:
    if "positions" in call:
        return reference.chosen_keys(call["positions"], KV)
    return reference.visible_keys(B, Q, KV, **call)


def _options(call: dict[str, Any], blocks: str) -> dict[str, Any]:
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in call.items()} | BLOCKS[blocks]


@pytest.mark.parametrize(
    ("call", "blocks", "kv_heads", "cap", "known"),
    covering(itertools.product(CALLS, BLOCKS, (1, 2, 4), (None, 2.0), (False, True)), 2),
)
def test_loss_and_gradient(call: str, blocks: str, kv_heads: int, cap: float | None, known: bool) -> None:
    arrays, seen = _arrays(kv_heads), _seen(CALLS[call])
    lse = RNG.uniform(2, 4, (B, HEADS, Q)).astype(np.float32) if known else None
    learned = {name: arrays.pop(name) for name in ("index_query", "index_key", "weights")}

    def ours(learned: dict[str, Any], constant: dict[str, Any]) -> Any:
        given = None if lse is None else jnp.asarray(lse)
        return indexer_loss(**learned, **constant, **SCALES, soft_cap=cap, lse=given, **_options(CALLS[call], blocks))

    def by_definition(**learned: Any) -> Any:
        wide = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
        return reference.indexer_loss(**learned, **wide, seen=seen, scale=0.6, index_scale=0.7, soft_cap=cap, lse=lse)

    loss, (got, of_constant) = jax.value_and_grad(ours, (0, 1))(learned, arrays)
    assert loss.dtype == np.float32
    exact = by_definition(**{name: np.asarray(x, np.float64) for name, x in learned.items()})
    np.testing.assert_allclose(float(loss), exact, rtol=2e-6, atol=2e-6)
    wanted = reference.gradients(by_definition, learned)
    for name, gradient in got.items():
        np.testing.assert_allclose(np.asarray(gradient), wanted[name], rtol=2e-5, atol=3e-6, err_msg=name)
    assert all(not np.asarray(x).any() for x in of_constant.values())


@pytest.mark.parametrize("call", ["causal", "gather", "tiles"])
def test_bfloat16(call: str) -> None:
    arrays = _arrays(2, jnp.bfloat16)
    loss, grads = jax.value_and_grad(lambda x: indexer_loss(**x, **SCALES, **_options(CALLS[call], "small")))(arrays)
    wide = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    wanted = reference.indexer_loss(**wide, seen=_seen(CALLS[call]), scale=0.6, index_scale=0.7)
    np.testing.assert_allclose(float(loss), wanted, rtol=1e-4)
    assert all(x.dtype == jnp.bfloat16 for x in grads.values())


def test_an_indexer_that_agrees_has_no_loss() -> None:
    """One main head whose logits are the index scores."""
    arrays = _arrays(1)
    key = jnp.abs(arrays["index_key"])
    query = jnp.abs(arrays["index_query"][:, :, :1])
    weights = jnp.ones((B, Q, 1))
    same = {"index_query": query, "index_key": key, "weights": weights, "query": query, "key": key[:, :, None]}
    loss, grads = jax.value_and_grad(lambda x: indexer_loss(**x, softmax_scale=0.5, index_scale=0.5))(same)
    assert abs(float(loss)) < 1e-6
    assert all(np.abs(np.asarray(x)).max() < 1e-6 for x in grads.values())


@pytest.mark.parametrize(
    "call", [{"causal": False, "kv_lengths": np.zeros(B, np.int32)}, {"positions": np.full((B, Q, 2), -1)}]
)
def test_no_query_has_keys(call: dict[str, Any]) -> None:
    call = {name: jnp.asarray(x, np.int32) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    loss, grads = jax.value_and_grad(lambda x: indexer_loss(**x, **SCALES, **call))(_arrays(2))
    assert loss == 0
    assert all(not np.asarray(x).any() for x in grads.values())


def test_hidden_keys_have_no_effect() -> None:
    """NaN beyond the length of a row."""
    arrays = _arrays(2)
    call = {"causal": False, "kv_lengths": jnp.asarray([5, 9])}
    spoilt = arrays | {name: arrays[name].at[:, 9:].set(jnp.nan) for name in ("index_key", "key")}
    for blocks in BLOCKS:
        wanted, got = (
            jax.value_and_grad(lambda x, blocks=blocks: indexer_loss(**x, **SCALES, **call, **BLOCKS[blocks]))(x)
            for x in (arrays, spoilt)
        )
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), got, wanted)


def test_derivatives_that_there_are_not() -> None:
    arrays = _arrays(2)
    with pytest.raises(InputTypeError, match="indexer_loss: no derivative in forward mode"):
        jax.jvp(
            lambda x: indexer_loss(**(arrays | {"weights": x}), **SCALES), (arrays["weights"],), (arrays["weights"],)
        )
    with pytest.raises(RefusedError, match="indexer_loss: no second derivative"):
        jax.hessian(lambda x: indexer_loss(**(arrays | {"weights": x}), **SCALES))(arrays["weights"])


def test_memory_of_long_sequences() -> None:
    """Over all keys of 16384 queries; the scores alone would be 1 GiB."""
    shapes = {"index_query": (1, 16384, 8, 64), "index_key": (1, 16384, 64), "weights": (1, 16384, 8)}
    shapes |= {"query": (1, 16384, 4, 64), "key": (1, 16384, 1, 64)}
    arrays = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    learned = {name: arrays.pop(name) for name in ("index_query", "index_key", "weights")}
    step = jax.jit(jax.value_and_grad(lambda x, y: indexer_loss(**x, **y, **SCALES)))
    assert step.lower(learned, arrays).compile().memory_analysis().temp_size_in_bytes < 96 << 20


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": jnp.ones((B, Q + 1, HEADS, DIM))}, InputError, "query has shape"),
        ({"key": jnp.ones((B, KV, 3, DIM))}, InputError, "key has shape"),
        ({"key": jnp.ones((B, KV + 1, 2, DIM))}, InputError, "key"),
        ({"lse": jnp.ones((B, Q, HEADS))}, InputError, "lse has shape"),
        ({"positions": jnp.ones((B, Q, 3))}, InputError, "positions is"),
        (
            {"positions": jnp.ones((B, Q, 3), np.int32), "sliding_window": 4},
            InputError,
            "got positions and sliding_window",
        ),
        ({"index_key": jnp.ones((B, KV, INDEX_DIM), np.int8)}, InputTypeError, "index_key is int8"),
        ({"path": "dense", "positions": jnp.ones((B, Q, 3), np.int32)}, InputError, "path is 'dense'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        indexer_loss(**(_arrays(2) | SCALES | change))
