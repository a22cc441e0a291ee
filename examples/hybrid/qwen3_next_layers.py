"""The layers of Qwen3-Next: the gated delta rule behind a convolution, gated attention, and experts.

Each takes x [..., tokens, hidden] and the layer's weights, by their names in transformers. `past` runs the declared operations.
Source: modeling_qwen3_next.py of transformers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hybrid_parts import Weights, along, experts, heads, projected, rms_norm, rotary, routed


def block(c: dict[str, Any], past: Any, number: int, w: Weights, x: jax.Array) -> jax.Array:
    """Layer `number` of the config c: a mixer of tokens, then experts."""
    mixer = gated_attention if past.layers[number].attention is not None else delta_rule
    x = x + mixer(c, past, number, w, norm(c, w, "input_layernorm", x))
    return x + sparse_experts(c, w, norm(c, w, "post_attention_layernorm", x))


def norm(c: dict[str, Any], w: Weights, name: str, x: jax.Array) -> jax.Array:
    return rms_norm(x, c["rms_norm_eps"]) * (1 + along(w[f"{name}.weight"], x))


def delta_rule(c: dict[str, Any], past: Any, number: int, w: Weights, x: jax.Array) -> jax.Array:
    groups, count = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dim, value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
    lead, wide = x.shape[:-1], count // groups * value_dim
    # Each key head has its query, its key, and values and gates of the heads of values that share it.
    mixed = projected(x, w, "linear_attn.in_proj_qkvz").reshape(*lead, groups, 2 * dim + 2 * wide)
    *mixed, gate = jnp.split(mixed, (dim, 2 * dim, 2 * dim + wide), -1)
    gates = projected(x, w, "linear_attn.in_proj_ba").reshape(*lead, groups, 2 * count // groups)
    beta, decay = (y.reshape(*lead, count) for y in jnp.split(gates, 2, -1))
    channels = jnp.concatenate([y.reshape(*lead, -1) for y in mixed], -1)
    channels = past.convolve(number, channels, w["linear_attn.conv1d.weight"][:, 0].T)
    query, key, value = jnp.split(channels, (groups * dim, 2 * groups * dim), -1)
    out = past.recur(
        number, heads(query, dim), heads(key, dim), heads(value, value_dim), decay=decay, beta=beta,
        A_log=w["linear_attn.A_log"], dt_bias=w["linear_attn.dt_bias"],
    )  # fmt: skip
    out = rms_norm(out, c["rms_norm_eps"]) * along(w["linear_attn.norm.weight"], out)
    out = out * jax.nn.silu(gate.reshape(out.shape))
    return projected(out.reshape(*lead, -1), w, "linear_attn.out_proj")


def gated_attention(c: dict[str, Any], past: Any, number: int, w: Weights, x: jax.Array) -> jax.Array:
    dim = c["head_dim"]
    turn = int(dim * c["partial_rotary_factor"])
    query, gate = jnp.split(heads(projected(x, w, "self_attn.q_proj"), 2 * dim), 2, -1)
    key, value = (heads(projected(x, w, f"self_attn.{name}_proj"), dim) for name in "kv")
    query, key = norm(c, w, "self_attn.q_norm", query), norm(c, w, "self_attn.k_norm", key)
    query, key = (rotary(y, past.positions, turn, c["rope_theta"]) for y in (query, key))
    out = past.attend(number, query, key, value) * jax.nn.sigmoid(gate)
    return projected(out.reshape(*x.shape[:-1], -1), w, "self_attn.o_proj")


def sparse_experts(c: dict[str, Any], w: Weights, x: jax.Array) -> jax.Array:
    """Experts by the softmax of the router, and one that sees every token behind a gate."""
    scores = jax.nn.softmax(projected(x, w, "mlp.gate"))
    shares = routed(scores, scores, c["num_experts_per_tok"])

    def gated(y: jax.Array) -> jax.Array:
        gate, up = jnp.split(y, 2, -1)
        return jax.nn.silu(gate) * up

    some = experts(x, shares, w["mlp.experts.gate_up_proj"], w["mlp.experts.down_proj"], gated)
    inner = jax.nn.silu(projected(x, w, "mlp.shared_expert.gate_proj")) * projected(x, w, "mlp.shared_expert.up_proj")
    shared = projected(inner, w, "mlp.shared_expert.down_proj")
    return some + jax.nn.sigmoid(projected(x, w, "mlp.shared_expert_gate")) * shared


def shapes(c: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weights."""
    hidden, inner, shared = c["hidden_size"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    made: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    made |= {"mlp.gate.weight": (c["num_experts"], hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    made |= {"mlp.experts.gate_up_proj": (c["num_experts"], 2 * inner, hidden)}
    made |= {"mlp.experts.down_proj": (c["num_experts"], hidden, inner)}
    made |= {f"mlp.shared_expert.{name}_proj.weight": (shared, hidden) for name in ("gate", "up")}
    made |= {"mlp.shared_expert.down_proj.weight": (hidden, shared)}
    if kind == "global":
        wide, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        own = {"q_proj": (2 * wide, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, wide)}
        own |= {"q_norm": (c["head_dim"],), "k_norm": (c["head_dim"],)}
        return made | {f"self_attn.{name}.weight": shape for name, shape in own.items()}
    heads = c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    own = {"in_proj_qkvz.weight": (2 * keys + 2 * values, hidden), "in_proj_ba.weight": (2 * heads, hidden)}
    own |= {"conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]), "out_proj.weight": (hidden, values)}
    own |= {"norm.weight": (c["linear_value_head_dim"],), "A_log": (heads,), "dt_bias": (heads,)}
    return made | {f"linear_attn.{name}": shape for name, shape in own.items()}
