"""What a model's config says about attention, in attnops' words: heads, dims, scale, and each layer's mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..masks import Causal, Chunked, Full, Mask, SlidingWindow
from .model_config import ModelConfig
from .model_families import CHUNKED, GLOBAL, LOCAL

__all__ = ["LayerAttention", "ModelAttention", "model_attention"]

_LIMIT = 2**31 - 1
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LayerAttention:
    """One layer: 'global', 'local 4096' and the like, its mask, and its scale where the layers differ in it."""

    kind: str
    mask: Mask
    softmax_scale: float | None = None


@dataclass(frozen=True)
class ModelAttention:
    """All layers: what they share, and one LayerAttention each. `softmax_scale` None is 1/sqrt(head_dim)."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softmax_scale: float | None
    logits_soft_cap: float | None
    dropout_prob: float
    causal: bool
    sinks: bool
    return_weights: bool
    dtype: str | None
    positions: int
    layers: tuple[LayerAttention, ...]
    notes: tuple[str, ...]


def model_attention(config: ModelConfig, dtype: Any = None) -> ModelAttention:
    """Work it out; a dtype given here goes before the config's. Errors: ConfigError for values without sense."""
    f, rules, notes = config.fields, config.rules, list(config.notes)
    q_heads = _whole(config, "num_attention_heads")
    kv_heads = q_heads if f.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads")
    if q_heads % kv_heads:
        default = "" if "num_key_value_heads" in config.given else f", the default of {config.family}"
        raise config.error(f"num_attention_heads={q_heads} is no multiple of num_key_value_heads={kv_heads}{default}.")
    head_dim, value_dim = _dims(config, q_heads, kv_heads)
    causal = _causal(config)
    kinds = _kinds(config, notes)
    said = _dtype(config) if dtype is None else _dtype_name(dtype)
    if said is None:
        notes.append("the config says no dtype; a call is declared in float32 where no other is given")
    layers = tuple(_layer(config, kind, number, head_dim, causal) for number, kind in enumerate(kinds))
    return ModelAttention(
        name=config.name,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        softmax_scale=_scale(config, head_dim),
        logits_soft_cap=None
        if f.get("attn_logit_softcapping") is None
        else _positive(config, "attn_logit_softcapping"),
        dropout_prob=_probability(config, "attention_dropout"),
        causal=causal,
        sinks=rules.sinks,
        return_weights=_flag(config, "output_attentions"),
        dtype=said,
        positions=_whole(config, "max_position_embeddings"),
        layers=layers,
        notes=tuple(notes),
    )


def _dims(config: ModelConfig, q_heads: int, kv_heads: int) -> tuple[int, int]:
    f = config.fields
    if "qk_rope_head_dim" in f:
        rope = _whole(config, "qk_rope_head_dim")
        both = _whole(config, "qk_nope_head_dim") + rope
        # transformers writes qk_rope_head_dim as head_dim, the part that is rotated
        for key, meant in (("qk_head_dim", (both,)), ("head_dim", (rope, both))):
            if f[key] is not None and f[key] not in meant:
                raise config.error(f"{key}={f[key]!r}, and qk_nope_head_dim and qk_rope_head_dim add up to {both}.")
        if kv_heads != q_heads:
            raise config.error(
                f"num_key_value_heads={kv_heads} with latent attention, where every one of {q_heads} heads has its own key."
            )
        return both, _whole(config, "v_head_dim")
    if f.get("head_dim") is not None:
        found = _whole(config, "head_dim")
        return found, found
    hidden = _whole(config, "hidden_size")
    if hidden % q_heads:
        raise config.error(
            f"hidden_size={hidden} is no multiple of num_attention_heads={q_heads}, and no head_dim is said."
        )
    return hidden // q_heads, hidden // q_heads


def _causal(config: ModelConfig) -> bool:
    f, rules = config.fields, config.rules
    if not rules.causal:
        return _flag(config, "is_decoder") if "is_decoder" in f else False
    if f.get("use_bidirectional_attention") and config.family != "gemma3_text":
        raise config.error(
            f"use_bidirectional_attention={f['use_bidirectional_attention']!r}: transformers builds a causal mask for "
            f"{config.family} all the same; take it out, and say is_causal=false if none is wanted."
        )
    if f.get("use_bidirectional_attention"):
        return not _flag(config, "use_bidirectional_attention")
    return True if f.get("is_causal") is None else _flag(config, "is_causal")


def _kinds(config: ModelConfig, notes: list[str]) -> list[str]:
    """Each layer's kind, by layer_types where the config has them, else by the family's rule."""
    f, count = config.fields, _whole(config, "num_hidden_layers")
    for key in ("sliding_window_pattern", "no_rope_layer_interval", "global_attn_every_n_layers"):
        if key in f:
            _whole(config, key)
    if f.get("max_window_layers") is not None:
        _whole(config, "max_window_layers", least=0)
    if "use_sliding_window" in f:
        _flag(config, "use_sliding_window")
    for key in ("no_rope_layers", "layer_types"):
        listed = f.get(key)
        if listed and (not isinstance(listed, list | tuple) or len(listed) != count):
            got = f"{len(listed)} entries" if isinstance(listed, list | tuple) else repr(listed)
            raise config.error(f"{key}: got {got}; wanted a list with one entry for each of {count} layers.")
    by_rule = config.rules.kinds(f)
    types = f.get("layer_types")
    if not types:
        return by_rule
    for number, kind in enumerate(types):
        if kind not in (GLOBAL, LOCAL, CHUNKED):
            raise config.error(
                f"layer_types[{number}] is {kind!r}; wanted {GLOBAL}, {LOCAL} or {CHUNKED}. Layers of other kinds, such as "
                "linear attention, are none that attnops has."
            )
    said = [key for key in _PATTERNS if key in config.given and f.get(key)]
    if said and list(types) != by_rule:
        notes.append(f"layer_types decides, as in transformers; {', '.join(said)} would say otherwise")
    return list(types)


