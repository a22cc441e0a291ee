"""keras.layers.MultiHeadAttention and GroupQueryAttention with a declared attention, against keras' own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="pip install 'attnops[keras]'")

from attnops import Attention, ConfigError, InputError  # noqa: E402
from attnops.adapters.keras import KerasAttention, attention_of  # noqa: E402

MHA, GQA = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
PLAIN = {"operation": "vanilla"}
# keras' Variable.numpy() says so, with numpy 2.4.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
    pytest.mark.default_promotion("keras's layers add arrays of different ranks"),
]

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 6, 8)).astype(np.float32), RNG.normal(size=(2, 4, 8)).astype(np.float32)
FRAMES = RNG.normal(size=(2, 3, 4, 8)).astype(np.float32)
MASK = np.tril(np.ones((2, 6, 6), bool))
GROUPS = {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2}
LAYERS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "self": (MHA, {"num_heads": 2, "key_dim": 4}, (X, X), {}),
    # Without scores keras 3.15 hands it to jax.nn, which refuses a value dim of its own.
    "cross": (MHA, {"num_heads": 2, "key_dim": 4, "value_dim": 3, "output_shape": 5}, (X, Y), {"return_attention_scores": True}),
    "causal": (MHA, {"num_heads": 2, "key_dim": 4}, (X, X), {"use_causal_mask": True}),
    "masked": (MHA, {"num_heads": 2, "key_dim": 4, "use_gate": True}, (X, X), {"attention_mask": MASK}),
    "window": (MHA, {"num_heads": 2, "key_dim": 4, "sliding_window": 2}, (X, X), {"use_causal_mask": True}),
    "scores": (MHA, {"num_heads": 2, "key_dim": 4}, (X, X), {"use_causal_mask": True, "return_attention_scores": True}),
    "grouped": (GQA, GROUPS, (X, Y), {}),
    "grouped_scores": (GQA, GROUPS | {"sliding_window": 3}, (X, X), {"use_causal_mask": True, "return_attention_scores": True}),
    "two_axes": (MHA, {"num_heads": 2, "key_dim": 4}, (FRAMES, FRAMES), {"return_attention_scores": True}),
    "time": (MHA, {"num_heads": 2, "key_dim": 4, "attention_axes": 1}, (FRAMES, FRAMES), {"use_causal_mask": True}),
    "space": (MHA, {"num_heads": 2, "key_dim": 4, "attention_axes": (2,)}, (FRAMES, FRAMES), {}),
    "masked_axes": (
        MHA,
        {"num_heads": 2, "key_dim": 4},
        (FRAMES, FRAMES),
        {"attention_mask": np.arange(3 * 4 * 3 * 4).reshape(1, 1, 3, 4, 3, 4) % 3 > 0},
    ),
}  # fmt: skip


def _outputs(layer: Any, given: Any, call: dict[str, Any]) -> list[np.ndarray]:
    """Outputs, and gradients of their squares in weights and inputs."""
    weights = [w.value for w in layer.trainable_variables]

    def loss(weights: Any, given: Any) -> Any:
        found, _ = layer.stateless_call(weights, [w.value for w in layer.non_trainable_variables], *given, **call)
        found = found if isinstance(found, tuple) else (found,)
        return sum((x**2).sum() for x in found), found

    (_, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, given)
    return [np.asarray(x) for x in jax.tree.leaves((found, gradients))]


QUICK = ("causal", "cross", "grouped_scores", "masked_axes")


@pytest.mark.parametrize("case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in LAYERS])
def test_outputs_scores_and_gradients_are_keras_own(case: str) -> None:
    kind, given, arrays, call = LAYERS[case]
    layer = kind(**given)
    layer(*arrays, **call)
    wanted = _outputs(layer, arrays, call)
    ours = attention_of(layer, PLAIN)
    assert ours is layer
    for got, want in zip(_outputs(layer, arrays, call), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, float(np.abs(want).max())))
    assert isinstance(layer._compute_attention, KerasAttention)


def test_heads_are_those_of_the_layer_and_masks_stay_symbolic() -> None:
    attention = Attention("vanilla")
    grouped = GQA(**GROUPS)
    grouped(X, X)
    attention_of(grouped, attention)(X, X, use_causal_mask=True)
    (plan,) = attention.plans
    assert (plan.problem.q_heads, plan.problem.kv_heads) == (4, 2)
    assert plan.problem.mask.describe() == "causal(offset=0)"
    attention = Attention("vanilla")
    window = MHA(2, 4, sliding_window=2)
    window(X, X)
    attention_of(window, attention)(X, X)
    assert "window(left=1, right=1, offset=0)" in attention.plans[0].problem.mask.describe()


def _model(**given: Any) -> Any:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,))
    x = keras.layers.Embedding(16, 8, mask_zero=True)(tokens)
    x = x + MHA(2, 4, **given)(x, x, use_causal_mask=True)
    model = keras.Model(tokens, keras.layers.Dense(16)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


TOKENS = np.array([[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 0, 0]], np.int32)


def test_a_model_trains_as_with_keras_own_and_what_was_compiled_is_forgotten(tmp_path: Path) -> None:
    theirs, ours, attention = _model(), _model(), Attention("vanilla")
    wanted = ours.predict(TOKENS, verbose=0)
    assert attention_of(ours, attention) is ours
    # What padding queries see differs: 0 here, the mean of the values there.
    counts = TOKENS != 0
    np.testing.assert_allclose(ours.predict(TOKENS, verbose=0)[counts], wanted[counts], atol=1e-5)
    assert attention.plans
    for model in (theirs, ours):
        model.fit(TOKENS, np.roll(TOKENS, -1, 1), epochs=2, verbose=0, sample_weight=counts)
    for got, want in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(TOKENS, verbose=0)[counts], ours.predict(TOKENS, verbose=0)[counts], atol=1e-5
    )


def test_an_adapted_model_is_exported_with_a_batch_of_any_size() -> None:
    model = attention_of(_model(), PLAIN)
    wanted = model.predict(TOKENS, verbose=0)
    weights = [[w.value for w in x] for x in (model.trainable_variables, model.non_trainable_variables)]
    (batch,) = jax.export.symbolic_shape("batch")
    # What keras' export does before it hands the program to tensorflow.
    made = jax.export.export(jax.jit(lambda tokens: model.stateless_call(*weights, tokens)[0]))(
        jax.ShapeDtypeStruct((batch, 6), np.int32)
    )
    for rows in (1, 2):
        np.testing.assert_allclose(made.call(TOKENS[:rows]), wanted[:rows], atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # tensorflow's own
def test_an_adapted_model_is_written_for_tensorflow(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow", reason="model.export writes tensorflow's format")
    model = attention_of(_model(), PLAIN)
    wanted = model.predict(TOKENS, verbose=0)
    model.export(tmp_path / "model", verbose=False)
    loaded = tensorflow.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded.serve(TOKENS[:1].astype(np.float32)), wanted[:1], atol=1e-5)


def test_dropout_is_the_layers() -> None:
    layer = MHA(2, 4, dropout=0.5, seed=3)
    layer(X, X)
    attention_of(layer, PLAIN)
    still = layer(X, X, training=False)
    draws = [np.asarray(layer(X, X, training=True)) for _ in range(300)]
    assert np.abs(draws[0] - draws[1]).max() > 1e-3
    np.testing.assert_allclose(np.mean(draws, 0), still, atol=0.25)
    assert float(np.abs(np.mean(draws, 0) - still).mean()) < float(np.abs(draws[0] - still).mean()) / 5


def test_bfloat16_is_the_policys() -> None:
    layer = MHA(2, 4, dtype="mixed_bfloat16")
    wanted = np.asarray(layer(X, X), np.float32)
    got, scores = attention_of(layer, PLAIN)(X, X, return_attention_scores=True)
    assert got.dtype == scores.dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=0.05)


def test_a_file_declares_and_takes_back(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    layer = MHA(2, 4)
    wanted = np.asarray(layer(X, X))
    file.write_text(json.dumps(PLAIN | {"call": {"sliding_window": [1, 0]}}))
    np.testing.assert_allclose(
        attention_of(layer, file)(X, X),
        layer(X, X, attention_mask=np.tril(np.ones((6, 6), bool)) & ~np.tril(np.ones((6, 6), bool), -2)),
        atol=1e-6,
    )
    assert np.abs(np.asarray(layer(X, X)) - wanted).max() > 1e-3
    file.write_text(json.dumps(PLAIN | {"enabled": False}))
    assert attention_of(layer, file) is layer
    assert "_compute_attention" not in vars(layer)
    np.testing.assert_array_equal(layer(X, X), wanted)


class _Own(MHA):
    def _compute_attention(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        return value, None


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MHA(2, 4)
    with pytest.raises(InputError, match="holds no built MultiHeadAttention"):
        attention_of(keras.layers.Dense(3), PLAIN)
    with pytest.raises(InputError, match="isn't a keras model or layer"):
        attention_of(3, PLAIN)
    with pytest.raises(InputError, match="its own attention"):
        attention_of(_Own(2, 4), PLAIN)
    with pytest.raises(ConfigError, match="flash_attention=True"):
        attention_of(MHA(2, 4, flash_attention=True), PLAIN)
    with pytest.raises(ConfigError, match="return_lse"):
        attention_of(layer, PLAIN | {"call": {"return_lse": True}})
    space = attention_of(MHA(2, 4, attention_axes=2), PLAIN)
    with pytest.raises(InputError, match="apply to axis 1 only"):
        space(FRAMES, FRAMES, use_causal_mask=True)
    with pytest.raises(InputError, match="attention_mask has shape"):
        attention_of(MHA(2, 4), PLAIN)(X, X, attention_mask=np.ones((2, 6, 5), bool))
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ConfigError, match="KERAS_BACKEND=jax"):
        attention_of(layer, PLAIN)
