"""What transformers itself does with a config: every layer's attention call, caught inside small models on the CPU.

`python tests/models/transformers_probe.py` writes tests/data/model_truth.json; needs torch and transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRUTH = Path(__file__).resolve().parents[1] / "data" / "model_truth.json"
LENGTH = 24

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.25,
}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_probs_dropout_prob": 0.25,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
}
_YARN = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}
_WINDOW = {"sliding_window": 5}
_QWEN = _WINDOW | {"use_sliding_window": True}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.25}
_TWO = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "attention_dropout": 0.25,
}
_DROPLESS = {key: value for key, value in _SMALL.items() if key != "attention_dropout"}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_MIXED = [_GLOBAL, _LOCAL, _LOCAL, _GLOBAL, _LOCAL, _LOCAL, _LOCAL, _GLOBAL]

# The indexers leave all keys of so few tokens.
_INDEXER = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
_LONGCAT = {
    key: value for key, value in (_SMALL | _MLA).items() if key not in ("num_hidden_layers", "n_group", "topk_group")
}
_LONGCAT |= {
    "num_layers": 3,
    "head_dim": 8,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 32,
}
_MIMO = {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_GEMMA4 = _WINDOW | {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 64,
}
_OWN = {"head_dim": 8, "num_key_value_heads": 4}
_GEMMA4_SAVED = {key: value for key, value in _GEMMA4.items() if "global" not in key}
_GEMMA4_SAVED |= {"layer_types": _MIXED, "per_layer_config": {"00": _OWN, "03": _OWN, "07": _OWN}}
_MINIMAX = {
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 4,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", _SMALL),
    ("llama", _SMALL | {"head_dim": 16, "is_causal": False}),
    ("mistral", _SMALL | _WINDOW),
    ("mistral", _SMALL | {"sliding_window": None, "head_dim": 16}),
    ("mistral", _SMALL | _WINDOW | {"is_causal": False}),
    ("mixtral", _SMALL | _WINDOW | {"num_local_experts": 2}),
    ("ministral", _SMALL | _WINDOW | {"head_dim": 16}),
    ("qwen2", _SMALL | _QWEN | {"max_window_layers": 3}),
    ("qwen2", _SMALL | _WINDOW | {"use_sliding_window": False, "max_window_layers": 3}),
    ("qwen2_moe", _SMALL | _QWEN | {"max_window_layers": 5, "num_experts": 4}),
    ("qwen3", _SMALL | _QWEN | {"max_window_layers": 2, "head_dim": 16}),
    ("qwen3", _SMALL | _QWEN | {"layer_types": _MIXED, "head_dim": 16}),
    ("qwen3_moe", _SMALL | _QWEN | {"head_dim": 16, "num_experts": 8}),
    ("gemma", _SMALL | {"head_dim": 16}),
    ("gemma2", _SMALL | _WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 30.0}),
    ("gemma2", _SMALL | _WINDOW | {"head_dim": 16, "attn_logit_softcapping": None, "layer_types": _MIXED}),
    ("gemma3_text", _SMALL | _WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 20}),
    ("gemma3_text", _SMALL | _WINDOW | {"head_dim": 16, "sliding_window_pattern": 3}),
    ("gemma3_text", _SMALL | {"head_dim": 16, "sliding_window": 6, "use_bidirectional_attention": True}),
    ("gemma3_text", _SMALL | {"head_dim": 16, "sliding_window": 7, "use_bidirectional_attention": True}),
    ("gpt_oss", _SMALL | _WINDOW | {"head_dim": 16, "num_local_experts": 4}),
    ("llama4_text", _SMALL | {"head_dim": 16, "attention_chunk_size": 6, "num_local_experts": 2}),
    (
        "llama4_text",
        _SMALL | {"head_dim": 16, "attention_chunk_size": 5, "no_rope_layers": [1, 0] * 4, "num_local_experts": 2},
    ),
    ("phi", _SMALL),
    ("phi3", _SMALL | _WINDOW),
    ("phi3", _SMALL | _WINDOW | {"full_attn_mod": 1}),
    ("cohere", _SMALL),
    ("cohere2", _SMALL | _WINDOW),
    ("cohere2", _SMALL | _WINDOW | {"sliding_window_pattern": 2}),
    ("cohere2", _SMALL | _WINDOW | {"sliding_window_pattern": 4, "position_embedding_type": "rope_gptj"}),
    ("olmo2", _SMALL),
    ("olmo3", _SMALL | _WINDOW),
    ("granite", _SMALL | {"attention_multiplier": 0.3}),
    ("smollm3", _SMALL | _QWEN | {"no_rope_layer_interval": 3}),
    ("smollm3", _SMALL),
    ("starcoder2", _SMALL | _WINDOW),
    ("stablelm", _SMALL),
    ("glm4", _SMALL | {"head_dim": 16}),
    ("deepseek_v2", _SMALL | _MLA | {"rope_scaling": _YARN, "topk_method": "greedy", "num_experts_per_tok": 2}),
    ("deepseek_v3", _SMALL | _MLA | {"rope_scaling": _YARN, "num_experts_per_tok": 2}),
    ("deepseek_v3", _SMALL | _MLA | {"num_experts_per_tok": 2}),
    ("bert", _ENCODER),
    ("bert", _ENCODER | {"is_decoder": True}),
    ("roberta", _ENCODER),
    ("xlm-roberta", _ENCODER),
    ("electra", _ENCODER | {"embedding_size": 32}),
    ("electra", _ENCODER | {"embedding_size": 32, "is_decoder": True}),
    ("ernie4_5", _DROPLESS | {"head_dim": 16}),
    ("exaone4", _SMALL | _WINDOW | {"head_dim": 16}),
    ("exaone4", _SMALL | _WINDOW | {"head_dim": 16, "sliding_window_pattern": 3}),
    ("exaone4", _SMALL | {"head_dim": 16, "layer_types": ["full_attention"] * 8, "sliding_window": None}),
    ("exaone4", _SMALL | _WINDOW | {"layer_types": ([_LOCAL] * 3 + [_GLOBAL]) * 2, "sliding_window_pattern": "LLLG"}),
    ("glm", _SMALL | {"head_dim": 16}),
    ("glm4_moe", _SMALL | {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    ("gpt_neox", {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}),
    ("granitemoe", _SMALL | {"attention_multiplier": 0.3, "num_local_experts": 2}),
    ("olmo", _SMALL | {"clip_qkv": 8.0}),
    (
        "opt",
        {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"} | {"ffn_dim": 32, "word_embed_proj_dim": 32},
    ),
    ("seed_oss", _SMALL | {"head_dim": 16}),
    ("bart", _TWO | {"max_position_embeddings": 64}),
    ("blenderbot", _TWO | {"max_position_embeddings": 64}),
    ("blenderbot-small", _TWO | {"max_position_embeddings": 64}),
    ("m2m_100", _TWO | {"max_position_embeddings": 64}),
    ("marian", _TWO | {"max_position_embeddings": 64}),
    ("mbart", _TWO | {"max_position_embeddings": 64}),
    ("pegasus", _TWO | {"max_position_embeddings": 64}),
    ("plbart", _TWO | {"max_position_embeddings": 64}),
    ("whisper", _TWO | {"max_source_positions": 24, "max_target_positions": 64, "num_mel_bins": 8}),
    ("distilbert", {"dim": 32, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 64, "attention_dropout": 0.25}),
    ("modernbert", {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"} | {"local_attention": 8}),
    (
        "modernbert",
        {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}
        | {"local_attention": 7, "global_attn_every_n_layers": 2},
    ),
    ("gpt2", _GPT2),
    ("gpt2", _GPT2 | {"scale_attn_weights": False}),
    ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    ("deepseek_v32", _SMALL | _MLA | _INDEXER | {"rope_scaling": _YARN, "num_experts_per_tok": 2}),
    ("glm_moe_dsa", _SMALL | _MLA | _INDEXER | {"index_topk_freq": 3, "num_experts_per_tok": 2}),
    ("glm_moe_dsa", _SMALL | _MLA | _INDEXER | {"index_topk_pattern": "FSSFSFFS", "num_experts_per_tok": 2}),
    ("longcat_flash", _LONGCAT),
    ("longcat_flash", _LONGCAT | {"rope_scaling": _YARN}),
    ("mistral4", _SMALL | _MLA | {"num_experts_per_tok": 2}),
    ("mistral4", _SMALL | _MLA | {"num_experts_per_tok": 2, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.2}}),
    ("mimo_v2_flash", _SMALL | _MIMO | {"sliding_window_size": 5, "sliding_window": 5}),
    ("mimo_v2_flash", _SMALL | _MIMO | {"sliding_window": 4, "layer_types": _MIXED, "attention_value_scale": None}),
    ("gemma4_text", _SMALL | _GEMMA4),
    ("gemma4_text", _SMALL | _GEMMA4 | {"attention_k_eq_v": True, "num_kv_shared_layers": 3, "layer_types": _MIXED}),
    ("gemma4_text", _SMALL | _GEMMA4 | {"use_bidirectional_attention": "all", "sliding_window": 6}),
    ("gemma4_text", _SMALL | _GEMMA4_SAVED),
    ("minimax_m3_vl_text", _SMALL | {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4}),
    ("minimax_m3_vl_text", _SMALL | _MINIMAX | {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 5}),
]
"""(model_type, what its config says): small sizes, and everything of attention that the family reads."""

# Sizes that keep the models small and say nothing about attention.
_REST = {"vocab_size": 64, "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART = {"vocab_size": 64, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1}
_REST_OF = {
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus", "plbart"), _BART
    ),
    "electra": {"vocab_size": 64, "intermediate_size": 32, "pad_token_id": 0},
    "opt": {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "whisper": {
        "vocab_size": 64,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "distilbert": {"vocab_size": 64, "hidden_dim": 32, "pad_token_id": 0},
    "gpt2": {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2},
    "llama4_text": _REST | {"intermediate_size_mlp": 32},
    "modernbert": _REST | {"cls_token_id": 1, "sep_token_id": 2},
}


# The experts of mixtures one by one: the grouped product wants other sizes than these small ones.
_PLAIN = {"experts_implementation": "eager"}


def config_of(model_type: str, said: dict[str, Any]) -> Any:
    """The config object of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **copy.deepcopy(_REST_OF.get(model_type, _REST) | said))


