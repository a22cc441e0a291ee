"""Attention to selected keys: both paths against the dense masked formula in float64, and its derivative by each element."""

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
from attnops.operators.selection import selected_attention
from attnops.operators.selection.kernel.selected_sizes import choose

B, Q, KV, HEADS, DIM, VALUE, K = 2, 19, 43, 4, 8, 6, 7
SCALE = 0.4
RNG = np.random.default_rng(11)
SINKS = np.array([0.3, -1.0, 2.0, -4.0], np.float32)
PATHS: dict[str, dict[str, Any]] = {
    "gather": {"path": "gather", "block_q": 4},
    "tiles": {"path": "tiles", "block_q": 8, "block_kv": 16},
    "one block": {"path": "tiles", "block_q": 32, "block_kv": 64},
    "gather all": {"path": "gather", "block_q": 19},
    "chosen": {},
}


def _positions(q_len: int = Q, kv_len: int = KV, k: int = K) -> np.ndarray:
    """Distinct positions, in some rows fewer than k, in one none; unused slots anywhere."""
    chosen = np.full((B, q_len, k), -1, np.int32)
    for b, i in np.ndindex(B, q_len):
        count = min(int(RNG.integers(0, k + 1)) if i % 3 else k, kv_len)
        slots = RNG.permutation(k)[:count]
        chosen[b, i, slots] = RNG.permutation(kv_len)[:count]
    chosen[0, 2] = -1
    chosen[1, 3, 0] = kv_len + 5  # isn't a key's
    return chosen


