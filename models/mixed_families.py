"""Families whose layers differ in their heads or in which keys they see: MiMo V2 Flash, Gemma 4 and MiniMax M3.

models/layer_heads.py and models/indexers.py read what the keys say of each layer. Source: the families' configuration and
modelling files in transformers 5.24, checked by tests/models/test_model_transformers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, is_whole, shown
from ..planning.notes import Note, note
from .family import GLOBAL, INDEXED, LOCAL, Family, Fields, sizes

__all__ = ["MIXED_FAMILIES"]

_SPARSE = "minimax_m3_sparse"  # what layer_types calls an indexed layer of MiniMax
_OLDER = {
    "sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim", "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks", "sparse_local_block": "index_local_blocks",
}  # fmt: skip
_PLAIN = {"use_sparse_attention": (True,), "sparse_score_type": ("max",), "sparse_init_block": (0,)}


def _mimo_kinds(f: Fields) -> list[str]:
    return [GLOBAL if layer == 0 or not (layer + 1) % 6 else LOCAL for layer in range(f["num_hidden_layers"])]


def _mimo(data: Fields, name: str, notes: list[Note]) -> Fields:
    """MiMo's published configs have its window and its layers under names of their own."""
    data = {"attention_value_scale": 0.707} | dict(data)
    size, chunk = data.pop("sliding_window_size", None), data.get("attention_chunk_size")
    if chunk is not None and chunk in (size, data.get("sliding_window")):
        del data["attention_chunk_size"]  # no layer is chunked: it repeats the window
    if size is not None:
        if not is_whole(size, 1):
            raise ConfigError(f"{name}: sliding_window_size={shown(size)}; wanted a whole number from 1 up.")
        remark = f"{size} keys before the query's own, as transformers reads it, whatever sliding_window says"
        notes.append(note("model.noted", key="sliding_window_size", value=shown(size), remark=remark))
        data["sliding_window"] = size + 1
    pattern = data.pop("hybrid_layer_pattern", None)
    if pattern is None:
        return data
    if not isinstance(pattern, list | tuple) or any(type(one) is not int or one not in (0, 1) for one in pattern):
        raise ConfigError(f"{name}: hybrid_layer_pattern={shown(pattern)}; wanted a list of 0 (global) and 1 (local).")
    kinds = [LOCAL if one else GLOBAL for one in pattern]
    if data.get("layer_types") and list(data["layer_types"]) != kinds:
        raise ConfigError(f"{name}: layer_types and hybrid_layer_pattern contradict each other; keep one.")
    if not data.get("layer_types") and kinds != _mimo_kinds({"num_hidden_layers": len(kinds)}):
        remark = "the layers follow it, as in the model's own code; transformers reads layer_types alone"
        notes.append(note("model.noted", key="hybrid_layer_pattern", value=shown(pattern), remark=remark))
    return data | {"layer_types": kinds}


def _gemma4_kinds(f: Fields) -> list[str]:
    kinds = [LOCAL if (layer + 1) % 6 else GLOBAL for layer in range(f["num_hidden_layers"])]
    return [*kinds[:-1], GLOBAL]


def _gemma4(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Gemma 4's last layer is global whatever layer_types says, and each layer may have sizes of its own."""
    data = dict(data)
    types, both = data.get("layer_types"), data.get("use_bidirectional_attention")
    if isinstance(types, list | tuple) and types and types[-1] == LOCAL:
        remark = f"the last layer is {GLOBAL} all the same, as in transformers"
        notes.append(note("model.noted", key=f"layer_types[{len(types) - 1}]", value=shown(LOCAL), remark=remark))
        data["layer_types"] = [*types[:-1], GLOBAL]
    if both not in (None, "vision", "all"):
        raise ConfigError(f"{name}: use_bidirectional_attention={shown(both)}; wanted null, 'vision' or 'all'.")
    by_layer = data.pop("per_layer_config", None)
    if by_layer is None:
        return data
    beside = [key for key in ("global_head_dim", "num_global_key_value_heads") if data.get(key) is not None]
    if beside:
        raise ConfigError(
            f"{name}: per_layer_config beside {beside[0]}, which transformers doesn't read then; keep one."
        )
    return data | {"per_layer_config": _layers(by_layer, name, data.get("num_hidden_layers"))}


def _layers(by_layer: Any, name: str, count: Any) -> dict[int, dict[str, Any]]:
    """per_layer_config by the number of the layer: JSON has it as text, such as '05'."""
    if not isinstance(by_layer, Mapping):
        raise ConfigError(f"{name}: per_layer_config={shown(by_layer)}; wanted an object with one object per layer.")
    found = {}
    for key, own in by_layer.items():
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not is_whole(number, 0, count - 1 if is_whole(count) else 2**31 - 1):
            raise ConfigError(f"{name}: per_layer_config has the key {shown(key)}; wanted numbers of layers, from 0.")
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name}: per_layer_config[{number}]={shown(own)}; wanted an object.")
        for inner, value in own.items():
            if inner not in ("head_dim", "num_key_value_heads"):
                raise ConfigError(
                    f"{name}: per_layer_config[{number}].{inner}={shown(value)}; attnops reads head_dim and num_key_value_heads "
                    "of a layer, and no other key."
                )
        found[number] = dict(own)
    return found


