"""The layers of Nemotron-H: Mamba-2, attention without positions, a feed-forward layer, and experts; one of them in each layer.

Each takes x [..., tokens, hidden] and the layer's weights, by their names in transformers. `past` runs the declared operations.
Source: modeling_nemotron_h.py of transformers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hybrid_parts import Weights, along, experts, heads, projected, rms_norm, routed


def block(c: dict[str, Any], past: Any, number: int, w: Weights, x: jax.Array) -> jax.Array:
    """Layer `number` of the config c."""
    normed = rms_norm(x, c["layer_norm_epsilon"]) * along(w["norm.weight"], x)
    kind = past.layers[number].kind
    if kind == "mamba2":
        return x + mamba(c, past, number, w, normed)
    if kind == "mlp":
        return x + feed_forward(w, "mixer", normed)
    return x + (sparse_experts(c, w, normed) if kind == "moe" else attention(c, past, number, w, normed))


def mamba(c: dict[str, Any], past: Any, number: int, w: Weights, x: jax.Array) -> jax.Array:
    lead, inner = x.shape[:-1], c["mamba_num_heads"] * c["mamba_head_dim"]
    wide, state = c["n_groups"] * c["ssm_state_size"], c["ssm_state_size"]
    gate, channels, dt = jnp.split(projected(x, w, "mixer.in_proj"), (inner, 2 * inner + 2 * wide), -1)
    channels = past.convolve(number, channels, w["mixer.conv1d.weight"][:, 0].T, bias=w["mixer.conv1d.bias"])
    inside, b, c_ = jnp.split(channels, (inner, inner + wide), -1)
    out = past.recur(
        number, heads(inside, c["mamba_head_dim"]), dt, -jnp.exp(w["mixer.A_log"]), heads(b, state), heads(c_, state),
        D=w["mixer.D"], dt_bias=w["mixer.dt_bias"],
    )  # fmt: skip
    gated = heads(out.reshape(*lead, -1) * jax.nn.silu(gate), inner // c["n_groups"])  # normed by group
    normed = rms_norm(gated, c["layer_norm_epsilon"]).reshape(*lead, -1)
    return projected(normed * along(w["mixer.norm.weight"], normed), w, "mixer.out_proj")


def attention(c: dict[str, Any], past: Any, number: int, w: Weights, x: jax.Array) -> jax.Array:
    query, key, value = (heads(projected(x, w, f"mixer.{name}_proj"), c["head_dim"]) for name in "qkv")
    return projected(past.attend(number, query, key, value).reshape(*x.shape[:-1], -1), w, "mixer.o_proj")


def feed_forward(w: Weights, name: str, x: jax.Array) -> jax.Array:
    return projected(_squared(projected(x, w, f"{name}.up_proj")), w, f"{name}.down_proj")


def sparse_experts(c: dict[str, Any], w: Weights, x: jax.Array) -> jax.Array:
    """Experts by the sigmoid of the router, chosen with a bias, and one that sees every token."""
    scores = jax.nn.sigmoid(projected(x, w, "mixer.gate"))
    chosen_by = scores + along(w["mixer.gate.e_score_correction_bias"], scores)
    shares = routed(scores, chosen_by, c["num_experts_per_tok"]) * c["routed_scaling_factor"]
    some = experts(x, shares, w["mixer.experts.up_proj"], w["mixer.experts.down_proj"], _squared)
    return some + feed_forward(w, "mixer.shared_experts", x)


def _squared(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def shapes(c: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weights."""
    hidden = c["hidden_size"]
    own: dict[str, tuple[int, ...]]
    if kind == "mamba2":
        count, wide = c["mamba_num_heads"], 2 * c["n_groups"] * c["ssm_state_size"]
        inner = count * c["mamba_head_dim"]
        own = {"in_proj.weight": (2 * inner + wide + count, hidden), "out_proj.weight": (hidden, inner)}
        own |= {"conv1d.weight": (inner + wide, 1, c["conv_kernel"]), "conv1d.bias": (inner + wide,)}
        own |= {"norm.weight": (inner,), "A_log": (count,), "D": (count,), "dt_bias": (count,)}
    elif kind == "global":
        wide, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        own = {"q_proj.weight": (wide, hidden), "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden)}
        own |= {"o_proj.weight": (hidden, wide)}
    elif kind == "mlp":
        own = {"up_proj.weight": (c["intermediate_size"], hidden), "down_proj.weight": (hidden, c["intermediate_size"])}
    else:
        count, inner, shared = (
            c["n_routed_experts"],
            c["moe_intermediate_size"],
            c["moe_shared_expert_intermediate_size"],
        )
        own = {"experts.up_proj": (count, inner, hidden), "experts.down_proj": (count, hidden, inner)}
        own |= {"gate.weight": (count, hidden), "gate.e_score_correction_bias": (count,)}
        own |= {"shared_experts.up_proj.weight": (shared, hidden), "shared_experts.down_proj.weight": (hidden, shared)}
    return {"norm.weight": (hidden,)} | {f"mixer.{name}": shape for name, shape in own.items()}
