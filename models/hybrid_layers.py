"""What layers with a state carry along the tokens: the operation, its sizes, and the convolution before it.

The families' keys have the names that models/hybrid_families.py gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import is_whole, shown
from ..planning.notes import Note, note
from .family import CONV, HYBRID, LINEAR
from .layers import Convolution, LayerState
from .model_config import ModelConfig
from .values import flag, number, whole

__all__ = ["STATE_DTYPES", "hidden_activation", "layer_state", "mamba_limits", "state_label", "state_notes"]

STATE_DTYPES = ("float32", "bfloat16")
_SILU = ("silu", "swish")


def state_label(config: ModelConfig, kind: str) -> str:
    """What a layer, or its part with a state, is called."""
    return {LINEAR: config.rules.recurrence, HYBRID: config.rules.recurrence, CONV: "causal_conv1d"}.get(kind) or kind


def layer_state(config: ModelConfig, kind: str) -> LayerState | None:
    """What a layer of this kind carries; None for one that has neither attention nor a state. Errors: ConfigError."""
    if kind not in (LINEAR, HYBRID, CONV):
        return None
    return _STATES[config.rules.recurrence or CONV](config)


def hidden_activation(config: ModelConfig) -> str | None:
    """The activation after the convolution, if it is one that the operation has."""
    return "silu" if _activation(config) in _SILU else None


def _activation(config: ModelConfig) -> Any:
    f = config.fields
    return f.get("mamba_hidden_act", f.get("hidden_act", "silu"))


def state_notes(config: ModelConfig, kinds: Collection[str], notes: list[Note]) -> None:
    """Note what the declarations of layers with a state leave to the model."""
    f, operation = config.fields, config.rules.recurrence
    if not {LINEAR, HYBRID, CONV} & set(kinds):
        return
    notes += _LEFT_TO_THE_MODEL.get(operation, _activation_notes)(config, len(kinds))
    if HYBRID in kinds:
        notes.append(note("model.attention_and_state", operation=operation))
    for key in ("block_size", "mamba_chunk_size"):
        if operation and key in f and not _chunk(config, key):
            notes.append(note("model.chunks", key=key, size=f[key]))


def _activation_notes(config: ModelConfig, layers: int) -> list[Note]:
    if hidden_activation(config) is not None:
        return []
    return [note("model.convolution_activation", activation=shown(_activation(config)))]


_LEFT_TO_THE_MODEL: dict[str | None, Callable[[ModelConfig, int], list[Note]]] = {
    None: lambda config, layers: [note("model.gated_convolution")],
    "lightning": lambda config, layers: [note("model.decay_of_layers", layers=layers)],
    "mamba1": lambda config, layers: [*_activation_notes(config, layers), note("model.normalised_dt")],
}


def _chunk(config: ModelConfig, key: str) -> tuple[tuple[str, int], ...]:
    """The model's chunks, where the operation can have them: the result doesn't depend on them."""
    size = whole(config, key)
    return () if size & (size - 1) else (("chunk_size", size),)


def _state_dtype(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    named = config.fields.get("mamba_ssm_cache_dtype")
    if named in (None, "float32"):
        return ()
    if named not in STATE_DTYPES:
        raise config.error(f"mamba_ssm_cache_dtype={shown(named)}; wanted {' or '.join(STATE_DTYPES)}.")
    return (("state_dtype", named),)


def _key_groups(config: ModelConfig, heads: tuple[str, int], groups: tuple[str, int]) -> None:
    if heads[1] % groups[1]:
        raise config.error(f"{heads[0]}={heads[1]} is not a multiple of {groups[0]}={groups[1]}.")


def _gated_delta_rule(config: ModelConfig) -> LayerState:
    f = config.fields

    def size(key: str, default: int) -> int:
        return default if f[key] is None else whole(config, key)

    attention_heads = whole(config, "num_attention_heads")
    kv_heads = size("linear_num_key_heads", attention_heads)
    heads = size("linear_num_value_heads", attention_heads)
    _key_groups(config, ("linear_num_value_heads", heads), ("linear_num_key_heads", kv_heads))
    key_dim = f["linear_key_head_dim"]
    dim = (
        int(0.75 * whole(config, "hidden_size") / kv_heads) if key_dim is None else whole(config, "linear_key_head_dim")
    )
    value_dim = size("linear_value_head_dim", 2 * dim)
    allowed = "linear_allow_neg_eigval" in f and flag(config, "linear_allow_neg_eigval")
    channels = 2 * kv_heads * dim + heads * value_dim
    return LayerState(
        "gated_delta_rule",
        (("q_heads", heads), ("kv_heads", kv_heads), ("head_dim", dim), ("value_dim", value_dim)),
        (("decay", True), ("beta", True), ("A_log", True), ("dt_bias", True)),
        (("gate", "raw"), ("beta_form", "sigmoid"), *((("beta_max", 2.0),) if allowed else ()), ("normalise_qk", True),
         *_state_dtype(config)),
        Convolution(channels, whole(config, "linear_conv_kernel_dim", 2), hidden_activation(config), False),
    )  # fmt: skip


def _kda(config: ModelConfig) -> LayerState:
    heads, dim = whole(config, "linear_num_heads"), whole(config, "linear_head_dim")
    return LayerState(
        "kda",
        (("q_heads", heads), ("kv_heads", heads), ("head_dim", dim), ("value_dim", dim)),
        (("decay", True), ("beta", True), ("A_log", True), ("dt_bias", True)),
        (("gate", "raw"), ("beta_form", "sigmoid"), ("normalise_qk", True)),
        Convolution(3 * heads * dim, whole(config, "linear_conv_kernel_dim", 2), hidden_activation(config), False),
    )


def _lightning(config: ModelConfig) -> LayerState:
    f, heads = config.fields, whole(config, "num_attention_heads")
    dim = whole(config, "hidden_size") // heads if f["head_dim"] is None else whole(config, "head_dim")
    return LayerState(
        "lightning",
        (("q_heads", heads), ("kv_heads", heads), ("head_dim", dim), ("value_dim", dim)),
        (("decay", (heads,)),),
        (("scale", 1.0), *_chunk(config, "block_size")),
    )


def mamba_limits(config: ModelConfig) -> tuple[float, float]:
    """What dt is clipped to: time_step_limit, or from time_step_min on where the family's code has that. Errors: ConfigError."""
    f = config.fields
    if "time_step_limit" not in f:
        return number(config, "time_step_min", f["time_step_min"]), math.inf
    given = f["time_step_limit"]
    limits = [_float(one) for one in given] if isinstance(given, list | tuple) else []
    if len(limits) != 2 or None in limits or not 0 <= (limits[0] or 0) < (limits[1] or 0):
        raise config.error(f"time_step_limit={shown(given)}; wanted [least, most], such as [0.0, Infinity].")
    return limits[0] or 0.0, limits[1] or 0.0


