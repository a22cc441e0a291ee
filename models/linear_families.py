"""Families with layers that carry a state: linear attention, Mamba and short convolutions, alone or between attention.

models/hybrid_layers.py reads what the keys say of these layers; `names` gives the families' own keys one name each. Source: the
families' configuration and modelling files in transformers 5.24, checked by tests/models/test_hybrid_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, is_whole, shown
from ..planning.notes import Note
from .family import CONV, GLOBAL, LINEAR, LOCAL, NOT_READ, Family, Fields, sizes
from .state_kinds import ACT, TYPES, global_where, plain_kinds

__all__ = ["LINEAR_FAMILIES"]

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "mamba_ssm_cache_dtype": None,
}  # fmt: skip


def _interval(f: Fields) -> list[str]:
    every = f["full_attention_interval"]
    return global_where(lambda f, layer: (layer + 1) % every == 0)(f)


def _delta(data: Fields, name: str, notes: list[Note]) -> Fields:
    data = plain_kinds(data, name, notes)
    every = data.get("full_attention_interval")
    if every is not None and not is_whole(every, 1):
        raise ConfigError(f"{name}: full_attention_interval={shown(every)}; wanted a whole number from 1 up.")
    return data


def _olmo(f: Fields) -> list[str]:
    kinds = global_where(lambda f, layer: layer % 4 == 3)(f)
    return kinds if GLOBAL in kinds else [*kinds[:-1], GLOBAL]


def _kimi(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Kimi's published configs have the layers with a state in an object of its own, numbered from 1, and a head_dim that is no
    layer's."""
    data = plain_kinds(data, name, notes)
    hidden, heads, own = (data.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if is_whole(hidden, 1) and is_whole(heads, 1) and own == hidden // heads:
        del data["head_dim"]
    if data.get("mla_use_nope") is False:
        raise ConfigError(f"{name}: mla_use_nope=False; wanted true: transformers rotates no keys in this family.")
    nested = data.pop("linear_attn_config", None)
    if nested is None:
        return data
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{name}: linear_attn_config={shown(nested)}; wanted an object.")
    read = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    for key, value in nested.items():
        if key in read:
            data[read[key]] = value
        elif key not in ("full_attn_layers", "kda_layers"):
            raise ConfigError(f"{name}: linear_attn_config.{key}={shown(value)}; it isn't one that transformers reads.")
    whole, with_state = nested.get("full_attn_layers"), nested.get("kda_layers")
    if whole is None or with_state is None or data.get("layer_types") is not None:
        return data
    count = data.get("num_hidden_layers")
    numbers: list[Any] = [*whole, *with_state] if isinstance(whole, list) and isinstance(with_state, list) else [None]
    if not is_whole(count, 1) or not all(is_whole(n, 1) for n in numbers) or sorted(numbers) != [*range(1, count + 1)]:
        raise ConfigError(
            f"{name}: linear_attn_config.full_attn_layers={shown(whole)} and kda_layers={shown(with_state)}; wanted each layer "
            f"from 1 to num_hidden_layers={shown(count)} in one of them."
        )
    data["layer_types"] = [GLOBAL if n in whole else LINEAR for n in range(1, count + 1)]
    return data


def _minimax(data: Fields, name: str, notes: list[Note]) -> Fields:
    """The older configs of MiniMax list 1 for attention and 0 for lightning."""
    data = plain_kinds(data, name, notes)
    listed = data.pop("attn_type_list", None)
    if listed is not None:
        if not isinstance(listed, list | tuple) or any(type(one) is not int or one not in (0, 1) for one in listed):
            raise ConfigError(
                f"{name}: attn_type_list={shown(listed)}; wanted a list of 1 (attention) and 0 (lightning)."
            )
        kinds = [GLOBAL if one else LINEAR for one in listed]
        if data.get("layer_types") and list(data["layer_types"]) != kinds:
            raise ConfigError(f"{name}: layer_types and attn_type_list contradict each other; keep one.")
        data["layer_types"] = kinds
    if data.get("sliding_window") is not None and isinstance(data.get("layer_types"), list | tuple):
        data["layer_types"] = [LOCAL if kind == GLOBAL else kind for kind in data["layer_types"]]
    return data


def _minimax_kinds(f: Fields) -> list[str]:
    attends = GLOBAL if f["sliding_window"] is None else LOCAL
    return [LINEAR if layer % 2 else attends for layer in range(f["num_hidden_layers"])]


def _lfm(data: Fields, name: str, notes: list[Note]) -> Fields:
    data = plain_kinds(data, name, notes)
    listed, count = data.get("full_attn_idxs"), data.get("num_hidden_layers")
    if listed is not None and not (isinstance(listed, list | tuple) and all(is_whole(n, 0) for n in listed)):
        raise ConfigError(f"{name}: full_attn_idxs={shown(listed)}; wanted numbers of layers, from 0.")
    if listed is not None and isinstance(data.get("layer_types"), list | tuple) and is_whole(count, 1):
        kinds = [GLOBAL if n in listed else CONV for n in range(count)]
        if list(data["layer_types"]) != kinds:
            raise ConfigError(f"{name}: layer_types and full_attn_idxs contradict each other; keep one.")
    return data


def _lfm_kinds(f: Fields) -> list[str]:
    listed = f["full_attn_idxs"]
    return global_where(lambda f, layer: listed is None or layer in listed, CONV)(f)


def _gated(defaults: dict[str, Any], **more: Any) -> Family:
    return Family(
        defaults | TYPES | _DELTA | ACT,
        _interval,
        names={"mamba_ssm_dtype": "mamba_ssm_cache_dtype"},
        prepare=_delta,
        recurrence="gated_delta_rule",
        own_kinds=(LINEAR,),
        **more,
    )


LINEAR_FAMILIES: dict[str, Family] = {
    "kimi_linear": Family(
        sizes(2304, 27, 32, 32, 1048576)
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": None, "v_head_dim": 128, "kv_lora_rank": 512,
           "q_lora_rank": None, "rope_parameters": None, "rope_scaling": None}
        | TYPES
        | ACT
        | {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
        global_where(lambda f, layer: layer and layer % 4 == 0),
        names={"model_max_length": "max_position_embeddings"},
        prepare=_kimi,
        recurrence="kda",
        own_kinds=(LINEAR,),
    ),
    "lfm2": Family(
        sizes(2560, 32, 32, 8, 128000, attention_dropout=NOT_READ)
        | TYPES
        | {"full_attn_idxs": None, "conv_L_cache": 3, "conv_bias": False},
        _lfm_kinds,
        names={"num_heads": "num_attention_heads"},
        prepare=_lfm,
        own_kinds=(CONV,),
    ),
    "minimax": Family(
        sizes(4096, 32, 32, 8, 131072) | TYPES | ACT | {"sliding_window": None, "block_size": 256},
        _minimax_kinds,
        prepare=_minimax,
        recurrence="lightning",
        own_kinds=(LINEAR,),
    ),
    "olmo_hybrid": Family(
        sizes(3840, 32, 30, None, 65536)
        | TYPES
        | ACT
        | {"linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": None,
           "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        _olmo,
        prepare=plain_kinds,
        recurrence="gated_delta_rule",
        own_kinds=(LINEAR,),
    ),
    "qwen3_5_moe_text": _gated(sizes(2048, 40, 16, 2, 32768, head_dim=256)),
    "qwen3_5_text": _gated(sizes(4096, 32, 16, 4, 32768, head_dim=256)),
    "qwen3_next": _gated(sizes(2048, 48, 16, 2, 32768, head_dim=256)),
}  # fmt: skip
