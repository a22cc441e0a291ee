"""Families with multi-head latent attention, and those of them whose layers have an indexer. models/indexers.py reads its sizes.

Source: the families' configuration and modelling files in transformers 5.24, checked by tests/models/test_model_transformers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, is_whole, shown
from ..planning.notes import Note, note
from .family import INDEXED, Family, Fields, sizes

__all__ = ["LATENT_FAMILIES"]

_MLA: dict[str, Any] = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": None,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "rope_parameters": None,
    "rope_scaling": None,
}
_INDEXER: dict[str, Any] = {"layer_types": None, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
_SHARED: dict[str, Any] = {
    "indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 1, "index_skip_topk_offset": 2,
}  # fmt: skip
_MISTRAL4_ROPE = {
    "rope_type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_MOST_LAYERS = 5_000


def _indexed(f: Fields) -> list[str]:
    return [INDEXED] * f["num_hidden_layers"]


def _only_indexed(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Every layer has an indexer: transformers goes by layer_types only for the cache."""
    types = data.get("layer_types")
    for number, kind in enumerate(types if isinstance(types, list | tuple) else ()):
        if kind != INDEXED:
            raise ConfigError(
                f"{name}: layer_types[{number}] is {shown(kind)}; wanted {INDEXED}: every layer of this family has an indexer, "
                "whatever layer_types says."
            )
    return data


def _mistral4(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Mistral 4's queries are scaled by their position, before attention, by keys of its rope_parameters."""
    if data.get("rope_scaling") and not data.get("rope_parameters"):
        data = {key: value for key, value in data.items() if key != "rope_scaling"} | {
            "rope_parameters": data["rope_scaling"]
        }
    rope = data.get("rope_parameters") or _MISTRAL4_ROPE
    if not isinstance(rope, Mapping):
        return data  # refused where the scale is read
    beta, longest = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise ConfigError(
            f"{name}: rope_parameters.llama_4_scaling_beta={shown(beta)}; wanted a number, 0 for queries that aren't scaled by "
            "their position."
        )
    if not is_whole(longest, 1):
        raise ConfigError(
            f"{name}: rope_parameters.original_max_position_embeddings={shown(longest)}; wanted a whole number from 1 up, as "
            "queries are scaled by their position in multiples of it."
        )
    if beta:
        remark = f"the model multiplies the query at position p by 1 + {beta} log(1 + floor(p / {longest})), before attention"
        notes.append(note("model.noted", key="rope_parameters.llama_4_scaling_beta", value=shown(beta), remark=remark))
    return data


def _longcat(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Each of LongCat's layers has two attentions, which are layers here."""
    rest = {key: value for key, value in data.items() if key not in ("num_layers", "num_hidden_layers")}
    layers, both = data.get("num_layers"), data.get("num_hidden_layers")
    if layers is None and both is None:
        return rest
    if layers is not None and not is_whole(layers, 1, _MOST_LAYERS):
        raise ConfigError(f"{name}: num_layers={shown(layers)}; wanted a whole number from 1 to {_MOST_LAYERS}.")
    if layers is None:
        if not is_whole(both, 2, 2 * _MOST_LAYERS) or both % 2:
            raise ConfigError(
                f"{name}: num_hidden_layers={shown(both)}; wanted an even number: layers of longcat_flash have two attentions. "
                "Give num_layers instead."
            )
        layers = both // 2
    if both not in (None, 2 * layers):
        raise ConfigError(
            f"{name}: num_layers={layers} and num_hidden_layers={shown(both)} contradict each other; wanted "
            f"num_hidden_layers={2 * layers}, as each layer has two attentions, or num_layers alone."
        )
    notes.append(note("model.two_attentions", layers=layers))
    return {"mla_scale_q_lora": True, "mla_scale_kv_lora": True} | rest | {"num_hidden_layers": 2 * layers}


LATENT_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(sizes(4096, 32, 32, None, 2048) | _MLA),
    "deepseek_v3": Family(sizes(7168, 61, 128, 128, 4096) | _MLA),
    "deepseek_v32": Family(sizes(7168, 61, 128, 128, 163840) | _MLA | _INDEXER, _indexed, prepare=_only_indexed),
    "glm_moe_dsa": Family(
        sizes(6144, 78, 64, 64, 202752)
        | _MLA
        | {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 2048}
        | _INDEXER
        | {"index_n_heads": 32}
        | _SHARED,
        _indexed,
        prepare=_only_indexed,
    ),
    "longcat_flash": Family(
        sizes(6144, 56, 64, None, 131072) | _MLA, names={"num_layers": "num_hidden_layers"}, prepare=_longcat
    ),
    "mistral4": Family(
        sizes(4096, 36, 32, 32, 1048576)
        | _MLA
        | {"qk_nope_head_dim": 64, "kv_lora_rank": 256, "q_lora_rank": 1024, "rope_parameters": _MISTRAL4_ROPE},
        prepare=_mistral4,
    ),
}