def _float(value: Any) -> float | None:
    """A number, also as transformers writes one that JSON doesn't have: {"__float__": "Infinity"}."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        return {"Infinity": math.inf}.get(str(value["__float__"]))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


def _mamba2(config: ModelConfig) -> LayerState:
    heads, groups, state = (whole(config, f"mamba_{name}") for name in ("n_heads", "n_groups", "d_state"))
    inner, named = _inner(config, heads)
    _key_groups(config, ("mamba_n_heads", heads), ("mamba_n_groups", groups))
    value_dim = inner // heads
    given = config.fields.get("mamba_d_head")
    if inner % heads or (given not in (None, "auto") and (not is_whole(given, 1) or given != value_dim)):
        raise config.error(
            f"{named}={inner} channels in mamba_n_heads={heads} heads of mamba_d_head={shown(given)}; wanted mamba_n_heads * "
            "mamba_d_head of them."
        )
    least, most = mamba_limits(config)
    limits = (("dt_min", least),) * (least > 0) + (("dt_max", most),) * (most < math.inf)
    return LayerState(
        "mamba2",
        (("q_heads", heads), ("kv_heads", groups), ("head_dim", state), ("value_dim", value_dim)),
        (("D", True), ("dt_bias", True)),
        (("dt_softplus", True), *limits, *_chunk(config, "mamba_chunk_size"), *_state_dtype(config)),
        _mamba_convolution(config, inner + 2 * groups * state),
    )


def _inner(config: ModelConfig, heads: int) -> tuple[int, str]:
    """The channels of a Mamba layer, and what they come from."""
    f = config.fields
    if f.get("mamba_d_ssm") is not None:
        return whole(config, "mamba_d_ssm"), "mamba_d_ssm"
    if "mamba_expand" not in f:
        return heads * whole(config, "mamba_d_head"), "mamba_d_head"
    expand = number(config, "mamba_expand", f["mamba_expand"])
    return int(expand * whole(config, "hidden_size")), "mamba_expand * hidden_size"


def _mamba_convolution(config: ModelConfig, channels: int) -> Convolution:
    bias = flag(config, "mamba_conv_bias") if "mamba_conv_bias" in config.fields else True
    return Convolution(channels, whole(config, "mamba_d_conv", 2), hidden_activation(config), bias)


def _mamba1(config: ModelConfig) -> LayerState:
    channels = int(number(config, "mamba_expand", config.fields["mamba_expand"]) * whole(config, "hidden_size"))
    return LayerState(
        "mamba1",
        (("dims", (("channels", channels), ("state_dim", whole(config, "mamba_d_state")))),),
        (("D", True), ("dt_bias", True)),
        (("dt_softplus", True),),
        _mamba_convolution(config, channels),
    )


def _short_convolution(config: ModelConfig) -> LayerState:
    channels, width = whole(config, "hidden_size"), whole(config, "conv_L_cache", 2)
    return LayerState(None, convolution=Convolution(channels, width, None, flag(config, "conv_bias")))


_STATES: dict[str, Callable[[ModelConfig], LayerState]] = {
    "gated_delta_rule": _gated_delta_rule,
    "kda": _kda,
    "lightning": _lightning,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    CONV: _short_convolution,
}
