"""score= of the adapters, against the frameworks' own attention with the same numbers as a bias."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ALiBi, Clip, ConfigError, RelativeBias, SoftCap

LENGTH, HEADS, FEATURES = 6, 2, 8
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, FEATURES)), jnp.float32)
TABLE = jnp.asarray(np.random.default_rng(1).standard_normal((5, HEADS)), jnp.float32)
PLAIN = {"operation": "vanilla"}
OFF = PLAIN | {"enabled": False}
ROWS = np.clip(np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None], -3, 1) + 3


def _bias(table: Any) -> Any:
    """[1, heads, q, kv]: a row of the table for each distance from -3 to 1."""
    return jnp.moveaxis(table[ROWS], -1, 0)[None]


def _attended(q: Any, k: Any, v: Any, table: Any) -> Any:
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + _bias(table)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)


def _same(ours: Any, theirs: Any) -> None:
    """Values and gradients of two functions of the table."""
    for f, g in (
        (ours, theirs),
        (jax.grad(lambda t: (ours(t) ** 2).sum()), jax.grad(lambda t: (theirs(t) ** 2).sum())),
    ):
        np.testing.assert_allclose(f(TABLE), g(TABLE), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("lib", ["linen", "nnx"])
def test_flax(lib: str) -> None:
    flax = pytest.importorskip("flax", reason="pip install 'attnops[flax]'")
    from attnops.adapters import flax_linen, flax_nnx

    adapter: Any = flax_linen if lib == "linen" else flax_nnx
    module = flax.linen if lib == "linen" else flax.nnx
    q, k, v = (X.reshape(2, LENGTH, HEADS, -1) * n for n in (1.0, 0.5, 2.0))
    score = RelativeBias(TABLE, Clip(3, 1))
    function = adapter.attention_fn(PLAIN, score=score)
    assert function == adapter.attention_fn(PLAIN, score=score)
    assert hash(function) == hash(adapter.attention_fn(PLAIN, score=score))
    assert function != adapter.attention_fn(PLAIN)

    def ours(table: Any) -> Any:
        call = adapter.attention_fn(PLAIN, score=RelativeBias(table, Clip(3, 1)))
        return call(q, k, v, deterministic=True)

    _same(ours, lambda table: module.dot_product_attention(q, k, v, bias=_bias(table), deterministic=True))
    with pytest.raises(ConfigError, match="takes no score"):
        adapter.attention_fn(OFF, score=score)


def test_a_declared_score_in_flax() -> None:
    linen = pytest.importorskip("flax.linen", reason="pip install 'attnops[flax]'")
    from attnops.adapters.flax_linen import attention_fn

    q = X.reshape(2, LENGTH, HEADS, -1)
    declared = PLAIN | {"call": {"score": {"kind": "alibi", "slopes": [0.5, 0.25]}}}
    distance = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None])
    bias = -jnp.asarray([0.5, 0.25])[None, :, None, None] * jnp.asarray(distance, jnp.float32)[None, None]
    np.testing.assert_allclose(
        attention_fn(declared)(q, q, q, deterministic=True),
        linen.dot_product_attention(q, q, q, bias=bias, deterministic=True),
        atol=2e-6,
    )
    with pytest.raises(ConfigError, match="score: the declaration says alibi"):
        attention_fn(declared, score=SoftCap(2.0))(q, q, q, deterministic=True)


def test_equinox_trains_the_scores_arrays() -> None:
    eqx = pytest.importorskip("equinox", reason="pip install 'attnops[equinox]'")
    from attnops.adapters.equinox import attention_of

    layer = eqx.nn.MultiheadAttention(HEADS, FEATURES, key=jax.random.key(2))
    leaves = len(jax.tree.leaves(layer))
    assert len(jax.tree.leaves(attention_of(layer, PLAIN))) == leaves
    assert len(jax.tree.leaves(attention_of(layer, PLAIN, score=ALiBi()))) == leaves
    scored = attention_of(layer, PLAIN, score=RelativeBias(TABLE, Clip(3, 1)))
    assert len(jax.tree.leaves(scored)) == leaves + 1

    def theirs(table: Any) -> Any:
        parts = (layer.query_proj, layer.key_proj, layer.value_proj)
        heads = (jax.vmap(jax.vmap(part))(X).reshape(2, LENGTH, HEADS, -1) for part in parts)
        return jax.vmap(jax.vmap(layer.output_proj))(_attended(*heads, table).reshape(2, LENGTH, -1))

    def ours(table: Any) -> Any:
        changed = eqx.tree_at(lambda x: x.score.table, scored, table)
        return jax.vmap(lambda x: changed(x, x, x))(X)

    _same(ours, theirs)
    gradient = eqx.filter_grad(lambda model: (jax.vmap(lambda x: model(x, x, x))(X) ** 2).sum())(scored)
    np.testing.assert_allclose(gradient.score.table, jax.grad(lambda t: (theirs(t) ** 2).sum())(TABLE), atol=2e-5)
    with pytest.raises(ConfigError, match="takes no score"):
        attention_of(layer, OFF, score=ALiBi())


@pytest.mark.default_promotion("keras's layers add arrays of different ranks")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_keras() -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="pip install 'attnops[keras]'")
    from attnops.adapters.keras import attention_of

    class Own(keras.layers.Layer):
        """Calls the op itself."""

        def call(self, x: Any) -> Any:
            heads = keras.ops.reshape(x, (2, LENGTH, HEADS, FEATURES // HEADS))
            return keras.ops.dot_product_attention(heads, heads, heads)

    layer = keras.layers.MultiHeadAttention(HEADS, FEATURES // HEADS, use_bias=False)
    layer(X, X)
    own = Own()
    own(X)
    heads = X.reshape(2, LENGTH, HEADS, -1)
    weights = [np.asarray(w.value) for w in layer.weights]
    q, k, v = (jnp.einsum("btf,fhd->bthd", X, w) for w in weights[:3])
    wanted = jnp.einsum("bthd,hdf->btf", _attended(q, k, v, TABLE), weights[3])
    score = RelativeBias(TABLE, Clip(3, 1))
    np.testing.assert_allclose(attention_of(layer, PLAIN, score=score)(X, X), wanted, atol=2e-5)
    np.testing.assert_allclose(
        attention_of(own, PLAIN, score=score)(X), _attended(heads, heads, heads, TABLE), atol=2e-5
    )
    with pytest.raises(ConfigError, match="takes no score"):
        attention_of(layer, OFF, score=score)
