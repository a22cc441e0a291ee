"""Published models whose layers differ in more than their masks, as their cards and configs describe them; and small configs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Layers(NamedTuple):
    """Layers that are alike. window: how many keys a query sees, its own included; None for all of them."""

    numbers: list[int]
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    sinks: bool = False
    indexer: dict[str, int] | None = None


_DSA = {"heads": 32, "head_dim": 128, "top_k": 2048}
_MSA = {"heads": 4, "head_dim": 128, "block_size": 128, "top_blocks": 16, "local_blocks": 1}
_MIMO_GLOBAL = [0, 5, 11, 17, 23, 29, 35, 41, 47]
_GLM_FULL = [0, 1, *range(2, 78, 4)]

LAYERED: dict[str, dict[str, Layers]] = {
    "glm-5.2": {
        "indexed 2048": Layers(_GLM_FULL, 64, 64, 256, 256, indexer=_DSA),
        "indexed 2048 shared": Layers([n for n in range(78) if n not in _GLM_FULL], 64, 64, 256, 256, indexer=_DSA),
    },
    "mimo-v2-flash": {
        "global": Layers(_MIMO_GLOBAL, 64, 4, 192, 128),
        "local 129": Layers([n for n in range(48) if n not in _MIMO_GLOBAL], 64, 8, 192, 128, window=129, sinks=True),
    },
    "gemma-4-e2b": {
        "local 512": Layers([n for n in range(15) if n % 5 != 4], 8, 1, 256, 256, window=512),
        "global": Layers([4, 9, 14], 8, 1, 512, 512),
        "local 512 shared kv": Layers([n for n in range(15, 35) if n % 5 != 4], 8, 1, 256, 256, window=512),
        "global shared kv": Layers([19, 24, 29, 34], 8, 1, 512, 512),
    },
    "gemma-4-31b": {
        "local 1024 spans": Layers([n for n in range(60) if n % 6 != 5], 32, 16, 256, 256, window=1024),
        "global": Layers(list(range(5, 60, 6)), 32, 4, 512, 512),
    },
    "minimax-m3": {
        "global": Layers([0, 1, 2], 64, 4, 128, 128),
        "indexed 16 blocks of 128": Layers(list(range(3, 60)), 64, 4, 128, 128, indexer=_MSA),
    },
}
"""Model: kind: its layers."""

# Small configs of each family.
ANY: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
DSA = ANY | {"model_type": "deepseek_v32"}
GLM = ANY | {"model_type": "glm_moe_dsa"}
MISTRAL4 = ANY | {"model_type": "mistral4"}
LONGCAT = {"model_type": "longcat_flash", "num_layers": 3, "num_attention_heads": 8, "hidden_size": 64}
MIMO = ANY | {"model_type": "mimo_v2_flash", "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16}
GEMMA4 = ANY | {"model_type": "gemma4_text", "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
MINIMAX = ANY | {"model_type": "minimax_m3_vl_text", "num_key_value_heads": 4, "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
SPARSE = {"sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 4, "sparse_topk_blocks": 3}
SPARSE |= {"sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1, 1, 1, 1]}
GLOBAL, LOCAL, INDEXED, BLOCKS = "full_attention", "sliding_attention", "indexed_attention", "minimax_m3_sparse"
