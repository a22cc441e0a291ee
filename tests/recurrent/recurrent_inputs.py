"""Random calls of recurrent operations, and what the reference says of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnops.verify.recurrent_reference import (
    Recurrence,
    reference_convolution,
    reference_decays,
    reference_linear,
    reference_linear_gradients,
    reference_mamba1,
)

__all__ = ["KINDS", "LINEAR", "call_of", "expected", "expected_gradients"]

LINEAR = ("gated_delta_rule", "kda", "gla", "simple_gla", "lightning", "retention", "mamba2")
KINDS = (*LINEAR, "mamba1", "causal_conv1d")
_BY_CHANNEL = ("kda", "gla")


def _ids(rng: np.random.Generator, batch: int, tokens: int) -> np.ndarray:
    return np.cumsum(rng.random((batch, tokens)) < 0.1, 1).astype(np.int32)


def call_of(
    kind: str,
    *,
    batch: int = 2,
    tokens: int = 75,
    key_heads: int = 2,
    heads: int = 4,
    dim: int = 8,
    value_dim: int = 6,
    state: bool = True,
    segments: bool = False,
    lengths: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """The arrays of a call by name, float32, in layout bthd."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def unit(*shape: int) -> np.ndarray:
        x = normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    if kind in ("mamba1", "causal_conv1d"):
        channels = heads * value_dim
        x = normal(batch, tokens, channels)
        if kind == "causal_conv1d":
            call = {"x": x, "weight": normal(4, channels), "bias": normal(channels)}
            call |= {"initial_state": normal(batch, 3, channels)} if state else {}
        else:
            call = {"x": x, "dt": np.exp(normal(batch, tokens, channels) - 1), "A": -np.exp(normal(channels, dim))}
            call |= {"B": normal(batch, tokens, dim), "C": normal(batch, tokens, dim), "D": normal(channels)}
            call |= {"initial_state": normal(batch, channels, dim)} if state else {}
    else:
        if kind == "mamba2":
            call = {"x": normal(batch, tokens, heads, value_dim), "dt": np.exp(normal(batch, tokens, heads) - 1)}
            call |= {"A": -np.exp(normal(heads)), "B": normal(batch, tokens, key_heads, dim)}
            call |= {"C": normal(batch, tokens, key_heads, dim), "D": normal(heads)}
        else:
            call = {"query": normal(batch, tokens, key_heads, dim), "key": unit(batch, tokens, key_heads, dim)}
            call |= {"value": normal(batch, tokens, heads, value_dim)}
            shape = (batch, tokens, heads, dim) if kind in _BY_CHANNEL else (batch, tokens, heads)
            if kind not in ("lightning", "retention"):
                call["decay"] = -np.exp(2 * normal(*shape) - 2)
            if kind in ("gated_delta_rule", "kda"):
                call["beta"] = (1 / (1 + np.exp(-normal(batch, tokens, heads)))).astype(np.float32)
        call |= {"initial_state": normal(batch, heads, dim, value_dim)} if state else {}
    if segments:
        call["segment_ids"] = _ids(rng, batch, tokens)
    if lengths:
        call["lengths"] = np.array([tokens - 7, tokens, 0, 1][:batch], np.int32)
    return call


def expected(kind: str, call: dict[str, Any], scale: float | None = None) -> Recurrence:
    """The reference's outputs and state, in layout bthd."""
    rest = {name: call[name] for name in ("initial_state", "segment_ids", "lengths") if name in call}
    if kind == "causal_conv1d":
        return reference_convolution(call["x"], call["weight"], call.get("bias"), **rest)
    valid = 1.0
    first = call["x"] if "x" in call else call["value"]
    if "lengths" in call:
        valid = (np.arange(first.shape[1])[None] < call["lengths"][:, None]).astype(np.float64)
        valid = valid.reshape(*valid.shape, *[1] * (first.ndim - 2))
    if kind == "mamba1":
        found = reference_mamba1(call["x"], call["dt"], call["A"], call["B"], call["C"], **rest)
        return found._replace(outputs=found.outputs + call["D"] * call["x"].astype(np.float64) * valid)
    arrays, scale = _linear(kind, call, scale)
    found = reference_linear(*arrays, **rest, scale=scale)
    if kind == "mamba2":
        found = found._replace(outputs=found.outputs + call["D"][:, None] * call["x"].astype(np.float64) * valid)
    return found


def _linear(kind: str, call: dict[str, Any], scale: float | None) -> tuple[tuple[Any, ...], float]:
    """((query, key, value, log decay, beta), the scale) of a call of linear attention."""
    if kind == "mamba2":
        dt, x = call["dt"].astype(np.float64), call["x"].astype(np.float64)
        return (call["C"], call["B"], dt[..., None] * x, (dt * call["A"])[..., None], None), 1.0
    value = call["value"]
    decay = call.get("decay")
    if decay is None:
        decay = np.broadcast_to(reference_decays(kind, value.shape[2]), value.shape[:3])
    decay = decay[..., None] if decay.ndim == 3 else decay
    scale = call["key"].shape[3] ** -0.5 if scale is None else scale
    return (call["query"], call["key"], value, decay, call.get("beta")), scale


def expected_gradients(
    kind: str, call: dict[str, Any], d_outputs: np.ndarray, d_state: np.ndarray
) -> dict[str, np.ndarray]:
    """The reference's gradient of each floating array of a call of linear attention."""
    rest = {name: call[name] for name in ("initial_state", "segment_ids", "lengths") if name in call}
    arrays, scale = _linear(kind, call, None)
    found = reference_linear_gradients(*arrays, **rest, scale=scale, d_outputs=d_outputs, d_state=d_state)
    if kind == "mamba2":
        dt, x = call["dt"].astype(np.float64), call["x"].astype(np.float64)
        d_value, d_decay = found["value"], found["decay"][..., 0]
        ends = call.get("lengths", np.full(x.shape[0], x.shape[1]))
        d_outputs = np.where((np.arange(x.shape[1])[None] < ends[:, None])[..., None, None], d_outputs, 0)
        found |= {"C": found["query"], "B": found["key"]}
        found |= {"x": dt[..., None] * d_value + call["D"][:, None] * d_outputs, "D": (x * d_outputs).sum((0, 1, 3))}
        found |= {"dt": (x * d_value).sum(-1) + call["A"] * d_decay, "A": (dt * d_decay).sum((0, 1))}
    floating = {name: x for name, x in call.items() if np.issubdtype(x.dtype, np.floating)}
    return {name: found[name].reshape(x.shape) for name, x in floating.items()}
