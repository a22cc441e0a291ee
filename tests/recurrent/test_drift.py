"""A million tokens with decays so slow that the state remembers them: float32 held against float64, row by row. Minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from recurrent_inputs import expected

from attnops import OperationRegistry

TOKENS, PARTS = 1 << 20, 16
HEADS, DIM, VALUE_DIM, CHANNELS = 2, 4, 4, 4
KINDS = ("gated_delta_rule", "kda", "gla", "simple_gla", "lightning", "retention", "mamba2", "mamba1")
# The greatest error of any row, of the typical size of its part's outputs; docs/semantics.md has both.
BOUND = dict.fromkeys(KINDS, 5e-5) | {"mamba1": 2e-4}
Arrays = dict[str, Any]


def drawn(kind: str, tokens: int) -> Arrays:
    """A call in float32. One head forgets half in some 700000 tokens, the other in some 700."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((1, tokens, *shape), np.float32)

    rates = np.array([1e-6, 1e-3], np.float32)
    uneven = np.exp(0.5 * normal(HEADS))
    if kind == "mamba1":
        rates = np.geomspace(1e-6, 1e-3, CHANNELS * DIM, dtype=np.float32).reshape(CHANNELS, DIM)
        call = {
            "x": normal(CHANNELS),
            "dt": np.exp(0.5 * normal(CHANNELS)),
            "A": -rates,
            "B": normal(DIM),
            "C": normal(DIM),
        }
        return call | {"D": np.zeros(CHANNELS, np.float32)}
    if kind == "mamba2":
        call = {"x": normal(HEADS, VALUE_DIM), "dt": uneven, "A": -rates, "B": normal(1, DIM), "C": normal(1, DIM)}
        return call | {"D": np.zeros(HEADS, np.float32)}
    key = normal(1, DIM)
    call = {"query": normal(1, DIM), "key": key / np.linalg.norm(key, axis=-1, keepdims=True)}
    call["value"] = normal(HEADS, VALUE_DIM)
    if kind in ("lightning", "retention"):
        return call | {"decay": -rates}
    call["decay"] = -rates[:, None] * np.exp(0.5 * normal(HEADS, DIM)) if kind in ("kda", "gla") else -rates * uneven
    if kind in ("kda", "gated_delta_rule"):
        call["beta"] = (1 / (1 + np.exp(-normal(HEADS)))).astype(np.float32)
    return call


def token_by_token(kind: str, call: Arrays) -> np.ndarray:
    """Outputs by the definition, in float64: [tokens, ...]. A key head is that of all heads."""
    with jax.enable_x64(True):
        wide = {
            name: jnp.asarray(x, jnp.float64)[0] if x.ndim > 2 else jnp.asarray(x, jnp.float64)
            for name, x in call.items()
        }
        if kind == "mamba1":
            step: Callable[..., Any] = _mamba1(wide["A"])
            state = jnp.zeros((CHANNELS, DIM))
            rows = wide["x"], wide["dt"], wide["B"], wide["C"]
        else:
            step, state = _linear, jnp.zeros((HEADS, DIM, VALUE_DIM))
            rows = _linear_rows(kind, wide)
        return np.asarray(jax.jit(lambda rows: lax.scan(step, state, rows)[1])(rows))


def _linear_rows(kind: str, wide: Arrays) -> tuple[jax.Array | None, ...]:
    if kind == "mamba2":
        decay = (wide["dt"] * wide["A"][None])[..., None]
        return wide["C"][:, 0], wide["B"][:, 0], wide["dt"][..., None] * wide["x"], decay, None
    value, decay = wide["value"], wide["decay"]
    decay = jnp.broadcast_to(decay[None], value.shape[:2]) if decay.ndim == 1 else decay
    decay = decay[..., None] if decay.ndim == 2 else decay
    return DIM**-0.5 * wide["query"][:, 0], wide["key"][:, 0], value, decay, wide.get("beta")


def _linear(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    query, key, value, decay, beta = at
    state = jnp.exp(decay)[..., None] * state
    if beta is not None:
        value = beta[:, None] * (value - jnp.sum(key[None, :, None] * state, 1))
    state = state + key[None, :, None] * value[:, None]
    return state, jnp.sum(query[None, :, None] * state, 1)


def _mamba1(rates: jax.Array) -> Callable[..., Any]:
    def step(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = at
        state = jnp.exp(dt[:, None] * rates) * state + (dt * x)[:, None] * b[None]
        return state, jnp.sum(state * c[None], 1)

    return step


def errors(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(of each row its greatest error by the typical size of outputs in its part [PARTS, rows], that size [PARTS, heads])."""
    call = drawn(kind, TOKENS)
    found = np.asarray(
        jax.jit(lambda call: OperationRegistry.create(kind)(**call).attention_outputs)(call)[0], np.float64
    )
    wanted = token_by_token(kind, call)
    found, wanted = (x.reshape(PARTS, TOKENS // PARTS, *x.shape[1:]) for x in (found, wanted))
    axes = (1, 3) if wanted.ndim == 4 else (1,)
    typical = np.sqrt(np.mean(wanted**2, axes, keepdims=True))
    by_row = (np.abs(found - wanted) / typical).reshape(PARTS, TOKENS // PARTS, -1).max(-1)
    return by_row, np.squeeze(typical, axes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_here_is_the_reference(kind: str) -> None:
    call = drawn(kind, 300)
    if "decay" in call and call["decay"].ndim == 1:
        call["decay"] = np.broadcast_to(call["decay"], (1, 300, HEADS))
    outputs = expected(kind, call).outputs[0]
    np.testing.assert_allclose(token_by_token(kind, call), outputs, rtol=1e-12, atol=1e-12 * np.abs(outputs).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_tokens_stay_near_float64(kind: str) -> None:
    by_row, typical = errors(kind)
    assert by_row.max() <= BOUND[kind]
    # It doesn't grow without end: the last sixteenth is as near as the others.
    worst = by_row.max(1)
    assert worst[-1] <= 4 * np.median(worst)
    assert np.isfinite(typical).all()


def test_decoding_with_the_same_decay_every_time_stays_near_float64() -> None:
    """20000 steps of one token. The decay e^-1e-6 is 2^-26 from the nearest float32, always on the same side: that alone would
    make an error of 2.7e-4."""
    call = drawn("lightning", 20000)
    decay, rows = call.pop("decay"), {name: jnp.moveaxis(jnp.asarray(x), 1, 0) for name, x in call.items()}
    operation: Any = OperationRegistry.create("lightning")

    def step(state: jax.Array, row: Arrays) -> tuple[jax.Array, jax.Array]:
        output = operation(**{name: x[:, None] for name, x in row.items()}, decay=decay, initial_state=state)
        return output.state, output.attention_outputs[0, 0]

    first = jnp.zeros((1, HEADS, DIM, VALUE_DIM))
    found = np.asarray(jax.jit(lambda rows: lax.scan(step, first, rows)[1])(rows), np.float64)
    wanted = token_by_token("lightning", call | {"decay": decay})
    last = slice(-2000, None)
    typical = np.sqrt(np.mean(wanted[last] ** 2, (0, 2), keepdims=True))
    assert (np.abs(found - wanted)[last] / typical).max() <= 5e-5
