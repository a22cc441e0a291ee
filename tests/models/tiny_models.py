"""Five tiny decoders with the names and shapes of transformers' own modules: configs, random weights, tokens, rotary tables.

The weights come from NumPy's generator, so a record of logits needs none: tiny_models_probe.py gives them to those modules.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

__all__ = ["CONFIGS", "LENGTH", "ROWS", "is_sparse", "rotary", "tokens", "weights"]

ROWS, LENGTH = 4, 40  # a prompt of 8 tokens, then 32 one by one

_COMMON: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48, "max_position_embeddings": 64,
    "intermediate_size": 24, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
# With few heads, a key whose products are all negative scores 0 as others do, and which of them is selected is open: so 16.
_INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 6}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _COMMON | _MLA | {"rope_parameters": _YARN},
    "deepseek_v32": _COMMON | _MLA | _INDEXER | {"rope_parameters": _YARN},
    # The second layer attends to what the first one's indexer selected.
    "glm_moe_dsa": _COMMON | _MLA | _INDEXER | {"rope_parameters": _PLAIN, "indexer_types": ["full", "shared"]},
    "mistral4": _COMMON
    | _MLA
    | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.2, "partial_rotary_factor": 1 / 3}},
    "minimax_m3_vl_text": _COMMON
    | {
        "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5},
        "dense_intermediate_size": 24, "shared_intermediate_size": 16, "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
        "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
    },
}  # fmt: skip
"""What each config says; its model_type is the name."""


def is_sparse(name: str, layer: int) -> bool:
    """Whether a layer has experts: all layers but the first."""
    return layer > 0


def _attention_shapes(name: str, layer: int) -> dict[str, tuple[int, ...]]:
    c = CONFIGS[name]
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    index = {key: c.get(f"index_{key}", 0) for key in ("n_heads", "head_dim")}
    if name == "minimax_m3_vl_text":
        dim, kv = c["head_dim"], c["num_key_value_heads"]
        shapes = {"q_proj": (heads * dim, hidden), "k_proj": (kv * dim, hidden), "v_proj": (kv * dim, hidden)}
        shapes |= {"o_proj": (hidden, heads * dim), "q_norm": (dim,), "k_norm": (dim,)}
        if c["layer_types"][layer] == "minimax_m3_sparse":
            shapes |= {"indexer.q_proj": (index["n_heads"] * index["head_dim"], hidden)}
            shapes |= {"indexer.k_proj": (index["head_dim"], hidden)}
            shapes |= {"indexer.q_norm": (index["head_dim"],), "indexer.k_norm": (index["head_dim"],)}
        return shapes
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    rank, latent = c["q_lora_rank"], c["kv_lora_rank"]
    shapes = {
        "q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (heads * (nope + rope), rank),
        "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent), "o_proj": (hidden, heads * value),
    }  # fmt: skip
    if "index_topk" in c and c.get("indexer_types", ["full"] * 2)[layer] == "full":
        shapes |= {"indexer.wq_b": (index["n_heads"] * index["head_dim"], rank)}
        shapes |= {"indexer.wk": (index["head_dim"], hidden), "indexer.weights_proj": (index["n_heads"], hidden)}
        shapes |= {"indexer.k_norm": (index["head_dim"],), "indexer.k_norm.bias": (index["head_dim"],)}
    return shapes


def _mlp_shapes(name: str, layer: int) -> dict[str, tuple[int, ...]]:
    c = CONFIGS[name]
    hidden, minimax = c["hidden_size"], name == "minimax_m3_vl_text"

    def gated(width: int, at: str = "") -> dict[str, tuple[int, ...]]:
        joined = {"gate_up_proj": (2 * width, hidden)}
        apart = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
        shapes = (joined if minimax else apart) | {"down_proj": (hidden, width)}
        return {at + key: shape for key, shape in shapes.items()}

    if not is_sparse(name, layer):
        return gated(c["dense_intermediate_size"] if minimax else c["intermediate_size"])
    width = c["intermediate_size"] if minimax else c["moe_intermediate_size"]
    experts = c["num_local_experts"] if minimax else c["n_routed_experts"]
    shapes = {"gate": (experts, hidden), "experts.gate_up_proj": (experts, 2 * width, hidden)}
    shapes |= {"experts.down_proj": (experts, hidden, width)}
    if name != "mistral4":
        shapes["gate.e_score_correction_bias"] = (experts,)
    return shapes | gated(c["shared_intermediate_size"] if minimax else width, "shared_experts.")


def weights(name: str) -> dict[str, np.ndarray]:
    """float32, by the names of transformers' modules without the leading `model.`."""
    c = CONFIGS[name]
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden),
        "norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        own = {f"self_attn.{key}": shape for key, shape in _attention_shapes(name, layer).items()}
        own |= {f"mlp.{key}": shape for key, shape in _mlp_shapes(name, layer).items()}
        own |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"layers.{layer}.{key}": shape for key, shape in own.items()}
    made = {}
    for key, shape in shapes.items():
        rng = np.random.default_rng(zlib.crc32(f"{name} {key}".encode()))
        whole = key.endswith(("bias", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
        drawn = rng.standard_normal(shape)
        if len(shape) > 1:
            drawn = drawn * 1.5 / math.sqrt(shape[-1])
        else:  # weights of MiniMax's norms are added to 1
            drawn = 0.1 * drawn + (0.0 if "bias" in key or name == "minimax_m3_vl_text" else 1.0)
        made[key if whole else f"{key}.weight"] = drawn.astype(np.float32)
    return made


def tokens(name: str) -> np.ndarray:
    """int32 [ROWS, LENGTH]."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.integers(3, CONFIGS[name]["vocab_size"], (ROWS, LENGTH)).astype(np.int32)


def rotary(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float64 [LENGTH, half of what is rotated]. Source of YaRN: Peng et al., "YaRN" (2023)."""
    c = CONFIGS[name]
    rope = c["rope_parameters"]
    dim = c.get("rotary_dim") or c["qk_rope_head_dim"]
    frequency = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    factor = 1.0
    if rope["rope_type"] == "yarn":
        turns = [
            dim
            * math.log(rope["original_max_position_embeddings"] / (count * 2 * math.pi))
            / 2
            / math.log(rope["rope_theta"])
            for count in (32, 1)
        ]
        low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        frequency = frequency * (1 - ramp) + frequency / rope["factor"] * ramp
        factor = yarn_scale(rope["factor"], rope["mscale"]) / yarn_scale(rope["factor"], rope["mscale_all_dim"])
    angles = np.arange(LENGTH)[:, None] * frequency
    return factor * np.cos(angles), factor * np.sin(angles)


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's factor of a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0
