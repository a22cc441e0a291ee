"""An attention layer in float64 NumPy, its training step and its decoding: what several processes must reproduce."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attnops.verify import reference_attention, reference_gradients

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, DIM = 4, 64, 32, 8, 4, 8
RATE, STEPS = 2.0, 2
CACHE, FILLED, TOKENS = 64, 37, 3
SCALE = DIM**-0.5
SHAPES = {"query": (WIDTH, HEADS, DIM), "key": (WIDTH, KV_HEADS, DIM), "value": (WIDTH, KV_HEADS, DIM)}


class Drawn(NamedTuple):
    """x and wanted [batch, length, width]; weights by name."""

    weights: dict[str, np.ndarray]
    x: np.ndarray
    wanted: np.ndarray


def draw() -> Drawn:
    """The same values in every process."""
    rng = np.random.default_rng(5)
    weights = {name: rng.standard_normal(shape) / WIDTH**0.5 for name, shape in SHAPES.items()}
    weights["output"] = rng.standard_normal((HEADS, DIM, WIDTH)) / (HEADS * DIM) ** 0.5
    x, wanted = rng.standard_normal((2, BATCH, LENGTH, WIDTH))
    single = lambda v: v.astype(np.float32)  # noqa: E731
    return Drawn({name: single(w) for name, w in weights.items()}, single(x), single(wanted))


def draw_cache() -> dict[str, np.ndarray]:
    """A cache with FILLED keys of CACHE, different lengths per sequence, and the tokens to come."""
    rng = np.random.default_rng(6)
    shapes = {
        "key_cache": (BATCH, CACHE, KV_HEADS, DIM),
        "value_cache": (BATCH, CACHE, KV_HEADS, DIM),
        "query": (TOKENS, BATCH, 1, HEADS, DIM),
        "key": (TOKENS, BATCH, 1, KV_HEADS, DIM),
        "value": (TOKENS, BATCH, 1, KV_HEADS, DIM),
    }
    drawn: dict[str, np.ndarray] = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    drawn["lengths"] = np.array([FILLED, 5, FILLED + 9, 20], np.int32)
    return drawn


def trained() -> dict[str, Any]:
    """Loss of each step, and the weights after the last, by a chain rule written out."""
    drawn = draw()
    w = {name: value.astype(np.float64) for name, value in drawn.weights.items()}
    x, causal = drawn.x.astype(np.float64), np.tril(np.ones((LENGTH, LENGTH), bool))
    losses = []
    for _ in range(STEPS):
        q, k, v = (np.einsum("btw,whd->bthd", x, w[name]) for name in SHAPES)
        heads = reference_attention(q, k, v, scale=SCALE, mask=causal).output
        error = np.einsum("bthd,hdw->btw", heads, w["output"]) - drawn.wanted
        losses.append(0.5 * (error**2).mean())
        d_error = error / error.size
        gradients = {"output": np.einsum("bthd,btw->hdw", heads, d_error)}
        d_heads = np.einsum("btw,hdw->bthd", d_error, w["output"])
        for name, d in reference_gradients(q, k, v, d_heads, scale=SCALE, mask=causal).items():
            gradients[name] = np.einsum("btw,bthd->whd", x, d)
        w = {name: w[name] - RATE * gradients[name] for name in w}
    return {"losses": np.array(losses), **w}


def decoded() -> np.ndarray:
    """Outputs [token, batch, 1, heads, dim]: each token's key and value join the cache before it attends."""
    drawn = draw_cache()
    keys, values, rows = drawn["key_cache"].copy(), drawn["value_cache"].copy(), np.arange(BATCH)
    outputs = []
    for token in range(TOKENS):
        at = drawn["lengths"] + token
        keys[rows, at], values[rows, at] = drawn["key"][token, :, 0], drawn["value"][token, :, 0]
        seen = (np.arange(CACHE) <= at[:, None])[:, None, None]
        outputs.append(reference_attention(drawn["query"][token], keys, values, scale=SCALE, mask=seen).output)
    return np.stack(outputs)
