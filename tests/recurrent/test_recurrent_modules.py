"""transformers' modules of recurrent layers made of attnops' operations: the same outputs, whole and in parts with a state.

The record is made by recurrent_probe.py. Projections and norms are plain products here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_probe import RECORD, TOKENS

from attnops import Attention

State = dict[str, jax.Array]
Layer = Callable[[jax.Array, State], tuple[jax.Array, State]]
_RECORD = dict(np.load(RECORD))


def _weights(name: str) -> dict[str, np.ndarray]:
    start = f"{name}/weights/"
    return {key.removeprefix(start): x for key, x in _RECORD.items() if key.startswith(start)}


def _continued(state: State, name: str) -> dict[str, jax.Array]:
    return {"initial_state": state[name]} if name in state else {}


def _rms(x: jax.Array, weight: np.ndarray, eps: float) -> jax.Array:
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(eps))
    return normed * weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


_CONVOLVE = Attention("causal_conv1d", activation="silu")


def _convolved(x: jax.Array, w: dict[str, Any], state: State) -> Any:
    weight = np.swapaxes(w["conv1d.weight"][:, 0], 0, 1)
    return _CONVOLVE(x, weight, bias=w.get("conv1d.bias"), **_continued(state, "tokens"))


def qwen3_next(w: dict[str, Any]) -> Layer:
    rule = Attention("gated_delta_rule", gate="raw", beta_form="sigmoid", normalise_qk=True)

    def layer(x: jax.Array, state: State) -> tuple[jax.Array, State]:
        batch, tokens, _ = x.shape
        grouped = (x @ w["in_proj_qkvz.weight"].T).reshape(batch, tokens, 2, 2 * 8 + 4 * 6)
        query, key, value, gate = jnp.split(grouped, (8, 16, 28), -1)
        beta, decay = (
            a.reshape(batch, tokens, 4)
            for a in jnp.split((x @ w["in_proj_ba.weight"].T).reshape(batch, tokens, 2, 4), 2, -1)
        )
        mixed = jnp.concatenate([a.reshape(batch, tokens, -1) for a in (query, key, value)], -1)
        made = _convolved(mixed, w, state)
        query, key, value = jnp.split(made.attention_outputs, (16, 32), -1)
        found = rule(
            query.reshape(batch, tokens, 2, 8),
            key.reshape(batch, tokens, 2, 8),
            value.reshape(batch, tokens, 4, 6),
            decay=decay,
            beta=beta,
            A_log=w["A_log"],
            dt_bias=w["dt_bias"],
            **_continued(state, "state"),
        )
        normed = _rms(found.attention_outputs, w["norm.weight"], 1e-6) * jax.nn.silu(gate.reshape(batch, tokens, 4, 6))
        after = {"tokens": made.state, "state": found.state}
        return normed.reshape(batch, tokens, -1) @ w["out_proj.weight"].T, after

    return layer


def mamba2(w: dict[str, Any]) -> Layer:
    run = Attention("mamba2", dt_softplus=True)

    def layer(x: jax.Array, state: State) -> tuple[jax.Array, State]:
        batch, tokens, _ = x.shape
        gate, mixed, dt = jnp.split(x @ w["in_proj.weight"].T, (24, 24 + 24 + 32), -1)
        made = _convolved(mixed, w, state)
        inner, b, c = jnp.split(made.attention_outputs, (24, 40), -1)
        found = run(
            inner.reshape(batch, tokens, 4, 6),
            dt,
            -np.exp(w["A_log"]),
            b.reshape(batch, tokens, 2, 8),
            c.reshape(batch, tokens, 2, 8),
            D=w["D"],
            dt_bias=w["dt_bias"],
            **_continued(state, "state"),
        )
        gated = found.attention_outputs.reshape(batch, tokens, -1) * jax.nn.silu(gate)
        normed = _rms(gated.reshape(batch, tokens, 2, 12), w["norm.weight"].reshape(2, 12), 1e-5).reshape(
            batch, tokens, -1
        )
        return normed @ w["out_proj.weight"].T, {"tokens": made.state, "state": found.state}

    return layer


def mamba1(w: dict[str, Any]) -> Layer:
    run = Attention("mamba1", dt_softplus=True)

    def layer(x: jax.Array, state: State) -> tuple[jax.Array, State]:
        mixed, gate = jnp.split(x @ w["in_proj.weight"].T, 2, -1)
        made = _convolved(mixed, w, state)
        inner = made.attention_outputs
        low, b, c = jnp.split(inner @ w["x_proj.weight"].T, (3, 7), -1)
        dt = low @ w["dt_proj.weight"].T
        arrays = (inner, dt, -np.exp(w["A_log"]), b, c)
        found = run(*arrays, D=w["D"], dt_bias=w["dt_proj.bias"], **_continued(state, "state"))
        output = (found.attention_outputs * jax.nn.silu(gate)) @ w["out_proj.weight"].T
        return output, {"tokens": made.state, "state": found.state}

    return layer


def minimax(w: dict[str, Any]) -> Layer:
    run = Attention("lightning", scale=1.0)
    # Layer 2 of 4.
    decay = run.operation.decays(3) * np.float32(1 - 2 / (3 + 1e-5) + 1e-5)

    def layer(x: jax.Array, state: State) -> tuple[jax.Array, State]:
        batch, tokens, _ = x.shape
        mixed = jax.nn.silu(x @ w["qkv_proj.weight"].T).reshape(batch, tokens, 3, 24)
        found = run(*jnp.split(mixed, 3, -1), decay=decay, **_continued(state, "state"))
        normed = _rms(found.attention_outputs.reshape(batch, tokens, -1), w["norm.weight"], 1e-6)
        gate = jax.nn.sigmoid(x @ w["output_gate.weight"].T)
        return (gate * normed) @ w["out_proj.weight"].T, {"state": found.state}

    return layer


LAYERS = {"gated_delta_rule": qwen3_next, "mamba2": mamba2, "mamba1": mamba1, "lightning": minimax}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("parts", [(TOKENS,), pytest.param((30, 34, *[1] * 6), id="parts")])
def test_gives_what_the_module_gives(name: str, parts: tuple[int, ...]) -> None:
    layer, x, wanted = jax.jit(LAYERS[name](_weights(name))), _RECORD[f"{name}/input"], _RECORD[f"{name}/output"]
    assert sum(parts) == TOKENS
    state: State = {}
    outputs, first = [], 0
    for count in parts:
        output, state = layer(x[:, first : first + count], state)
        outputs.append(output)
        first += count
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