def _minimax(data: Fields, name: str, notes: list[Note]) -> Fields:
    """MiniMax's published configs have the indexer in an object of its own."""
    data = dict(data)
    nested = data.pop("sparse_attention_config", None) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{name}: sparse_attention_config={shown(nested)}; wanted an object.")
    layers = nested.get("sparse_attention_freq")
    if layers is not None and not _is_flags(layers):
        raise ConfigError(
            f"{name}: sparse_attention_config.sparse_attention_freq={shown(layers)}; wanted a list of 0 and 1 (indexed)."
        )
    for key, value in nested.items():
        if key in _OLDER:
            if data.get(_OLDER[key], value) != value:
                raise ConfigError(
                    f"{name}: {_OLDER[key]}={shown(data[_OLDER[key]])} and sparse_attention_config.{key}={shown(value)} "
                    "contradict each other; keep one."
                )
            data[_OLDER[key]] = value
        elif key == "sparse_disable_index_value":
            if not _is_flags(value) or any(flag and not off for flag, off in zip(layers or (), value, strict=False)):
                raise ConfigError(
                    f"{name}: sparse_attention_config.{key}={shown(value)}: an indexer with values of its own adds to the "
                    "output of attention, which attnops can't declare; wanted 1 for every indexed layer."
                )
        elif key != "sparse_attention_freq" and value not in _PLAIN.get(key, ()):
            wanted = f"wanted {shown(_PLAIN[key][0])}" if key in _PLAIN else "it isn't one that transformers reads"
            raise ConfigError(f"{name}: sparse_attention_config.{key}={shown(value)}; {wanted}.")
    types = data.get("layer_types")
    if isinstance(types, list | tuple):
        data["layer_types"] = [INDEXED if kind == _SPARSE else kind for kind in types]
    if layers is not None:
        kinds = [INDEXED if one else GLOBAL for one in layers]
        if types and list(data["layer_types"]) != kinds:
            raise ConfigError(f"{name}: layer_types and sparse_attention_freq contradict each other; keep one.")
        data["layer_types"] = kinds
    return data


def _is_flags(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, int) and one in (0, 1) for one in value)


MIXED_FAMILIES: dict[str, Family] = {
    "gemma4_text": Family(
        sizes(2304, 30, 8, 4, 131072, head_dim=256)
        | {
            "sliding_window": 512, "layer_types": None, "use_bidirectional_attention": None, "global_head_dim": 512,
            "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0, "per_layer_config": None,
        },
        _gemma4_kinds,
        scale=1.0,
        prepare=_gemma4,
    ),
    "mimo_v2_flash": Family(
        sizes(4096, 48, 64, 4, 131072, head_dim=192)
        | {
            "v_head_dim": 128, "sliding_window": 129, "layer_types": None, "swa_num_attention_heads": None,
            "swa_num_key_value_heads": None, "swa_head_dim": None, "swa_v_head_dim": None, "add_swa_attention_sink_bias": None,
            "add_full_attention_sink_bias": None,
        },
        _mimo_kinds,
        prepare=_mimo,
    ),
    "minimax_m3_vl_text": Family(
        sizes(6144, 60, 64, 4, 524288, head_dim=128)
        | {
            "layer_types": None, "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
            "index_local_blocks": 1,
        },
        prepare=_minimax,
    ),
}  # fmt: skip
