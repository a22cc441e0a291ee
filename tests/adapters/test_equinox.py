"""equinox.nn.MultiheadAttention with a declared attention inside, against itself with its own."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

eqx = pytest.importorskip("equinox", reason="pip install 'attnops[equinox]'")

from attnops import ConfigError, InputError  # noqa: E402
from attnops.adapters.equinox import MultiheadAttention, attention_of  # noqa: E402
from attnops.planning.notes import has_note  # noqa: E402

LENGTH, SIZE, HEADS = 6, 8, 2
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, LENGTH, SIZE))
TRIANGLE = np.tril(np.ones((LENGTH, LENGTH), bool))
PLAIN = {"operation": "vanilla"}


def _layer(**given: Any) -> Any:
    return eqx.nn.MultiheadAttention(HEADS, SIZE, key=KEY, **given)


@eqx.filter_jit
def _compared(layers: list[Any], x: jax.Array, mask: Any, process: Any) -> list[Any]:
    """Output, loss and gradients of each layer, over a batch."""

    def loss(layer: Any) -> Any:
        out = jax.vmap(lambda x: layer(x, x[:4], x[:4], mask, process_heads=process))(x)
        return (out**2).sum(), out

    return [jax.tree.leaves(eqx.filter_value_and_grad(loss, has_aux=True)(layer)) for layer in layers]


@pytest.mark.parametrize(
    ("given", "mask", "process"),
    [
        pytest.param(
            {"qk_size": 3, "vo_size": 5, "use_query_bias": True}, TRIANGLE[:, :4], None, marks=pytest.mark.slow
        ),
        ({"vo_size": 5}, np.stack([TRIANGLE[:, :4], np.ones((LENGTH, 4), bool)]), lambda q, k, v: (2 * q, k, v - 1)),
        pytest.param({"output_size": 3, "use_output_bias": True}, None, None, marks=pytest.mark.slow),
    ],
)
def test_numbers_and_gradients_are_equinoxs_own(given: dict[str, Any], mask: Any, process: Any) -> None:
    theirs = _layer(**given)
    for got, wanted in zip(*_compared([attention_of(theirs, PLAIN), theirs], X, mask, process), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * max(1.0, float(np.abs(wanted).max())))


def test_the_signature_is_equinoxs() -> None:
    own, ours = (
        inspect.signature(f).parameters for f in (eqx.nn.MultiheadAttention.__call__, MultiheadAttention.__call__)
    )
    assert {n: (p.default, p.kind) for n, p in own.items()} == {n: (p.default, p.kind) for n, p in ours.items()}


def test_dropout_inference_and_key() -> None:
    theirs, x = _layer(dropout_p=0.5), X[0]
    ours = attention_of(theirs, PLAIN)
    still = theirs(x, x, x, inference=True)
    np.testing.assert_allclose(ours(x, x, x, inference=True), still, atol=1e-6)
    np.testing.assert_allclose(eqx.nn.inference_mode(ours)(x, x, x), still, atol=1e-6)
    with pytest.warns(DeprecationWarning, match="use inference"):
        np.testing.assert_allclose(ours(x, x, x, deterministic=True), still, atol=1e-6)
    outs = eqx.filter_jit(jax.vmap(lambda key: ours(x, x, x, key=key)))(jax.random.split(KEY, 200))
    np.testing.assert_allclose(outs.mean(0), still, atol=0.25)
    assert outs.std(0).min() > 0
    with pytest.raises(InputError, match=r"dropout of 0\.5 requires key="):
        ours(x, x, x)


class _Model(eqx.Module):
    blocks: list[Any]
    scale: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + block(x, x, x)
        return x * self.scale


def _model() -> _Model:
    return _Model([_layer(), _layer(use_output_bias=True)], jax.numpy.ones(()))


def test_a_whole_model_and_its_file(tmp_path: Path) -> None:
    """Every layer is replaced; leaves stay in their order, so that saved weights load into either."""
    path, model = tmp_path / "attention.json", _model()
    path.write_text(json.dumps(PLAIN | {"call": {"mask": {"kind": "sliding_window", "left": 1, "right": 1}}}))
    ours = attention_of(model, path)
    assert all(isinstance(block, MultiheadAttention) for block in ours.blocks)
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(model), strict=True):
        assert got is wanted
    ours(X[0])
    assert ours.blocks[0].attention.plans[0].problem.mask.describe() == "window(left=1, right=1, offset=0)"
    again = attention_of(ours, PLAIN)
    np.testing.assert_allclose(again(X[0]), model(X[0]), atol=1e-5)
    eqx.tree_serialise_leaves(tmp_path / "weights", ours)
    eqx.tree_deserialise_leaves(tmp_path / "weights", model)


def test_a_disabled_declaration_leaves_the_model_as_it_is() -> None:
    model = _model()
    assert attention_of(model, PLAIN | {"enabled": False}) is model
    plain, ours = (
        eqx.filter_jit(lambda m, x: m(x)).lower(m, X[0]).as_text() for m in (model, attention_of(model, PLAIN))
    )
    assert plain != ours
    with pytest.raises(ConfigError, match="keep the layer"):
        MultiheadAttention(_layer(), PLAIN | {"enabled": False})


def test_wrong_input() -> None:
    ours, x = attention_of(_layer(), PLAIN), X[0]
    with pytest.raises(InputError, match=r"Linear holds no equinox.nn.MultiheadAttention"):
        attention_of(eqx.nn.Linear(2, 2, key=KEY), PLAIN)
    with pytest.raises(InputError, match=r"mask has shape \(6,\); wanted \(6, 6\) or, with one per head, \(2, 6, 6\)"):
        ours(x, x, x, TRIANGLE[0])
    with pytest.raises(InputError, match="key_ has 6 rows, value has 5"):
        ours(x, x, x[:5])
    with pytest.raises(InputError, match="process_heads gave shapes"):
        ours(x, x, x, process_heads=lambda q, k, v: (q[:3], k, v))
    with pytest.raises(InputError, match=r"inference is an? .*wanted True or False: it is a compile-time constant"):
        ours(x, x, x, inference=jax.numpy.array(True))


def test_the_plan_says_what_the_mask_is() -> None:
    ours = attention_of(_layer(), PLAIN)
    jax.vmap(lambda x: ours(x, x, x, TRIANGLE))(X)
    assert has_note(ours.attention.plans[0].notes, "mask.array_structured")