def layers_of(model_type: str, said: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Every layer's call of attention in one step of training: heads, dims, scale, cap, sinks, dropout, mask.

    By part of the model: 'encoder', 'decoder' and 'cross' of an encoder-decoder, else ''.
    """
    import torch

    tokens = torch.full((1, LENGTH), 3)
    given: dict[str, Any] = {"input_ids": tokens}
    if model_type == "whisper":  # two frames make one position
        given = {"input_features": torch.zeros(1, said["num_mel_bins"], 2 * LENGTH), "decoder_input_ids": tokens}
    elif "encoder_layers" in said:
        given |= {"decoder_input_ids": tokens}
    calls = caught(config_of(model_type, said), lambda model: given)
    for call in calls:
        del call["more"]
    if "encoder_layers" not in said:
        return {"": calls}
    count = said["encoder_layers"]
    return {"encoder": calls[:count], "decoder": calls[count::2], "cross": calls[count + 1 :: 2]}


def caught(config: Any, inputs: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Every call of attention in one step of training, in order, with the names of what else it is passed as `more`.

    A row that sees other than one run of keys makes `rows` None.
    """
    import torch
    from transformers import AttentionInterface, AutoModel
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    calls: list[dict[str, Any]] = []

    def catch(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        scaling: Any = None,
        dropout: Any = 0.0,
        **more: Any,
    ) -> Any:
        if scaling == 1.0 and hasattr(module, "scaling"):
            scaling = module.scaling  # opt and whisper scale the query before this
        visible = torch.ones(query.shape[2], key.shape[2]) if attention_mask is None else attention_mask[0, 0] == 0
        rows = [_row(row.nonzero()[:, 0].tolist()) for row in visible.expand(query.shape[2], -1)]
        calls.append(
            {
                "q_heads": query.shape[1],
                "kv_heads": key.shape[1],
                "head_dim": query.shape[3],
                "value_dim": value.shape[3],
                "scale": query.shape[3] ** -0.5 if scaling is None else scaling,
                "soft_cap": more.get("softcap"),
                "sinks": None if more.get("s_aux") is None else list(more["s_aux"].shape),
                "dropout": dropout,
                "rows": None if None in rows else rows,
                "more": sorted(name for name, value in more.items() if value is not None and name not in _PLAIN_NAMES),
            }
        )
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("attnops_probe", catch)
    AttentionMaskInterface.register("attnops_probe", eager_mask)
    model = AutoModel.from_config(config, attn_implementation="attnops_probe", **_PLAIN).train()
    model(**inputs(model))
    return calls


# What transformers passes its functions beside the above, which the mask or the call already has.
_PLAIN_NAMES = (
    "softcap", "s_aux", "is_causal", "sliding_window", "position_ids", "use_cache", "cache_position", "output_attentions",
    "output_hidden_states", "return_dict",
)  # fmt: skip


def _row(seen: list[int]) -> list[int] | None:
    """First and last visible key; None if they aren't one run."""
    whole = bool(seen) and seen == list(range(seen[0], seen[-1] + 1))
    return [seen[0], seen[-1]] if whole else None


def main() -> None:
    import transformers

    cases = []
    for model_type, said in CASES:
        for part, layers in layers_of(model_type, said).items():
            kinds: list[dict[str, Any]] = []
            for layer in layers:
                if layer not in kinds:
                    kinds.append(layer)
            numbers = [kinds.index(layer) for layer in layers]
            config = {"model_type": model_type} | said
            cases.append({"config": config, "part": part, "kinds": kinds, "layers": numbers})
    text = json.dumps({"transformers": transformers.__version__, "length": LENGTH, "cases": cases})
    TRUTH.write_text(text.replace('{"config"', '\n{"config"') + "\n")


if __name__ == "__main__":
    main()
