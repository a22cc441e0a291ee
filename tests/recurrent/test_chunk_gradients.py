"""The backward pass of chunks on XLA: strong decays between weak ones, and derivatives besides the first in reverse mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import LINEAR, call_of, expected, expected_gradients

from attnops import OperationRegistry
from attnops.errors import InputTypeError

Arrays = dict[str, Any]


def floats(call: Arrays) -> Arrays:
    return {name: x for name, x in call.items() if np.issubdtype(x.dtype, np.floating)}


def weights_of(kind: str, call: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Of outputs and state, in a loss."""
    rng = np.random.default_rng(3)
    outputs, state = (rng.standard_normal(x.shape).astype(np.float32) for x in expected(kind, call))
    return outputs, state


def loss_of(kind: str, call: Arrays) -> Any:
    """A loss of the call's floating arrays."""
    operation, (d_outputs, d_state) = OperationRegistry.create(kind), weights_of(kind, call)

    def loss(some: Arrays) -> jax.Array:
        output = operation(**(call | some))
        return jnp.sum(output.attention_outputs * d_outputs) + jnp.sum(output.state * d_state)

    return loss


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "gla", "simple_gla"])
def test_a_strong_decay_between_weak_ones(kind: str) -> None:
    call = call_of(kind, tokens=64, batch=1)
    decay = call["decay"] * np.float32(1e-3)
    decay[:, 20:23] = -30
    decay[:, 40] = -300
    call["decay"] = decay
    found = jax.jit(jax.grad(loss_of(kind, call)))(floats(call))
    wanted = expected_gradients(kind, call, *weights_of(kind, call))
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=2e-6 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("kind", ["gated_delta_rule", pytest.param("kda", marks=pytest.mark.slow), "gla", "mamba2"])
def test_forward_over_reverse(kind: str) -> None:
    """Against differences of the reference's gradient in float64."""
    call, rng = call_of(kind, tokens=20, batch=1), np.random.default_rng(4)
    along = {name: rng.standard_normal(x.shape) for name, x in floats(call).items()}
    narrow = jax.tree.map(np.float32, along)
    product = jax.jit(lambda some: jax.jvp(jax.grad(loss_of(kind, call)), (some,), (narrow,))[1])(floats(call))
    step, weights = 1e-6, weights_of(kind, call)
    ahead, behind = (
        expected_gradients(kind, call | {n: call[n] + sign * step * x for n, x in along.items()}, *weights)
        for sign in (1, -1)
    )
    for name, x in product.items():
        wanted = (ahead[name] - behind[name]) / (2 * step)
        np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simple_gla", "kda"])
def test_reverse_over_reverse_is_forward_over_reverse(kind: str) -> None:
    call = call_of(kind, tokens=12, batch=1, key_heads=1, heads=2)
    loss, some = loss_of(kind, call), floats(call)
    gradient = jax.jit(jax.grad(loss))(some)
    # Half of the squared gradient has the Hessian times the gradient for its own.
    penalty = jax.jit(jax.grad(lambda some: sum(jnp.sum(x * x) / 2 for x in jax.tree.leaves(jax.grad(loss)(some)))))(
        some
    )
    product = jax.jit(lambda some: jax.jvp(jax.grad(loss), (some,), (gradient,))[1])(some)
    for name, x in product.items():
        np.testing.assert_allclose(penalty[name], x, rtol=0, atol=1e-5 * np.abs(x).max(), err_msg=name)


@pytest.mark.parametrize("kind", LINEAR)
def test_forward_mode_is_refused(kind: str) -> None:
    call = call_of(kind, tokens=20, batch=1)
    some = floats(call)
    with pytest.raises(InputTypeError, match=r"linear attention in chunks: no derivative in forward mode") as raised:
        jax.jvp(loss_of(kind, call), (some,), (some,))
    assert "vanilla" not in str(raised.value)  # which has no such path


def test_one_token_has_forward_mode() -> None:
    call = call_of("kda", tokens=1, batch=1)
    loss, some = loss_of("kda", call), floats(call)
    slope = jax.jvp(loss, (some,), (some,))[1]
    gradient = jax.grad(loss)(some)
    wanted = sum(float((gradient[name] * x).sum()) for name, x in some.items())
    assert float(slope) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "gla"])
def test_mapped_and_made_again(kind: str) -> None:
    calls = [call_of(kind, tokens=40, batch=1, segments=True, seed=seed) for seed in (0, 1)]
    ids = calls[0]["segment_ids"]
    loss = loss_of(kind, calls[0])
    stacked = jax.tree.map(lambda *x: np.stack(x), *map(floats, calls))
    found = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(stacked)
    for n, call in enumerate(calls):
        wanted = expected_gradients(kind, call | {"segment_ids": ids}, *weights_of(kind, calls[0]))
        for name, gradient in wanted.items():
            size = max(np.abs(gradient).max(), 1)
            np.testing.assert_allclose(found[name][n], gradient, rtol=0, atol=2e-5 * size, err_msg=name)