def _arrays(kv_heads: int, dtype: Any = np.float32, q_len: int = Q, kv_len: int = KV) -> tuple[Any, Any, Any]:
    shapes = (B, q_len, HEADS, DIM), (B, kv_len, kv_heads, DIM), (B, kv_len, kv_heads, VALUE)
    query, key, value = (jnp.asarray(RNG.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


CASES = covering(itertools.product(PATHS, (1, 2, 4), (None, 3.0), (False, True), (False, True)), 2)


@pytest.mark.parametrize(("path", "kv_heads", "cap", "sinks", "prefix"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output(path: str, kv_heads: int, cap: float | None, sinks: bool, prefix: bool, dtype: str) -> None:
    query, key, value = _arrays(kv_heads, dtype)
    positions = _positions()
    options = PATHS[path] | ({"value_dim": VALUE} if prefix else {})
    sink = SINKS if sinks else None
    output, lse = selected_attention(
        query,
        key,
        None if prefix else value,
        jnp.asarray(positions),
        softmax_scale=SCALE,
        soft_cap=cap,
        sinks=None if sink is None else jnp.asarray(sink),
        **options,
    )
    seen = reference.chosen_keys(positions, KV)
    values = _wide(key)[..., :VALUE] if prefix else _wide(value)
    wanted, wanted_lse = reference.attention(_wide(query), _wide(key), values, seen, SCALE, cap, sink)
    assert output.dtype == dtype
    assert lse.dtype == np.float32
    most = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(_wide(output), wanted, atol=most, rtol=most)
    np.testing.assert_allclose(_wide(lse), wanted_lse, atol=3e-6, rtol=1e-6)
    if not sinks:
        assert (_wide(output)[0, 2] == 0).all()
        assert (_wide(lse)[0, :, 2] == -np.inf).all()


@pytest.mark.parametrize(("path", "kv_heads", "cap", "sinks", "prefix"), CASES)
def test_gradient(path: str, kv_heads: int, cap: float | None, sinks: bool, prefix: bool) -> None:
    """Of a function of output and lse, by every element of every array."""
    q_len, kv_len = 5, 11
    query, key, value = _arrays(kv_heads, q_len=q_len, kv_len=kv_len)
    positions = _positions(q_len, kv_len, 4)
    of_output, of_lse = RNG.standard_normal((B, q_len, HEADS, VALUE)), RNG.standard_normal((B, HEADS, q_len))
    seen = reference.chosen_keys(positions, kv_len)
    if not sinks:
        of_lse = np.where(seen.any(-1)[:, None], of_lse, 0)
    arrays = {"query": query, "key": key} | ({} if prefix else {"value": value})
    arrays |= {"sinks": jnp.asarray(SINKS)} if sinks else {}
    options = PATHS[path] | ({"value_dim": VALUE} if prefix else {})

    def ours(arrays: dict[str, Any]) -> Any:
        output, lse = selected_attention(
            **({"value": None} | arrays), positions=jnp.asarray(positions), softmax_scale=SCALE, soft_cap=cap, **options
        )
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        return (output * of_output.astype(np.float32)).sum() + (lse * of_lse.astype(np.float32)).sum()

    def by_definition(query: Any, key: Any, value: Any = None, sinks: Any = None) -> Any:
        value = key[..., :VALUE] if prefix else value
        output, lse = reference.attention(query, key, value, seen, SCALE, cap, sinks)
        return (output * of_output).sum() + np.where(of_lse != 0, lse * of_lse, 0).sum()

    with np.errstate(invalid="ignore"):
        wanted = reference.gradients(by_definition, arrays)
    got = jax.grad(ours)(arrays)
    for name, gradient in got.items():
        np.testing.assert_allclose(_wide(gradient), wanted[name], atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("path", PATHS)
def test_what_no_query_selects_has_no_effect(path: str) -> None:
    """NaN and infinity in a key that nobody selects touch neither output nor gradient; rows without keys have gradient 0."""
    query, key, value = _arrays(2)
    positions = _positions()
    positions[np.isin(positions, [9, 30])] = -1

    def loss(query: Any, key: Any, value: Any) -> Any:
        output, lse = selected_attention(
            query, key, value, jnp.asarray(positions), softmax_scale=SCALE, sinks=None, **PATHS[path]
        )
        return (output**2).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    spoilt = key.at[:, 9].set(jnp.nan), value.at[:, 30].set(jnp.inf)
    wanted = jax.value_and_grad(loss, (0, 1, 2))(query, key, value)
    got = jax.value_and_grad(loss, (0, 1, 2))(query, *spoilt)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), got, wanted)
    assert not np.asarray(got[1][0])[0, 2].any()


@pytest.mark.parametrize("path", ["gather", "tiles"])
def test_nothing_is_selected(path: str) -> None:
    query, key, value = _arrays(1)
    none = jnp.full((B, Q, 3), -1, jnp.int32)

    def loss(*arrays: Any) -> Any:
        output, lse = selected_attention(*arrays, none, softmax_scale=SCALE, path=path)
        return output.sum() + jnp.exp(lse).sum()

    value_, grads = jax.value_and_grad(loss, (0, 1, 2))(query, key, value)
    assert value_ == 0
    assert all((np.asarray(g) == 0).all() for g in grads)


@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty_sizes(sizes: tuple[int, int, int]) -> None:
    q_len, kv_len, k = sizes
    query, key, value = _arrays(2, q_len=q_len, kv_len=kv_len)
    positions = jnp.full((B, q_len, k), -1, jnp.int32)
    output, lse = selected_attention(query, key, value, positions, softmax_scale=1.0)
    assert output.shape == (B, q_len, HEADS, VALUE)
    assert (np.asarray(output) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize("path", ["gather", "tiles"])
def test_transformations(path: str) -> None:
    query, key, value = _arrays(2)
    positions = jnp.asarray(_positions())

    def attend(*x: Any) -> Any:
        return selected_attention(*x, softmax_scale=SCALE, **PATHS[path])

    wanted = attend(query, key, value, positions)
    compiled = jax.jit(attend)(query, key, value, positions)
    mapped = jax.vmap(attend)(*(x[:, None] for x in (query, key, value, positions)))
    for got in (compiled, jax.tree.map(lambda x: x[:, 0], mapped)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, wanted)
    with pytest.raises(InputTypeError, match="selected attention: no derivative in forward mode"):
        jax.jvp(lambda x: attend(x, key, value, positions)[0], (query,), (query,))
    with pytest.raises(RefusedError, match="selected attention: no second derivative"):
        jax.grad(lambda x: jax.grad(lambda y: attend(y, key, value, positions)[0].sum())(x).sum())(query)


def test_the_path_of_less_work() -> None:
    """Decoding from a long cache gathers, also latents for 128 heads; where most keys are selected, tiles are masked."""
    assert choose(1, 32768, 2048, group=128, dim=576).path == "gather"
    assert choose(32768, 32768, 2048, group=128, dim=576).path == "gather"
    assert choose(4096, 4096, 2048, group=8, dim=256).path == "tiles"
    assert choose(2048, 2048, 2048, group=128, dim=576).path == "tiles"
    assert choose(1, 2048, 2048, group=1, dim=256).path == "tiles"


@pytest.mark.parametrize("path", ["gather", "tiles"])
def test_memory_of_latents(path: str) -> None:
    """32 heads over latents of 576 numbers: gathered for all queries at once they would take 4.5 GiB."""
    shapes = ((1, 1024, 32, 576), (1, 32768, 1, 576))
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    positions = jax.ShapeDtypeStruct((1, 1024, 2048), np.int32)

    def attend(query: Any, key: Any, positions: Any) -> Any:
        return selected_attention(query, key, None, positions, softmax_scale=0.1, value_dim=512, path=path)[0]

    def loss(query: Any, key: Any, positions: Any) -> Any:
        return jax.grad(lambda q, k: attend(q, k, positions).sum(), (0, 1))(query, key)

    forward = jax.jit(attend).lower(*arrays, positions).compile().memory_analysis()
    assert forward.temp_size_in_bytes < 160 << 20
    backward = jax.jit(loss).lower(*arrays, positions).compile().memory_analysis()
    assert backward.temp_size_in_bytes < 640 << 20


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"value": None}, InputError, "value_dim is None"),
        ({"value_dim": 3}, InputError, "value_dim is 3"),
        ({"value": None, "value_dim": 9}, InputError, "value_dim is 9"),
        ({"value": jnp.ones((B, KV, 1, VALUE))}, InputError, "value has shape"),
        ({"key": jnp.ones((B, KV, 3, DIM))}, InputError, "key has shape"),
        ({"key": jnp.ones((B, KV, DIM))}, InputError, "and key"),
        ({"key": jnp.ones((B, KV, 2, DIM), np.int8)}, InputTypeError, "key is int8"),
        ({"positions": jnp.ones((B, Q, K))}, InputError, "positions is"),
        ({"positions": jnp.ones((B, 1, K), np.int32)}, InputError, "positions is"),
        ({"sinks": jnp.ones((2,))}, InputError, "sinks has shape"),
        ({"soft_cap": 0.0}, InputError, "soft_cap is 0.0"),
        ({"path": "dense"}, InputError, "path is 'dense'"),
        ({"block_q": 0}, InputError, "block_q is 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    query, key, value = _arrays(2)
    call = {"query": query, "key": key, "value": value, "positions": jnp.asarray(_positions()), "softmax_scale": SCALE}
    with pytest.raises(error, match=message):
        selected_attention(**(call | change))
