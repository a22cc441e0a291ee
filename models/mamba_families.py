"""Families with layers of Mamba, alone, beside attention or between layers of it.

models/hybrid_layers.py reads what the keys say of these layers; `names` gives the families' own keys one name each. Source: the
families' configuration and modelling files in transformers 5.24, checked by tests/models/test_hybrid_models.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, is_whole, shown
from ..planning.notes import Note, note
from .family import GLOBAL, HYBRID, LINEAR, MLP, MOE, Family, Fields, Prepare, sizes
from .state_kinds import ACT, NAMED, TYPES, global_where, plain_kinds

__all__ = ["MAMBA_FAMILIES"]

_LETTERS = {"M": LINEAR, "*": GLOBAL, "-": MLP, "E": MOE}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "time_step_limit": (0.0, math.inf),
    "mamba_ssm_cache_dtype": None,
}  # fmt: skip


_STEP = {key: value for key, value in _MAMBA2.items() if key != "time_step_limit"} | {"time_step_min": 0.001}


def _bamba(data: Fields, name: str, notes: list[Note]) -> Fields:
    listed, count = data.get("attn_layer_indices"), data.get("num_hidden_layers")
    if listed is not None and not (
        isinstance(listed, list | tuple)
        and all(is_whole(n, 0, count - 1 if is_whole(count, 1) else 2**31) for n in listed)
    ):
        raise ConfigError(f"{name}: attn_layer_indices={shown(listed)}; wanted numbers of layers, from 0.")
    return data


def _falcon(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Multipliers of 1 change nothing, and are not noted."""
    ones = {"key_multiplier": 1.0, "ssm_multipliers": [1.0] * 5}
    return {key: value for key, value in data.items() if key not in ones or value != ones[key]}


def _jamba(data: Fields, name: str, notes: list[Note]) -> Fields:
    period, offset = data.get("attn_layer_period", 8), data.get("attn_layer_offset", 4)
    if not is_whole(period, 1) or not is_whole(offset, 0, period - 1):
        raise ConfigError(
            f"{name}: attn_layer_period={shown(period)} and attn_layer_offset={shown(offset)}; wanted whole numbers, the offset "
            "below the period."
        )
    return data


