"""The gradient of the bias by splash's own pass: summed over what the bias broadcasts, 0 where nobody sees a tile."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Blocks, Causal, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.verify import reference_gradients

BATCH, HEADS, KV_HEADS, Q, KV, DIM = 2, 4, 2, 530, 700, 16
MASKS: dict[str, Mask] = {"causal": Causal(0), "window": Causal(0) & SlidingWindow(90, 0, offset=0), "full": Full()}
SHAPES = [(b, h, Q, KV) for b, h in itertools.product((1, BATCH), (1, HEADS))]
QUICK = {("causal", SHAPES[1], 1), ("window", SHAPES[0], 2)}


def _gradient(call: Any, bias: np.ndarray, mask: Mask, heads: int) -> tuple[Any, np.ndarray, np.ndarray, str]:
    """(gradient, the reference's, that of its terms' sizes, the program)."""
    rng = np.random.default_rng(2)
    q, k, v, d_out = (
        rng.standard_normal((BATCH, length, n, DIM)).astype(np.float32)
        for length, n in ((Q, HEADS), (KV, KV_HEADS), (KV, KV_HEADS), (Q, HEADS))
    )
    config = {"interpret": True, "heads_per_tile": heads}
    metadata = OperationMetadata(runtime_dtype="float32", operation_configs={"splash": config}, fallback="error")
    attend = OperationRegistry.create("splash", metadata)

    def loss(bias: jax.Array) -> jax.Array:
        return (attend(q, k, v, bias=bias, mask=mask, mode="train", **call).attention_outputs * d_out).sum()

    gradient = jax.jit(jax.grad(loss))
    rows, keys = np.arange(Q)[:, None], np.arange(KV)[None]
    seen = (
        np.broadcast_to(mask.test(rows, rows, keys), (Q, KV))[None, None]
        if not isinstance(mask, Blocks)
        else _spread(mask)
    )
    if "kv_lengths" in call:
        seen = seen & (keys < call["kv_lengths"][:, None, None, None])
    want = reference_gradients(q, k, v, d_out, scale=DIM**-0.5, mask=seen, bias=bias)["bias"]
    return gradient(bias), want, seen, str(jax.make_jaxpr(gradient)(bias))


def _spread(mask: Blocks) -> np.ndarray:
    return np.repeat(np.repeat(mask.layout, 128, axis=1), 128, axis=2)[None, :, :Q, :KV]


@pytest.mark.parametrize(
    ("name", "shape", "heads"),
    [
        pytest.param(*key, marks=[] if key in QUICK else [pytest.mark.slow])
        for key in itertools.product(MASKS, SHAPES, (1, 2))
    ],
)
def test_by_the_kernel(name: str, shape: tuple[int, ...], heads: int) -> None:
    bias = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    got, want, _, program = _gradient({}, bias, MASKS[name], heads)
    assert "attnops_splash_dbias" in program
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * max(1.0, float(np.abs(want).max())))
    assert not np.asarray(got)[..., :100, 600:].any() or name == "full"


@pytest.mark.slow
def test_heads_with_lists_of_different_lengths() -> None:
    """A shorter list stays at its last tile, whose gradient is kept."""
    layout = np.zeros((HEADS, 5, 6), bool)
    layout[:2, :, 0] = True  # the first kv head: one tile for each query block
    layout[2:] = True
    bias = np.random.default_rng(5).standard_normal((BATCH, HEADS, Q, KV)).astype(np.float32)
    got, want, _, program = _gradient({}, bias, Blocks(layout, 128, 128), 1)
    assert "attnops_splash_dbias" in program
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((BATCH, HEADS, 1, KV), {}),
        ((1, HEADS, Q, KV), {"kv_lengths": np.array([300, 650], np.int32)}),
    ],
    ids=["for all queries alike", "rows with lists of their own"],
)
def test_in_xla_where_the_kernel_can_not_sum(shape: tuple[int, ...], call: Any) -> None:
    bias = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    got, want, _, program = _gradient(call, bias, Causal(0), 1)
    assert "attnops_splash_dbias" not in program
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * max(1.0, float(np.abs(want).max())))


@pytest.mark.slow
def test_a_bias_that_is_not_differentiated_costs_no_pass() -> None:
    x = jnp.ones((1, 256, 2, 16), jnp.float32)
    bias = jnp.zeros((1, 2, 256, 256), jnp.float32)
    metadata = OperationMetadata(operation_configs={"splash": {"interpret": True}}, fallback="error")
    attend = OperationRegistry.create("splash", metadata)

    def loss(q: jax.Array, bias: jax.Array) -> jax.Array:
        return attend(q, x, x, bias=bias).attention_outputs.sum()

    alone, both = (
        jax.jit(jax.grad(loss, which)).lower(x, bias).compile().cost_analysis()["flops"] for which in (0, (0, 1))
    )
    assert alone < both
