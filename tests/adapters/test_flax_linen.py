"""linen.MultiHeadDotProductAttention with our attention_fn, against itself with linen's own."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

linen = pytest.importorskip("flax.linen", reason="pip install 'attnops[flax]'")

from attnops import ConfigError, InputError  # noqa: E402
from attnops.adapters.flax_linen import attention_fn  # noqa: E402
from attnops.operators.kernels.default_promotion import default_promotion  # noqa: E402

LENGTH, FEATURES = 6, 8
X = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))
with default_promotion():  # flax multiplies floats by bools
    CAUSAL = linen.make_causal_mask(jnp.ones((2, LENGTH)))
    PADDED = linen.make_attention_mask(jnp.ones((2, LENGTH)), jnp.arange(LENGTH)[None] < jnp.array([[4], [6]]))
PLAIN = {"operation": "vanilla"}


def _both(declared: dict[str, Any] = PLAIN, **given: Any) -> tuple[Any, Any, Any]:
    """(linen's own, ours, the variables of both)."""
    theirs = linen.MultiHeadDotProductAttention(num_heads=2, **given)
    ours = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn(declared), **given)
    return theirs, ours, theirs.init(jax.random.key(1), X, deterministic=True)


def test_every_argument_of_linens_function_is_one_of_ours() -> None:
    """linen passes only what a function names, so that a name less would be an argument dropped in silence."""
    own, ours = (inspect.signature(f).parameters for f in (linen.dot_product_attention, attention_fn(PLAIN)))
    assert {n: (p.default, p.kind) for n, p in own.items()} == {n: (p.default, p.kind) for n, p in ours.items()}


@pytest.mark.default_promotion("linen's own attention promotes bfloat16")
@pytest.mark.parametrize(
    ("given", "mask"),
    [
        pytest.param({"dtype": jnp.bfloat16}, CAUSAL, marks=pytest.mark.slow),
        ({}, linen.combine_masks(CAUSAL, PADDED)),
        pytest.param({"dtype": jnp.bfloat16, "force_fp32_for_softmax": True}, None, marks=pytest.mark.slow),
        pytest.param({"normalize_qk": True}, PADDED, marks=pytest.mark.slow),
    ],
)
def test_numbers_and_gradients_are_linens_own(given: dict[str, Any], mask: Any) -> None:
    theirs, ours, variables = _both(**given)
    x = X.astype(given.get("dtype", X.dtype))

    def loss(variables: Any, x: jax.Array, layer: Any) -> Any:
        out = layer.apply(variables, x, mask=mask)
        return (out.astype(jnp.float32) ** 2).sum(), out

    both = jax.jit(
        lambda v, x: [jax.value_and_grad(loss, (0, 1), has_aux=True)(v, x, layer) for layer in (ours, theirs)]
    )
    got, wanted = map(jax.tree.leaves, both(variables, x))
    assert [a.dtype for a in got] == [a.dtype for a in wanted]
    got, wanted = ([np.asarray(a, np.float32) for a in leaves] for leaves in (got, wanted))
    tolerance = 1e-5 if x.dtype == jnp.float32 else 0.03
    # The gradient of the key's bias is 0 and noise: what counts is the size of the largest.
    largest = max(np.abs(a).max() for a in wanted[2:])
    for a, b, size in zip(got, wanted, [1, 1, *[largest] * len(wanted[2:])], strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * size, rtol=tolerance)


def test_decoding_step_by_step_is_linens_own() -> None:
    theirs, ours, variables = _both(decode=True)
    steps = [jax.jit(lambda v, x, layer=layer: layer.apply(v, x, mutable=["cache"])) for layer in (theirs, ours)]
    states = [variables, variables]
    for i in range(LENGTH):
        outs = []
        for n, step in enumerate(steps):
            out, changed = step(states[n], X[:, i : i + 1])
            states[n] = {**states[n], **changed}
            outs.append(out)
        np.testing.assert_allclose(outs[1], outs[0], atol=1e-6)
    whole = linen.MultiHeadDotProductAttention(num_heads=2).apply({"params": variables["params"]}, X, mask=CAUSAL)
    np.testing.assert_allclose(outs[1][:, 0], whole[:, -1], atol=1e-6)