def _nemotron(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Nemotron-H's layers are letters in older configs; their number is that of the letters."""
    data = plain_kinds(data, name, notes)
    letters = data.pop("hybrid_override_pattern", None)
    if letters is not None:
        if not isinstance(letters, str) or not letters or set(letters) - set(_LETTERS):
            raise ConfigError(
                f"{name}: hybrid_override_pattern={shown(letters)}; wanted letters M (mamba2), * (attention), - (MLP) and E "
                "(experts), one for each layer."
            )
        kinds = [_LETTERS[letter] for letter in letters]
        if data.get("layer_types") is not None and list(data["layer_types"]) != kinds:
            raise ConfigError(f"{name}: layer_types and hybrid_override_pattern contradict each other; keep one.")
        data["layer_types"] = kinds
    kinds = data.get("layer_types") or _NEMOTRON
    count = data.get("num_hidden_layers")
    if isinstance(kinds, list | tuple) and count != len(kinds):
        if count is not None:
            remark = f"the layers are those that are listed, {len(kinds)}, as in transformers"
            notes.append(note("model.noted", key="num_hidden_layers", value=shown(count), remark=remark))
        data["num_hidden_layers"] = len(kinds)
    return _least_step(data, notes)


_NEMOTRON = [LINEAR, MOE, GLOBAL, MLP]


def _least_step(data: dict[str, Any], notes: list[Note]) -> dict[str, Any]:
    """transformers clips dt to time_step_min and up here, whatever time_step_limit says."""
    for key in ("time_step_limit", "mamba_dt_limit"):
        limit = data.pop(key, None)
        if limit is not None:
            notes.append(note("model.unread_limit", value=shown(limit), least=data.get("time_step_min", 0.001)))
    return data


_FOLLOW = (  # what follows from other keys of zamba2
    "attention_hidden_size", "attention_head_dim", "kv_channels", "num_query_groups", "mamba_headdim", "hybrid_layer_ids",
)  # fmt: skip


def _zamba(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Zamba2's attention reads two hidden states side by side; configs also have what follows from other keys."""
    data = _least_step(plain_kinds(data, name, notes), notes)
    if data.get("softmax_scale") is not None:
        raise ConfigError(
            f"{name}: softmax_scale={shown(data['softmax_scale'])}, which models of type zamba2 don't read."
        )
    if data.get("use_long_context") is True:
        remark = "max_position_embeddings is 16384, as in transformers"
        notes.append(note("model.noted", key="use_long_context", value="True", remark=remark))
        data["max_position_embeddings"] = 16384
    hidden, heads = data.get("hidden_size", 2560), data.get("num_attention_heads", 32)
    if not is_whole(hidden, 1) or not is_whole(heads, 1):
        return data  # refused where they are read
    mamba_heads, expand = (data.get(key, default) for key, default in (("n_mamba_heads", 8), ("mamba_expand", 2)))
    follow: dict[str, Any] = {
        "attention_hidden_size": 2 * hidden, "attention_head_dim": 2 * hidden // heads, "head_dim": 2 * hidden // heads,
        "kv_channels": hidden // heads, "num_query_groups": heads,
    }  # fmt: skip
    if is_whole(mamba_heads, 1) and is_whole(expand, 1):
        follow["mamba_headdim"] = expand * hidden // mamba_heads
    kinds = data.get("layer_types")
    if isinstance(kinds, list | tuple):
        follow["hybrid_layer_ids"] = [number for number, kind in enumerate(kinds) if kind == HYBRID]
    for key, value in follow.items():
        if data.pop(key, None) not in (None, value):
            raise ConfigError(f"{name}: {key} isn't {shown(value)}, which follows from other keys; leave it out.")
    return data | {"head_dim": 2 * hidden // heads, "softmax_scale": (heads / hidden) ** 0.5}


def _zamba_kinds(f: Fields) -> list[str]:
    one = [LINEAR, *([LINEAR] * 5 + [HYBRID]) * 7, *[LINEAR] * 4, HYBRID, *[LINEAR] * 3, HYBRID, LINEAR, LINEAR]
    return one[: f["num_hidden_layers"]] if f["num_hidden_layers"] <= len(one) else one


def _mamba(
    defaults: dict[str, Any],
    kinds: Callable[[Fields], list[str]],
    own_kinds: tuple[str, ...] = (LINEAR,),
    names: Mapping[str, str] | None = None,
    prepare: Prepare = plain_kinds,
    skips: tuple[str, ...] = (),
) -> Family:
    return Family(
        defaults, kinds, names=names or {}, prepare=prepare, skips=skips, recurrence="mamba2", own_kinds=own_kinds
    )


MAMBA_FAMILIES: dict[str, Family] = {
    "bamba": _mamba(
        sizes(4096, 32, 32, 8, 262144) | ACT | _MAMBA2 | {"attn_layer_indices": None},
        global_where(lambda f, layer: layer in (f["attn_layer_indices"] or ())),
        prepare=_bamba,
    ),
    "falcon_h1": _mamba(
        sizes(4096, 32, 32, 8, 8192) | ACT | _MAMBA2 | {"mamba_d_ssm": 1024},
        lambda f: [HYBRID] * f["num_hidden_layers"],
        (HYBRID,),
        prepare=_falcon,
    ),
    "granitemoehybrid": _mamba(
        sizes(4096, 32, 32, None, 2048) | TYPES | ACT | _MAMBA2 | {"attention_multiplier": 1.0},
        global_where(lambda f, layer: False),
        names=NAMED,
    ),
    "jamba": Family(
        sizes(4096, 32, 32, 8, 262144)
        | ACT
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "attn_layer_period": 8,
           "attn_layer_offset": 4},
        global_where(lambda f, layer: layer % f["attn_layer_period"] == f["attn_layer_offset"]),
        prepare=_jamba,
        recurrence="mamba1",
        own_kinds=(LINEAR,),
    ),
    "mamba2": _mamba(
        {"hidden_size": 4096, "num_hidden_layers": 64, "is_causal": None}
        | ACT
        | _MAMBA2
        | {"mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_state": 128},
        lambda f: [LINEAR] * f["num_hidden_layers"],
        names={"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
               "state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "expand": "mamba_expand",
               "chunk_size": "mamba_chunk_size", "use_conv_bias": "mamba_conv_bias"},
    ),
    "nemotron_h": _mamba(
        sizes(4096, 4, 32, 8, 4096, head_dim=128)
        | TYPES
        | {key: value for key, value in _STEP.items() if key != "mamba_expand"}
        | {"mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_chunk_size": 128, "mamba_hidden_act": "silu",
           "mamba_ssm_cache_dtype": "float32"},
        lambda f: _NEMOTRON,
        (LINEAR, MLP, MOE),
        NAMED
        | {"mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
           "ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "chunk_size": "mamba_chunk_size",
           "use_conv_bias": "mamba_conv_bias", "mamba_dt_min": "time_step_min", "attention_head_dim": "head_dim"},
        _nemotron,
        ("expand", "mamba_expand"),
    ),
    "zamba2": _mamba(
        sizes(2560, 54, 32, None, 4096)
        | TYPES
        | {key: value for key, value in _STEP.items() if key not in ("mamba_d_head", "mamba_conv_bias", "mamba_ssm_cache_dtype")}
        | {"mamba_n_heads": 8, "mamba_d_state": 64, "softmax_scale": None},
        _zamba_kinds,
        (LINEAR, HYBRID),
        NAMED | {"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups", "chunk_size": "mamba_chunk_size"},
        _zamba,
        ("use_conv_bias", "mamba_conv_bias", *_FOLLOW),
    ),
}  # fmt: skip
