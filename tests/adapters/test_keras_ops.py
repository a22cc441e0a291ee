"""Layers that call keras.ops.dot_product_attention, keras-hub's among them, with a declared attention."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="pip install 'attnops[keras]'")

from attnops import Attention, ConfigError, InputError  # noqa: E402
from attnops.adapters.keras import attention_of  # noqa: E402

# keras' Variable.numpy() says so, with numpy 2.4.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
ops = keras.ops
X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
MASK = np.tril(np.ones((2, 6, 6), bool))


class _Caller(keras.layers.Layer):
    """Attention as keras-hub's layers write it: the op, or the layer's own products where the op can't be used."""

    def __init__(self, fused: bool = True, dropout: float = 0.0, **more: Any) -> None:
        super().__init__(**more)
        self.fused, self.dropout = fused, dropout
        self.query, self.key, self.value = (keras.layers.EinsumDense("btm,mhd->bthd", (None, n, 8)) for n in (4, 2, 2))

    def _use_fused_attention_op(self) -> bool:
        return self.fused and not self.dropout

    def call(self, x: Any, visible: Any = None, causal: bool = False) -> Any:
        query, key, value = (layer(x) for layer in (self.query, self.key, self.value))
        if self._use_fused_attention_op():
            wide = None if visible is None else ops.expand_dims(visible, 1)
            found = ops.dot_product_attention(query, key, value, mask=wide, scale=0.5, is_causal=causal)
        else:
            key, value = (ops.repeat(x, 2, axis=2) for x in (key, value))
            logits = 0.5 * ops.einsum("bqhd,bkhd->bhqk", query, key)
            logits = logits if visible is None else ops.where(visible[:, None], logits, -1e9)
            found = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(logits), value)
        return ops.reshape(found, (*ops.shape(found)[:2], -1))


class _Named(keras.layers.Layer):
    """Took the function by its name, which nothing can replace."""

    op = staticmethod(ops.dot_product_attention)

    def call(self, x: Any) -> Any:
        dot_product_attention = self.op
        return dot_product_attention(x, x, x) if x is None else x

    def unused(self, x: Any) -> Any:
        return ops.dot_product_attention(x, x, x)


@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_that_calls_the_op_runs_the_declared_attention(fused: bool) -> None:
    layer = _Caller(fused=fused)
    wanted = np.asarray(layer(X, visible=MASK))
    attention = Attention("vanilla")
    attention_of(layer, attention)
    np.testing.assert_allclose(layer(X, visible=MASK), wanted, atol=1e-6)
    (plan,) = attention.plans
    assert (plan.problem.q_heads, plan.problem.kv_heads, plan.problem.softmax_scale) == (4, 2, 0.5)
    attention_of(layer, {"operation": "vanilla", "enabled": False})
    np.testing.assert_array_equal(layer(X, visible=MASK), wanted)
    assert len(attention.plans) == 1
    assert not {"call", "_use_fused_attention_op"} & set(vars(layer))


def test_a_causal_call_stays_symbolic_and_other_layers_keep_the_op() -> None:
    declared, plain = _Caller(), _Caller()
    declared(X), plain(X)
    attention = Attention("vanilla")
    attention_of(declared, attention)
    declared(X, causal=True), plain(X, causal=True)
    ops.dot_product_attention(*[np.ones((1, 3, 2, 4), np.float32)] * 3)
    assert [plan.problem.mask.describe() for plan in attention.plans] == ["causal(offset=0)"]


@pytest.mark.default_promotion("keras's layers add arrays of different ranks")
def test_a_model_trains_as_with_the_op() -> None:
    def model() -> Any:
        keras.utils.set_random_seed(0)
        tokens = keras.Input((6, 16))
        made = keras.Model(tokens, keras.layers.Dense(3)(_Caller()(tokens, causal=True)))
        made.compile("sgd", "mse")
        return made

    theirs, ours, attention = model(), model(), Attention("vanilla")
    attention_of(ours, attention)
    for x in (theirs, ours):
        x.fit(X, np.ones((2, 6, 3), np.float32), epochs=2, verbose=0)
    assert attention.plans
    for got, want in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_is_refused() -> None:
    layer = _Caller(dropout=0.1)
    layer(X)
    with pytest.raises(ConfigError, match=r"dropout=0\.1"):
        attention_of(layer, "vanilla")
    silent = _Named()
    silent(X)
    attention_of(silent, "vanilla")
    with pytest.raises(InputError, match="would be ignored"):
        silent(X)
    tokens = keras.Input((6, 16))
    model = keras.Model(tokens, keras.layers.Attention()([keras.layers.Dense(3)(tokens)] * 2))
    with pytest.raises(InputError, match=r"Its layers: Attention, Functional, .*Dense"):
        attention_of(model, "vanilla")


LLAMA = {
    "vocabulary_size": 64,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 48,
}
WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 4}
HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 4}),
    "gemma": ("Gemma", LLAMA | WINDOW | {"head_dim": 8, "attention_logit_soft_cap": 5.0}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}),
    "phi3": ("Phi3", LLAMA),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUB)
def test_keras_hubs_models_predict_differentiate_and_decode_as_before(name: str) -> None:
    pytest.importorskip("keras_hub", reason="pip install keras-hub")
    folder, (kind, config) = f"keras_hub.src.models.{name}.{name}_", HUB[name]
    keras.utils.set_random_seed(0)
    backbone = getattr(importlib.import_module(folder + "backbone"), f"{kind}Backbone")(**config)
    model = getattr(importlib.import_module(folder + "causal_lm"), f"{kind}CausalLM")(
        backbone=backbone, preprocessor=None
    )
    model.compile(sampler="greedy")
    tokens = np.random.default_rng(0).integers(1, 64, (2, 12)).astype(np.int32)
    padding = np.ones_like(tokens)
    padding[1, 8:] = 0
    weights = [w.value for w in backbone.trainable_variables]
    fixed = [w.value for w in backbone.non_trainable_variables]

    def outputs() -> list[Any]:
        def loss(weights: Any) -> Any:
            found, _ = backbone.stateless_call(weights, fixed, {"token_ids": tokens, "padding_mask": padding})
            return (found**2 * padding[..., None]).sum(), found

        (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        prompt = np.where(np.arange(24) < 6, np.resize(tokens, (2, 24)), 0)
        generated = model.generate(
            {"token_ids": prompt, "padding_mask": (prompt > 0).astype(np.int32)}, stop_token_ids=None
        )
        return [np.asarray(found)[padding > 0], *map(np.asarray, gradients), np.asarray(generated["token_ids"])]

    wanted, attention = outputs(), Attention("vanilla")
    attention_of(model, attention)
    got = outputs()
    np.testing.assert_array_equal(got.pop(), wanted.pop())
    for one, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, want, atol=1e-4 * max(1.0, float(np.abs(want).max())))
    assert {(plan.problem.q_len, plan.problem.kv_len) for plan in attention.plans} >= {(12, 12), (1, 24)}