@pytest.mark.default_promotion("linen's own attention promotes bfloat16")
@pytest.mark.parametrize(
    "given",
    [
        {"dtype": jnp.bfloat16, "force_fp32_for_softmax": True},
        *(pytest.param(given, marks=pytest.mark.slow) for given in ({}, {"dtype": jnp.bfloat16})),
    ],
)
def test_weights_are_sown_as_linen_sows_them(given: dict[str, Any]) -> None:
    theirs, ours, variables = _both(**given)
    found = []
    for layer in (ours, theirs):
        _, state = layer.apply(variables, X, mask=CAUSAL, sow_weights=True, mutable=["intermediates"])
        found.append(state["intermediates"]["attention_weights"][0])
    assert found[0].dtype == found[1].dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in found), atol=0.01 if given else 1e-6)


@pytest.mark.slow
def test_dropout() -> None:
    _, ours, variables = _both(dropout_rate=0.5, broadcast_dropout=False)
    run = jax.jit(lambda key: ours.apply(variables, X, deterministic=False, rngs={"dropout": key}))
    outs = np.stack([run(key) for key in jax.random.split(jax.random.key(2), 100)])
    still = ours.apply(variables, X, deterministic=True)
    np.testing.assert_allclose(outs.mean(0), still, atol=0.5)
    assert outs.std(0).min() > 0


def test_a_disabled_declaration_leaves_the_module_to_linen() -> None:
    theirs, ours, variables = _both(PLAIN | {"enabled": False})
    assert ours.attention_fn is linen.dot_product_attention
    programs = [jax.jit(layer.apply).lower(variables, X).as_text() for layer in (theirs, ours)]
    assert programs[0] == programs[1]
    assert jax.jit(_both()[1].apply).lower(variables, X).as_text() != programs[0]


@pytest.mark.parametrize(
    ("declared", "given", "message"),
    [
        ({}, {"precision": "highest"}, "precision='highest'.*jax.default_matmul_precision"),
        (
            {},
            {"einsum_dot_general": jax.lax.dot_general},
            "einsum_dot_general is given.*construct the module without it",
        ),
        ({}, {"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum is given"),
        ({}, {"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is given"),
        ({}, {"dropout_rate": 0.5}, r"broadcast_dropout=True \(flax's default\)"),
        ({"metadata": {"runtime_dtype": "float16"}}, {"dtype": jnp.float32}, "dtype: the file's metadata declares"),
        (
            {"metadata": {"runtime_softmax_dtype": "bfloat16"}},
            {"force_fp32_for_softmax": True},
            "force_fp32_for_softmax: the file's metadata declares runtime_softmax_dtype='bfloat16'",
        ),
    ],
)
def test_what_is_refused(declared: dict[str, Any], given: dict[str, Any], message: str) -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises((ConfigError, InputError), match=message):
        attention_fn(PLAIN | declared)(x, x, x, dropout_rng=jax.random.key(0), **given)


def test_what_the_module_passes_is_refused_through_it() -> None:
    _, ours, variables = _both(precision="highest")
    with pytest.raises(ConfigError, match="precision='highest'"):
        ours.apply(variables, X)
    _, ours, variables = _both(
        qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(ConfigError, match="qk_attn_weights_einsum is given"):
        ours.apply(variables, X)


def test_modules_with_equal_functions_are_equal() -> None:
    one, two = _both()[1], _both()[1]
    assert one == two
    assert hash(one.attention_fn) == hash(two.attention_fn)
    assert pickle.loads(pickle.dumps(one.attention_fn)) == one.attention_fn
    assert one != _both(PLAIN | {"call": {"causal": True}})[1]
