"""nnx.MultiHeadAttention with our attention_fn, against itself with flax's own."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx", reason="pip install 'attnops[flax]'")

from attnops import Attention, ConfigError, InputError  # noqa: E402
from attnops.adapters.flax_nnx import attention_fn  # noqa: E402
from attnops.operators.kernels.default_promotion import default_promotion  # noqa: E402
from attnops.planning.notes import has_note  # noqa: E402

LENGTH, FEATURES, HEADS = 6, 8, 2
X = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))
with default_promotion():  # flax multiplies floats by bools
    CAUSAL = nnx.make_causal_mask(jnp.ones((2, LENGTH)))
    PADDED = nnx.make_attention_mask(jnp.ones((2, LENGTH)), jnp.arange(LENGTH)[None] < jnp.array([[4], [6]]))
PLAIN = {"operation": "vanilla"}
# The newest flax for jax 0.9, 0.12.3, has neither is_causal and num_kv_heads in its layer nor nnx.capture.
needs_newer_flax = pytest.mark.skipif(
    "is_causal" not in inspect.signature(nnx.MultiHeadAttention.__call__).parameters, reason="flax newer than 0.12.3"
)


def _layer(declared: Any = None, **given: Any) -> Any:
    function = {} if declared is None else {"attention_fn": attention_fn(declared)}
    given = {"num_heads": HEADS, "in_features": FEATURES, "decode": False} | function | given
    return nnx.MultiHeadAttention(**given, rngs=nnx.Rngs(0))


def _both(**given: Any) -> tuple[Any, Any]:
    return _layer(**given), _layer(PLAIN, **given)


def _function(**given: Any) -> Any:
    return attention_fn(PLAIN | given)


@nnx.jit(static_argnums=2)
def _compared(layers: list[Any], x: jax.Array, causal: bool, mask: Any) -> list[Any]:
    """Output, loss and gradients of each layer."""

    def loss(layer: Any, x: jax.Array) -> Any:
        out = layer(x, mask=mask, is_causal=causal)
        return (out.astype(jnp.float32) ** 2).sum(), out

    return [jax.tree.leaves(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)) for layer in layers]


def test_every_argument_of_flaxs_function_is_one_of_ours() -> None:
    own, ours = (inspect.signature(f).parameters for f in (nnx.dot_product_attention, _function()))
    assert {n: (p.default, p.kind) for n, p in own.items()} == {n: (p.default, p.kind) for n, p in ours.items()}


@pytest.mark.default_promotion("flax's own attention promotes bfloat16")
@needs_newer_flax
@pytest.mark.parametrize(
    ("given", "mask", "causal"),
    [
        ({"dtype": jnp.bfloat16}, None, True),
        pytest.param({}, CAUSAL, False, marks=pytest.mark.slow),
        ({"num_heads": 4, "num_kv_heads": 2}, nnx.combine_masks(CAUSAL, PADDED), False),
        pytest.param({}, None, False, marks=pytest.mark.slow),
        pytest.param({"normalize_qk": True}, PADDED, True, marks=pytest.mark.slow),
        pytest.param({"dtype": jnp.bfloat16}, PADDED, False, marks=pytest.mark.slow),
    ],
)
def test_numbers_and_gradients_are_flaxs_own(given: dict[str, Any], mask: Any, causal: bool) -> None:
    x = X.astype(given.get("dtype", X.dtype))
    ours, theirs = _compared(list(reversed(_both(**given))), x, causal, mask)
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
    got, wanted = ([np.asarray(a, np.float32) for a in leaves] for leaves in (ours, theirs))
    tolerance = 1e-5 if x.dtype == jnp.float32 else 0.03
    # The gradient of the key's bias is 0 and noise: what counts is the size of the largest.
    largest = max(np.abs(a).max() for a in wanted[2:])
    for a, b, size in zip(got, wanted, [1, 1, *[largest] * len(wanted[2:])], strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * size, rtol=tolerance)


@needs_newer_flax
def test_decoding_step_by_step_is_flaxs_own() -> None:
    theirs, ours = _both(num_heads=4, num_kv_heads=2)
    for layer in (theirs, ours):
        layer.init_cache(X.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    for i in range(LENGTH):
        got, wanted = (step(layer, X[:, i : i + 1]) for layer in (ours, theirs))
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    # And it is what the whole sequence gives at once, causally.
    np.testing.assert_allclose(got[:, 0], theirs(X, is_causal=True)[:, -1], atol=1e-6)


@needs_newer_flax
def test_decoding_with_the_causal_mask_in_the_file() -> None:
    theirs, ours = _layer(), _layer(PLAIN | {"call": {"causal": True}})
    ours.init_cache(X.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True)[:, 0])
    steps = [step(ours, X[:, i : i + 1]) for i in range(LENGTH)]
    wanted = theirs(X, is_causal=True)
    np.testing.assert_allclose(np.stack(steps, 1), wanted, atol=1e-6)
    np.testing.assert_allclose(ours(X), wanted, atol=1e-6)


@needs_newer_flax
def test_is_causal_with_a_cache_is_refused_unless_aligned_by_the_file() -> None:
    theirs, ours = _both()
    with pytest.raises(
        InputError, match=r"is_causal=True with 1 queries and 6 keys.*call\.query_offset: 0 for flax's behaviour, 5"
    ):
        ours(X[:, :1], X, is_causal=True)
    first = _layer(PLAIN | {"call": {"query_offset": 0}})
    np.testing.assert_allclose(first(X[:, :1], X, is_causal=True), theirs(X[:, :1], X, is_causal=True), atol=1e-6)
    last = _layer(PLAIN | {"call": {"query_offset": 5}})
    np.testing.assert_allclose(last(X[:, 5:], X, is_causal=True), theirs(X, is_causal=True)[:, 5:], atol=1e-6)
    with pytest.raises(ConfigError, match="query_offset: the declaration says 5, the call says 0"):
        last(X, is_causal=True)


@needs_newer_flax
def test_weights_are_sown_as_flax_sows_them() -> None:
    theirs, ours = _both()

    def sown(layer: Any) -> jax.Array:
        _, state = nnx.capture(layer, nnx.Intermediate)(X, mask=CAUSAL, sow_weights=True)
        (weights,) = jax.tree.leaves(state)
        return weights

    got, wanted = sown(ours), sown(theirs)
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.slow
def test_batch_dimensions() -> None:
    theirs, ours = _both()
    for shape in ((LENGTH, FEATURES), (2, 3, LENGTH, FEATURES)):
        x = jax.random.normal(jax.random.key(1), shape)
        np.testing.assert_allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.default_promotion("flax's own attention promotes bfloat16")
def test_bias_and_other_arguments_of_a_direct_call() -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(shape).astype(np.float32) for shape in [(2, 4, 2, 8)] * 3 + [(1, 2, 4, 4)]]
    call = {"dtype": jnp.bfloat16, "precision": "default"}
    got, wanted = jax.jit(lambda *a: [f(*a, **call) for f in (_function(), nnx.dot_product_attention)])(*arrays)
    assert got.dtype == wanted.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), atol=0.03)
    half = lambda xs, dtype: [x.astype(jnp.float16) for x in xs]  # noqa: E731
    promoted = jax.eval_shape(lambda *a: _function()(*a, promote_dtype=half), *arrays)
    assert promoted.dtype == jnp.float16


@pytest.mark.parametrize(
    ("declared", "given", "message"),
    [
        ({}, {"precision": jax.lax.Precision.HIGHEST}, "precision=.*jax.default_matmul_precision"),
        ({}, {"dropout_rate": 0.5}, r"broadcast_dropout=True \(flax's default\).*broadcast_dropout=False"),
        ({}, {"dropout_rate": 0.5, "broadcast_dropout": False, "dropout_rng": None}, "requires dropout_rng"),
        ({"metadata": {"runtime_dtype": "bfloat16"}}, {"dtype": jnp.float32}, "dtype: the file's metadata declares"),
        ({"call": {"q_heads": 3}}, {}, "the file declares q_heads=3"),
        ({"call": {"layout": "bhtd"}}, {}, "layout: the declaration says 'bhtd', the call says 'bthd'"),
    ],
)
def test_what_is_refused(declared: dict[str, Any], given: dict[str, Any], message: str) -> None:
    x = jnp.ones((1, 4, 2, 8))
    given = {"dropout_rng": jax.random.key(0)} | given
    with pytest.raises((ConfigError, InputError), match=message):
        _function(**declared)(x, x, x, **given)


@pytest.mark.slow
def test_dropout() -> None:
    layer = _layer(PLAIN, dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    run, still = nnx.jit(lambda layer: layer(X)), _layer()(X)
    outs = np.stack([run(layer) for _ in range(100)])
    np.testing.assert_allclose(outs.mean(0), still, atol=0.4)
    assert outs.std(0).min() > 0
    np.testing.assert_allclose(layer(X, deterministic=True), still, atol=1e-6)


def test_equal_functions_are_one_static_attribute() -> None:
    one, two, other = _function(), _function(), _function(call={"causal": True})
    assert one == two == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(two)
    assert one != other
    traced = []

    @nnx.jit
    def run(layer: Any, x: jax.Array) -> jax.Array:
        traced.append(1)
        return layer(x)

    for _ in range(2):
        run(_layer(PLAIN), X)
    assert len(traced) == 1


class _Transformer(nnx.Module):
    """A small vision transformer: patches, one block of attention and one of dense layers, the mean, classes."""

    def __init__(self, **attention: Any) -> None:
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(3, FEATURES, (4, 4), strides=(4, 4), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs, **attention)
        self.dense = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, 3, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(images.shape[0], -1, FEATURES)
        x = x + self.attention(x)
        return self.head((x + jax.nn.gelu(self.dense(x))).mean(1))


IMAGES = jax.random.normal(jax.random.key(2), (2, 12, 12, 3))
SPLASH = {
    "operation": "splash",
    "metadata": {"operation_configs": {"splash": {"block_q": 128, "block_kv": 128}}},
}


def _program(model: Any) -> str:
    graph, state = nnx.split(model)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, IMAGES).as_text()


def test_a_disabled_declaration_leaves_the_transformer_to_flax(tmp_path: Path) -> None:
    """One word in the file decides; without attnops the program is that of the plain module, letter by letter."""
    path = tmp_path / "attention.json"
    programs = {}
    for enabled in (True, False):
        path.write_text(json.dumps(SPLASH | {"enabled": enabled}))
        function = attention_fn(path)
        programs[enabled] = _program(_Transformer(attention_fn=function))
        assert (function is nnx.dot_product_attention) is not enabled
    assert programs[False] == _program(_Transformer())
    assert programs[True] != programs[False]


@pytest.mark.parametrize("interpret", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_enabled_one_runs_ours(interpret: bool) -> None:
    """On a TPU the kernel; elsewhere its way on plain XLA, or, for tests, the kernel in Pallas' interpreter."""
    config = SPLASH["metadata"]["operation_configs"]["splash"] | {"interpret": interpret}
    function = attention_fn(SPLASH, operation_configs={"splash": config})
    ours, theirs = nnx.jit(lambda *models: [model(IMAGES) for model in models])(
        _Transformer(attention_fn=function), _Transformer()
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    (plan,) = function.attention.plans
    assert plan.implementation == ("splash.forward_tpu" if interpret else "splash.forward_native")
    assert (plan.problem.config.block_q, plan.problem.mask.describe()) == (128, "full")


def test_the_file_chooses_the_operation_its_blocks_and_its_mask(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    window = {"mask": {"kind": "sliding_window", "left": 2, "right": 2}}
    blocks = {"operation_configs": {"vanilla": {"path": "blockwise", "block_q": 32, "block_kv": 64}}}
    seen = []
    for declared in (PLAIN, PLAIN | {"call": window}, PLAIN | {"metadata": blocks}, {"operation": "sdpa"}):
        path.write_text(json.dumps(declared))
        function = attention_fn(path)
        _Transformer(attention_fn=function)(IMAGES)
        (plan,) = function.attention.plans
        seen.append((plan.implementation, plan.problem.mask.describe(), getattr(plan.config, "block_kv", None)))
    assert seen == [
        ("vanilla.forward_native", "full", seen[0][2]),
        ("vanilla.forward_native", "window(left=2, right=2, offset=0)", seen[0][2]),
        ("vanilla.forward_native", "full", 64),
        ("sdpa.forward_native", "full", None),
    ]
    assert seen[0][2] != 64


def test_the_plan_says_what_a_mask_array_is() -> None:
    unknown = "isn't known to the plan; if it is causal or a window, declare that"
    for run, words in (
        (lambda f: _layer(attention_fn=f)(X, mask=CAUSAL), 'is causal; declare "causal": true'),
        (lambda f: nnx.jit(lambda layer: layer(X, mask=CAUSAL))(_layer(attention_fn=f)), "is causal; declare"),
        (lambda f: nnx.jit(lambda layer, m: layer(X, mask=m))(_layer(attention_fn=f), CAUSAL), unknown),
        (lambda f: _layer(attention_fn=f)(X, mask=PADDED), "is none of full, prefix, causal, window"),
    ):
        function = _function()
        run(function)
        assert any(words in note for note in function.attention.plans[0].notes), words
    with_file = attention_fn(Attention(PLAIN | {"call": {"causal": True}}))
    _layer(attention_fn=with_file)(X, mask=CAUSAL)
    assert has_note(with_file.attention.plans[0].notes, "mask.array_declared")
