"""What every adapter does with what a file and a framework say, against the float64 reference."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import jax
import numpy as np
import pytest

from attnops import Attention, ConfigError, InputError
from attnops.adapters.front import attend, declared_attention
from attnops.planning.notes import has_note
from attnops.verify import reference_attention

Q, KV, HEADS, DIM = 5, 7, 2, 4
TRIANGLE = np.tril(np.ones((Q, Q), bool))
_draw = np.random.default_rng(0)


def _arrays(*batch: int, q: int = Q, kv: int = Q) -> list[np.ndarray]:
    return [_draw.standard_normal((*batch, n, HEADS, DIM)).astype(np.float32) for n in (q, kv, kv)]


def _wanted(arrays: list[np.ndarray], **call: Any) -> np.ndarray:
    rank4 = [x.reshape(-1, *x.shape[-3:]) for x in arrays]
    return reference_attention(*rank4, scale=DIM**-0.5, **call).output.reshape(*arrays[0].shape)


def _attended(declared: dict[str, Any], arrays: list[np.ndarray], **call: Any) -> np.ndarray:
    return np.asarray(attend(Attention({"operation": "vanilla"} | declared), *arrays, layout="bthd", **call).output)


@pytest.mark.parametrize("batch", [(), pytest.param((3,), marks=pytest.mark.slow), (2, 3)])
@pytest.mark.parametrize(
    "own", [(), (1, 1), *(pytest.param(own, marks=pytest.mark.slow) for own in ((HEADS, 1), (1, Q))), (HEADS, Q)]
)
def test_masks_and_biases_broadcast_as_in_numpy(batch: tuple[int, ...], own: tuple[int, ...]) -> None:
    """The shape of the mask is own + [kv], with each choice of batch dimensions before it."""
    arrays = _arrays(*batch)
    fronts = {(), (1,) * len(batch), batch, batch[:1] + (1,) * (len(batch) - 1)} if len(own) == 2 else {()}
    for front in fronts:
        shape = (*front, *own, Q)
        mask, bias = _draw.random(shape) < 0.7, _draw.standard_normal(shape).astype(np.float32)
        mask[..., 0] = True
        whole = (*batch, HEADS, Q, Q)
        rank4 = {n: np.broadcast_to(x, whole).reshape(-1, HEADS, Q, Q) for n, x in (("mask", mask), ("bias", bias))}
        got = _attended({}, arrays, mask=mask.astype(np.float32), bias=bias)
        np.testing.assert_allclose(got, _wanted(arrays, **rank4), atol=2e-6, err_msg=str(shape))


@pytest.mark.parametrize("shape", [(2, 1, Q, Q), (3, 1, Q, Q + 1), (1, 3, 1, Q, Q), (Q + 1, Q)])
def test_shapes_that_do_not_broadcast(shape: tuple[int, ...]) -> None:
    for name in ("mask", "bias"):
        with pytest.raises(
            InputError, match=rf"{name} has shape .*wanted one that broadcasts to \(3, {HEADS}, {Q}, {Q}\)"
        ):
            _attended({}, _arrays(3), **{name: np.ones(shape, np.float32)})


def test_a_fully_masked_row_is_0() -> None:
    arrays, mask = _arrays(1), TRIANGLE.copy()
    mask[2] = False
    got = _attended({}, arrays, mask=mask)
    assert not got[0, 2].any()
    np.testing.assert_allclose(got, _wanted(arrays, mask=mask), atol=2e-6)


@pytest.mark.parametrize(
    ("declared", "framework", "causal"),
    [
        ({}, False, False),  # the metadata's default, True, is no word of the file's
        ({}, True, True),
        ({"call": {"causal": True}}, False, True),
        ({"call": {"causal": True}}, True, True),
        ({"call": {"causal": False}}, False, False),
        ({"metadata": {"causal": True}}, False, True),
        ({"metadata": {"causal": False}}, False, False),
        ({"metadata": {"causal": False}}, True, True),
        ({"call": {"mask": "causal"}}, False, True),
        ({"call": {"mask": "full"}}, True, True),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_who_says_causal(declared: dict[str, Any], framework: bool, causal: bool, array: bool) -> None:
    arrays, mask = _arrays(2), np.ones((Q, Q), bool)
    mask[:, 1] = not array
    got = _attended(declared, arrays, causal=framework, mask=mask if array else None)
    np.testing.assert_allclose(got, _wanted(arrays, mask=mask & (TRIANGLE | (not causal))), atol=2e-6)


def test_causal_that_the_file_forbids() -> None:
    with pytest.raises(
        ConfigError, match="causal: the declaration says False, the call says True; leave one of them out"
    ):
        _attended({"call": {"causal": False}}, _arrays(1), causal=True)


@pytest.mark.parametrize("at", ["call", pytest.param("metadata", marks=pytest.mark.slow)])
def test_dropout_is_said_once_or_twice_the_same(at: str) -> None:
    arrays, rng = _arrays(1), jax.random.key(0)
    drop = {"dropout_prob": 0.5, "dropout_rng": rng, "deterministic": False}
    with pytest.raises(
        ConfigError, match=r"dropout_prob: the (file|decl).*0\.5, the (framework's )?call (says|has) 0\.0; "
    ):
        _attended({at: {"dropout_prob": 0.5}}, arrays)
    once, twice = _attended({}, arrays, **drop), _attended({at: {"dropout_prob": 0.5}}, arrays, **drop)
    np.testing.assert_array_equal(once, twice)
    assert np.abs(once - _wanted(arrays)).max() > 0.01


def test_dropout_in_evaluation_is_told_and_off() -> None:
    arrays, attention = _arrays(1), Attention({"operation": "vanilla"})
    got = attend(attention, *arrays, layout="bthd", dropout_prob=0.5, dropout_rng=jax.random.key(0), deterministic=True)
    np.testing.assert_allclose(np.asarray(got.output), _wanted(arrays), atol=2e-6)
    assert "dropout_prob=0.5 is off: deterministic=True" in attention.plans[0].notes


def test_what_a_framework_has_no_place_for() -> None:
    for name in ("return_weights", "return_lse"):
        with pytest.raises(ConfigError, match=f"call.{name} is declared.*returns only its output"):
            declared_attention({"operation": "vanilla", "call": {name: True}}, {})
    with pytest.raises(ConfigError, match=r"causal: given with an Attention.*pass them to Attention\("):
        declared_attention(Attention({"operation": "vanilla"}), {"causal": True})
    with pytest.raises(InputError, match=r"call.softmax_aux is declared, but the call has no softmax_aux"):
        _attended({"call": {"softmax_aux": [HEADS]}}, _arrays(1))


def test_metadata_of_the_program() -> None:
    attention = declared_attention(
        {"operation": "vanilla", "metadata": {"causal": False}}, {"runtime_dtype": "bfloat16"}
    )
    assert attend(attention, *_arrays(1), layout="bthd").output.dtype == "bfloat16"


def test_shapes_of_the_tensors() -> None:
    one, two = _arrays(2), _arrays(3)
    with pytest.raises(InputError, match=r"key has batch dimensions \(3,\), query has \(2,\); wanted the same"):
        _attended({}, [one[0], two[1], two[2]])
    with pytest.raises(InputError, match=r"query has shape \(4, 5\); wanted \[\.\.\., length, heads, head dim\]"):
        _attended({}, [np.ones((4, 5), np.float32)] * 3)
    with pytest.raises(InputError, match="mask is a list; wanted an array"):
        _attended({}, one, mask=[[True]])


def test_weights_with_many_batch_dimensions() -> None:
    arrays = _arrays(2, 3)
    found = attend(Attention({"operation": "vanilla"}), *arrays, layout="bthd", return_weights=True)
    rank4 = [x.reshape(6, Q, HEADS, DIM) for x in arrays]
    wanted = reference_attention(*rank4, scale=DIM**-0.5).weights.reshape(2, 3, HEADS, Q, Q)
    np.testing.assert_allclose(np.asarray(found.weights), wanted, atol=1e-6)


def test_a_known_mask_inside_jit_is_still_known() -> None:
    for mask in (TRIANGLE, jax.numpy.asarray(TRIANGLE, np.float32)):
        attention = Attention({"operation": "vanilla"})
        jax.jit(lambda x, mask=mask, attention=attention: attend(attention, x, x, x, layout="bthd", mask=mask).output)(
            _arrays(1)[0]
        )
        assert has_note(attention.plans[0].notes, "mask.array_structured")


@pytest.mark.parametrize(
    ("adapter", "framework"),
    [("flax_nnx", "flax"), ("flax_linen", "flax"), ("equinox", "equinox"), ("torch", "torch")],
)
def test_a_framework_that_is_not_installed(adapter: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named with its extra; none of them is needed by the others, or by attnops."""
    for name in [name for name in sys.modules if name.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"attnops.adapters.{adapter}", raising=False)

    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.partition(".")[0] == framework:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(
        ModuleNotFoundError, match=rf"requires {framework}, which isn't installed; pip install 'attnops\[{framework}\]'"
    ):
        importlib.import_module(f"attnops.adapters.{adapter}")