_PATTERNS = ("sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers")


def _layer(config: ModelConfig, kind: str, number: int, head_dim: int, causal: bool) -> LayerAttention:
    f = config.fields
    scale = None
    if f.get("scale_attn_by_inverse_layer_idx") and _flag(config, "scale_attn_by_inverse_layer_idx"):
        scale = (1.0 if f["scale_attn_weights"] is False else head_dim**-0.5) / (number + 1)
    if kind == GLOBAL:
        return LayerAttention("global", Causal() if causal else Full(), scale)
    if kind == CHUNKED:
        size = f.get("attention_chunk_size")
        if size is None or not causal:
            why = "attention_chunk_size is not said" if size is None else "is_causal is false"
            raise config.error(f"layer {number} is {CHUNKED}, and {why}; wanted a causal chunk size.")
        return LayerAttention(f"chunked {_whole(config, 'attention_chunk_size')}", Causal() & Chunked(size), scale)
    left, right = _window(config, number, causal)
    label = f"local {left + 1}" if right == 0 else f"local ±{left}"
    window = SlidingWindow(left=left, right=right)
    return LayerAttention(label, Causal() & window if causal else window, scale)


def _window(config: ModelConfig, number: int, causal: bool) -> tuple[int, int]:
    """The distances of a local layer: transformers' masking_utils, kv > q - W or |q - kv| <= W."""
    f = config.fields
    if "local_attention" in f:
        half = _whole(config, "local_attention", least=2) // 2
        return half, half
    if f.get("sliding_window") is None or f.get("use_sliding_window") is False:
        off = "use_sliding_window is false" if f.get("use_sliding_window") is False else "sliding_window is null"
        raise config.error(f"layer_types[{number}] is {LOCAL}, and {off}; say the window, or {GLOBAL}.")
    width = _whole(config, "sliding_window")
    if f.get("sliding_window_size") not in (None, width):
        raise config.error(
            f"sliding_window={width} and sliding_window_size={f['sliding_window_size']} say two things; keep one."
        )
    if causal:
        return width - 1, 0
    if f.get("use_bidirectional_attention"):
        return width // 2, width // 2  # gemma3_text: |q - kv| < W // 2 + 1
    return width, width


def _scale(config: ModelConfig, head_dim: int) -> float | None:
    """What multiplies q.k, where the layers share one and it isn't 1/sqrt(head_dim)."""
    f = config.fields
    if "query_pre_attn_scalar" in f:
        return _positive(config, "query_pre_attn_scalar") ** -0.5
    if "attention_multiplier" in f:
        return _positive(config, "attention_multiplier")
    if "scale_attn_weights" in f and not _flag(config, "scale_attn_weights"):
        return 1.0
    if "qk_rope_head_dim" not in f:
        return None
    if f["rope_parameters"] and f["rope_scaling"] and f["rope_parameters"] != f["rope_scaling"]:
        raise config.error("rope_parameters and rope_scaling say two things; keep one.")
    rope = f["rope_parameters"] or f["rope_scaling"] or {}
    if not isinstance(rope, Mapping):
        raise config.error(f"rope_scaling={rope!r}; wanted an object.")
    # yarn of DeepSeek: the logits grow with the context, by the square of what its paper calls the temperature
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return None
    factor, all_dim = (_number(config, f"rope_scaling.{key}", rope.get(key)) for key in ("factor", "mscale_all_dim"))
    mscale = 0.1 * all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return head_dim**-0.5 * mscale**2


def _dtype(config: ModelConfig) -> str | None:
    value = config.fields["dtype"]
    if value is None:
        return None
    name = _dtype_name(value)
    if name not in _DTYPES:
        raise config.error(
            f"dtype={name!r}; wanted one of {', '.join(_DTYPES)}: give dtype= with what the model computes in."
        )
    return name


def _dtype_name(value: Any) -> str:
    """'bfloat16' of a string, a NumPy dtype, a jnp scalar type or a torch dtype."""
    text = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
    return str(text).removeprefix("torch.")


def _whole(config: ModelConfig, key: str, least: int = 1) -> int:
    value = config.fields[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LIMIT:
        raise config.error(f"{key}={value!r}; wanted a whole number from {least} on.")
    return value


def _positive(config: ModelConfig, key: str) -> float:
    return _number(config, key, config.fields[key])


def _number(config: ModelConfig, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise config.error(f"{key}={value!r}; wanted a positive number.")
    return float(value)


def _probability(config: ModelConfig, key: str) -> float:
    value = config.fields[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise config.error(f"{key}={value!r}; wanted a probability in [0, 1).")
    return float(value)


def _flag(config: ModelConfig, key: str) -> bool:
    value = config.fields[key]
    if not isinstance(value, bool):
        raise config.error(f"{key}={value!r}; wanted true or false.")
    return value
