"""Values that are the first numbers of their keys, in Mosaic GPU. In the interpreter, which looks for races."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, Causal, SlidingWindow
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.kernels.local_mask import Dropout, dropout_seed
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes

from . import harness

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: the interpreter of {JAX_NEEDED} looks for races", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("generation", harness.MOSAIC)]
DTYPE = "bfloat16"
SCALE, GRADIENT_SCALE = 0.1, 0.04  # sharper weights leave differences of few digits
# (dims of key and value, queries, keys, heads, sizes that are declared)
CALLS: dict[str, tuple[tuple[int, int], int, int, int, dict[str, Any]]] = {
    "decoding": ((576, 512), 1, 300, 16, {}),
    "two blocks of folded rows, in parts": ((576, 512), 3, 200, 24, {"kv_splits": 2}),
    "a chunk": ((576, 512), 80, 140, 2, {"kv_splits": 1}),
    "one stage": ((576, 512), 70, 140, 1, {"kv_splits": 1, "num_stages": 1}),
    "columns of one warpgroup": ((320, 256), 130, 140, 1, {"kv_splits": 1}),
    "columns of one warpgroup, decoding": ((320, 256), 2, 140, 4, {"kv_splits": 2}),
    "odd steps": ((288, 256), 5, 140, 3, {"kv_splits": 1}),
    "narrow": ((64, 32), 130, 140, 1, {"kv_splits": 1}),
    "no more than the values": ((128, 128), 130, 140, 1, {"kv_splits": 1}),
}


def _arrays(dims: tuple[int, int], q_len: int, kv_len: int, heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (q_len, heads, dims[0]), (kv_len, 1, dims[0]), (q_len, heads, dims[1])
    query, key, pull = (rng.standard_normal((1, *shape)).astype(jnp.dtype(DTYPE)) for shape in shapes)
    return query, key, pull


def _attend(generation: str, config: dict[str, Any], layout: str = "bthd", scale: float = SCALE) -> Any:
    kernel = (harness.MOSAIC[generation].config or {})["kernel"]
    configs = {"flash_attn2": {"interpret": True, "kernel": kernel, **config}}
    return Attention("flash_attn2", operation_configs=configs, softmax_scale=scale, layout=layout, fallback="error")


def _known(query: np.ndarray, key: np.ndarray, left: int = 60, scale: float = SCALE) -> dict[str, Any]:
    rows, keys = np.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1], np.arange(key.shape[1])
    return {"scale": scale, "mask": ((keys <= rows) & (keys >= rows - left))[None, None]}


def _close(got: Any, want: np.ndarray, tolerance: float) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert row_error(got, want, row_sizes(want), jnp.dtype(DTYPE)) <= tolerance


@pytest.mark.parametrize("name", CALLS)
def test_forward(generation: str, name: str) -> None:
    dims, q_len, kv_len, heads, config = CALLS[name]
    query, key, _ = _arrays(dims, q_len, kv_len, heads)
    known, exact = _known(query, key), [x.astype(np.float64) for x in (query, key)]
    want = reference_attention(*exact, exact[1][..., : dims[1]], **known)
    call = {"mask": Causal() & SlidingWindow(60), "query_offset": kv_len - q_len, "mode": "prefill", "return_lse": True}
    layout = "bhtd" if "odd" in name else "bthd"
    attend = _attend(generation, config, layout)
    given = [jnp.asarray(x if layout == "bthd" else x.swapaxes(1, 2)) for x in (query, key)]
    if kv_len > q_len + 100:  # nobody sees the first keys
        at = (
            (slice(None), slice(0, kv_len - q_len - 60))
            if layout == "bthd"
            else (slice(None), slice(None), slice(0, 1))
        )
        given[1] = given[1].at[at].set(jnp.nan)
    plan = attend.plan(*given, KeyColumns(dims[1]), **call)
    assert plan.method == f"forward_{generation}", plan.rejected
    got = jax.jit(lambda q, k: attend(q, k, KeyColumns(dims[1]), **call))(*given)
    output = got.attention_outputs if layout == "bthd" else got.attention_outputs.swapaxes(1, 2)
    _close(output, want.output, harness.MOSAIC[generation].capability.tolerance[DTYPE].forward)
    np.testing.assert_allclose(np.asarray(got.lse), want.lse, atol=2e-2)


_BIAS = np.random.default_rng(1).standard_normal((1, 2, 70, 140))
# As CALLS
GRADIENTS: dict[str, tuple[tuple[int, int], int, int, int, dict[str, Any]]] = {
    "two heads": ((576, 512), 70, 140, 2, {}),
    "one stage": ((576, 512), 40, 100, 1, {"num_stages_dkv": 1, "num_stages_dq": 1}),
    "columns of one warpgroup": ((320, 256), 130, 140, 1, {}),
    "odd steps": ((288, 256), 40, 100, 3, {}),
    "no more than the values": ((128, 128), 80, 100, 2, {}),
    "columns that are padded": ((90, 40), 80, 100, 1, {}),
    "columns of one step": ((32, 32), 80, 100, 1, {}),
    "larger tiles": ((128, 64), 130, 140, 2, {"block_q_dkv": 64, "block_kv_dq": 64}),
    "more columns than the values": ((480, 256), 140, 150, 1, {}),
    "keys that nobody sees": ((480, 384), 40, 300, 1, {}),
}
# (arguments of the call, of the reference), of two heads
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "soft cap": ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
    "sinks": ({"softmax_aux": np.float32([0.5, -1])}, {"sinks": np.float64([0.5, -1])}),
    "bias": ({"bias": _BIAS.astype(np.float32)}, {"bias": _BIAS}),
    "lse": ({"return_lse": True}, {}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(generation: str, name: str) -> None:
    dims, q_len, kv_len, heads, config = GRADIENTS[name]
    _check_gradients(generation, "train", "bhtd" if heads == 2 else "bthd", dims, q_len, kv_len, heads, config)


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_gradients(generation: str, name: str) -> None:
    _check_gradients(generation, "train", "bthd", (480, 384), 70, 140, 2, {}, *FEATURES[name])


def test_gradients_with_dropout(generation: str) -> None:
    """A weight that is kept here and dropped there changes its row by far more than the tolerance."""
    rng, probability = jax.random.key(3), 0.3
    # Queries are the last tokens; dropout goes by their numbers in the array.
    keep = np.asarray(Dropout(dropout_seed(rng), probability, 0, 0, 0).keep_all(1, 2, 70, slice(0, 140)))
    call = {"dropout_prob": probability, "deterministic": False, "dropout_rng": rng}
    known = {"keep": keep, "keep_probability": 1 - probability}
    _check_gradients(generation, "train", "bthd", (480, 384), 70, 140, 2, {}, call, known)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_gradients_of_a_call_that_was_not_declared_to_have_any(generation: str, layout: str) -> None:
    _check_gradients(generation, "prefill", layout, (96, 64), 70, 100, 2, {"kv_splits": 1})


def _check_gradients(
    generation: str,
    mode: str,
    layout: str,
    dims: tuple[int, int],
    q_len: int,
    kv_len: int,
    heads: int,
    config: dict[str, Any],
    more: dict[str, Any] | None = None,
    more_known: dict[str, Any] | None = None,
) -> None:
    query, key, pull = _arrays(dims, q_len, kv_len, heads)
    known = _known(query, key, scale=GRADIENT_SCALE) | (more_known or {})
    exact = [x.astype(np.float64) for x in (query, key, pull)]
    call = {"mask": Causal() & SlidingWindow(60), "query_offset": kv_len - q_len, "mode": mode} | (more or {})
    d_lse = np.float32(np.arange(heads * q_len).reshape(1, heads, q_len) % 3 - 1) if "return_lse" in call else None
    want = reference_gradients(exact[0], exact[1], exact[1][..., : dims[1]], exact[2], d_lse, **known)
    want["key"][..., : dims[1]] += want["value"]
    attend = _attend(generation, config, layout, GRADIENT_SCALE)

    def loss(q: Any, k: Any) -> Any:
        result = attend(q, k, KeyColumns(dims[1]), **call)
        output = result.attention_outputs
        output = output if layout == "bthd" else output.swapaxes(1, 2)
        total = (output.astype(jnp.float32) * pull.astype(jnp.float32)).sum()
        return total if d_lse is None else total + (result.lse * d_lse).sum()

    given = [jnp.asarray(x if layout == "bthd" else x.swapaxes(1, 2)) for x in (query, key)]
    assert attend.plan(*given, KeyColumns(dims[1]), **call).method == f"forward_{generation}"
    backward = harness.MOSAIC[generation].capability.tolerance[DTYPE].backward
    for name, gradient in zip(("query", "key"), jax.jit(jax.grad(loss, (0, 1)))(*given), strict=True):
        _close(gradient if layout == "bthd" else gradient.swapaxes(1, 2), want[name], backward)
