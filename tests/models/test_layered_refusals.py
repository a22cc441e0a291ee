"""What of configs with indexers, heads by layer or shared keys makes no sense or can't be declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layered_models import (
    ANY,
    BLOCKS,
    DSA,
    GEMMA4,
    GLM,
    GLOBAL,
    INDEXED,
    LOCAL,
    LONGCAT,
    MIMO,
    MINIMAX,
    MISTRAL4,
    SPARSE,
    YARN,
)

from attnops import ModelDeclaration
from attnops.errors import ConfigError

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"

BAD: list[tuple[dict[str, Any], str]] = [
    (DSA | {"index_topk": 0}, "index_topk=0; wanted a whole number from 1 up"),
    (DSA | {"index_topk": 2048.0}, "index_topk=2048.0"),
    (DSA | {"index_n_heads": True}, "index_n_heads=True"),
    (DSA | {"index_head_dim": 32}, "index_head_dim=32 is less than qk_rope_head_dim=64"),
    (
        DSA | {"layer_types": [INDEXED] * 5 + [GLOBAL]},
        r"layer_types\[5\] is 'full_attention'; wanted indexed_attention",
    ),
    (DSA | {"layer_types": [INDEXED] * 5}, "5 entries; wanted a list with one entry for each of 6 layers"),
    (ANY | {"model_type": "deepseek_v3", "index_topk": 8}, "deepseek_v3 don't read index_topk"),
    (ANY | {"model_type": "llama", "index_topk": 8}, "llama don't read index_topk"),
    (ANY | {"model_type": "qwen3", "layer_types": [INDEXED] * 6}, r"layer_types\[0\] is 'indexed_attention'"),
    (GLM | {"indexer_types": ["full"] * 5}, "indexer_types: got 5 entries; wanted one for each of 6 layers"),
    (GLM | {"indexer_types": ["full"] * 5 + ["none"]}, r"indexer_types\[5\] is 'none'; wanted 'full' or 'shared'"),
    (GLM | {"indexer_types": "FFFFFF"}, "indexer_types='FFFFFF'; wanted a list of 'full' and 'shared'"),
    (GLM | {"index_topk_pattern": "FSX" * 2}, r"index_topk_pattern\[2\] is 'X'"),
    (GLM | {"index_topk_pattern": 4}, "index_topk_pattern=4; wanted a list"),
    (GLM | {"index_topk_freq": -1}, "index_topk_freq=-1"),
    (MISTRAL4 | {"rope_parameters": YARN}, "llama_4_scaling_beta=None; wanted a number, 0 for queries"),
    (
        MISTRAL4 | {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "original_max_position_embeddings=None; wanted a whole",
    ),
    (MISTRAL4 | {"rope_parameters": [1]}, r"rope_scaling=\[1\]; wanted an object"),
    (MISTRAL4 | {"sliding_window": 8}, "mistral4 don't read sliding_window"),
    (LONGCAT | {"num_layers": 2.5}, "num_layers=2.5; wanted a whole number from 1"),
    (LONGCAT | {"num_layers": True}, "num_layers=True"),
    (LONGCAT | {"num_hidden_layers": 3}, "num_layers=3 and num_hidden_layers=3 contradict each other"),
    (LONGCAT | {"num_layers": None, "num_hidden_layers": 5}, "num_hidden_layers=5; wanted an even number"),
    ({"model_type": "longcat_flash", "num_attention_heads": 8}, "num_layers missing"),
    (LONGCAT | {"attention_method": "MHA"}, "attention_method='MHA': another attention"),
    (MIMO | {"sliding_window_size": 0}, "sliding_window_size=0; wanted a whole number from 1 up"),
    (MIMO | {"sliding_window_size": 4, "attention_chunk_size": 8}, "don't read attention_chunk_size"),
    (
        MIMO | {"hybrid_layer_pattern": [0, 1, 2, 1, 1, 0]},
        r"hybrid_layer_pattern=\[0, 1, 2, 1, 1, 0\]; wanted a list of 0",
    ),
    (MIMO | {"hybrid_layer_pattern": [0, 1]}, "2 entries; wanted a list with one entry for each of 6"),
    (
        MIMO | {"hybrid_layer_pattern": [0] * 6, "layer_types": [LOCAL] * 6},
        "hybrid_layer_pattern contradict each other",
    ),
    (MIMO | {"swa_num_attention_heads": 4}, "swa_num_attention_heads=4 and num_attention_heads=8; wanted as many"),
    (
        MIMO | {"swa_num_key_value_heads": 3},
        "num_attention_heads=8 is not a multiple of the 3 key heads of local layers",
    ),
    (MIMO | {"swa_head_dim": 0}, "swa_head_dim=0"),
    (MIMO | {"v_head_dim": "16"}, "v_head_dim='16'"),
    (MIMO | {"add_swa_attention_sink_bias": 1}, "add_swa_attention_sink_bias=1; wanted true or false"),
    (GEMMA4 | {"global_head_dim": 0}, "global_head_dim=0"),
    (
        GEMMA4 | {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
        "not a multiple of the 3 key heads of full_attention",
    ),
    (
        GEMMA4 | {"num_global_key_value_heads": 4, "attention_k_eq_v": "yes"},
        "attention_k_eq_v='yes'; wanted true or false",
    ),
    (
        GEMMA4 | {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True; wanted null, 'vision' or 'all'",
    ),
    (GEMMA4 | {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 of 6 layers: before layer 0 there is no"),
    (GEMMA4 | {"num_kv_shared_layers": 1}, "before layer 5 there is no full_attention layer"),
    (GEMMA4 | {"num_kv_shared_layers": 7}, "num_kv_shared_layers=7"),
    (GEMMA4 | {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config beside global_head_dim"),
    (GEMMA4 | {"global_head_dim": None, "per_layer_config": {"6": {}}}, "per_layer_config has the key '6'"),
    (GEMMA4 | {"global_head_dim": None, "per_layer_config": {"x": {}}}, "per_layer_config has the key 'x'"),
    (GEMMA4 | {"global_head_dim": None, "per_layer_config": {"1": 8}}, r"per_layer_config\[1\]=8; wanted an object"),
    (GEMMA4 | {"global_head_dim": None, "per_layer_config": [8]}, r"per_layer_config=\[8\]; wanted an object"),
    (
        GEMMA4 | {"global_head_dim": None, "per_layer_config": {"1": {"head_dim": 0}}},
        r"per_layer_config\[1\].head_dim=0",
    ),
    (
        GEMMA4 | {"global_head_dim": None, "per_layer_config": {"1": {"sliding_window": 4}}},
        r"per_layer_config\[1\].sliding_window=4; attnops reads head_dim and num_key_value_heads",
    ),
    (MINIMAX | {"layer_types": [GLOBAL, "linear_attention"] * 3}, r"layer_types\[1\] is 'linear_attention'"),
    (MINIMAX | {"layer_types": [BLOCKS] * 6, "is_causal": False}, "is indexed, but is_causal is false"),
    (MINIMAX | {"layer_types": [BLOCKS] * 6, "index_n_heads": 3}, "not a multiple of index_n_heads=3"),
    (MINIMAX | {"layer_types": [BLOCKS] * 6, "index_local_blocks": -1}, "index_local_blocks=-1"),
    (MINIMAX | {"layer_types": [BLOCKS] * 6, "index_block_size": 0}, "index_block_size=0"),
    (MINIMAX | {"sparse_attention_config": [1]}, r"sparse_attention_config=\[1\]; wanted an object"),
    (MINIMAX | {"sparse_attention_config": {"sparse_attention_freq": [2] * 6}}, "wanted a list of 0 and 1"),
    (
        MINIMAX | {"sparse_attention_config": SPARSE, "layer_types": [BLOCKS] * 6},
        "sparse_attention_freq contradict each",
    ),
    (
        MINIMAX | {"sparse_attention_config": SPARSE, "index_head_dim": 16},
        "index_head_dim=16 and sparse_attention_config.sparse_i",
    ),
    (MINIMAX | {"sparse_attention_config": SPARSE | {"sparse_init_block": 1}}, "sparse_init_block=1; wanted 0"),
    (
        MINIMAX | {"sparse_attention_config": SPARSE | {"use_sparse_attention": False}},
        "use_sparse_attention=False; wanted True",
    ),
    (
        MINIMAX | {"sparse_attention_config": SPARSE | {"sparse_new": 1}},
        "sparse_new=1; it isn't one that transformers reads",
    ),
    (
        MINIMAX | {"sparse_attention_config": SPARSE | {"sparse_disable_index_value": [0] * 6}},
        "an indexer with values of its own",
    ),
]


@pytest.mark.parametrize(("config", "says"), BAD, ids=[f"{number}-{says[:30]}" for number, (_, says) in enumerate(BAD)])
def test_what_makes_no_sense_or_cannot_be_declared(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelDeclaration.from_config(config)


def test_the_whole_of_a_model_without_its_text() -> None:
    text = json.loads((MODELS / "minimax-m3.json").read_text())["text_config"]
    with pytest.raises(ConfigError, match="family='minimax_m3_vl_text'"):
        ModelDeclaration.from_config(text | {"model_type": "minimax_m3_vl"})
    with pytest.raises(ConfigError, match="family='gemma4_text'"):
        ModelDeclaration.from_config({"model_type": "gemma4", "text_config": {"num_hidden_layers": 2}})
