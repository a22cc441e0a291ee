"""A model's weights by their names in transformers: random ones to start from, and where they are on a mesh."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import nemotron_h_layers
import numpy as np
import qwen3_next_layers
from hybrid_model import Model
from hybrid_parts import Weights
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Shapes = dict[str, tuple[int, ...]]


def shapes(model: Model) -> Shapes:
    """The shape of each weight."""
    c = model.config
    whole, hidden = (c["vocab_size"], c["hidden_size"]), c["hidden_size"]
    if model.family == "qwen3_next":
        made: Shapes = {"model.embed_tokens.weight": whole, "model.norm.weight": (hidden,), "lm_head.weight": whole}
        of_layer = qwen3_next_layers.shapes
    else:
        made = {"model.embeddings.weight": whole, "model.norm_f.weight": (hidden,), "lm_head.weight": whole}
        of_layer = nemotron_h_layers.shapes
    for number, layer in enumerate(model.layers):
        made |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer(c, layer.kind).items()}
    return made


def initial(model: Model, seed: int) -> Weights:
    """Random weights: products keep the size of what they are given; decays are around e^-0.1 to e^-1 for a token."""
    return {name: jnp.asarray(_drawn(name, shape, model, seed), jnp.float32) for name, shape in shapes(model).items()}


def _drawn(name: str, shape: tuple[int, ...], model: Model, seed: int) -> np.ndarray:
    random, last = np.random.default_rng((seed, zlib.crc32(name.encode()))), name.rpartition(".")[2]
    match last:
        case "A_log":
            return np.log(random.uniform(1, 8, shape))
        case "dt_bias":  # softplus of it is the step
            return np.log(np.expm1(np.exp(random.uniform(np.log(0.01), np.log(0.2), shape))))
        case "D":
            return np.ones(shape)
    if len(shape) == 1:  # biases, and norms: Qwen3-Next adds 1 to all but the one behind the delta rule
        norm = "norm" in name and (model.family != "qwen3_next" or "linear_attn" in name)
        return np.ones(shape) if norm else np.zeros(shape)
    if "embed" in name:
        return 0.5 * random.standard_normal(shape)
    return random.standard_normal(shape) * shape[-1] ** -0.5


# By the last parts of their names; the rest (norms, embedding, convolutions) is whole on every device.
_SPECS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "in_proj"), P("tp")),
    **dict.fromkeys(("gate_proj", "up_proj", "lm_head"), P("tp")),
    **dict.fromkeys(("o_proj", "out_proj", "down_proj"), P(None, "tp")),
}


def spec_of(name: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> P:
    """Where a weight is: experts are split by expert; a dimension that tp doesn't divide isn't split."""
    whole = "experts." in name and len(shape) == 3
    spec = P("tp") if whole else _SPECS.get(name.removesuffix(".weight").rpartition(".")[2], P())
    count = mesh.shape.get("tp", 0)
    return P(*(axis if count and size % count == 0 else None for axis, size in zip(spec, shape, strict=False)))


def placed(weights: Weights, mesh: jax.sharding.Mesh | None) -> Weights:
    """The weights on a mesh with an axis tp, or on one device."""
    if mesh is None:
        return jax.device_put(weights)
    places = {name: NamedSharding(mesh, spec_of(name, x.shape, mesh)) for name, x in weights.items()}
    return jax.device_put(weights, places)
