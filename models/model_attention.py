"""What a model's config says about attention, in attnops' terms: heads, dims, scale, and each layer's mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import shown
from ..planning.notes import Note, note
from .image_layers import image_layers
from .indexers import indexer_of
from .layers import LayerAttention
from .masks import is_causal, layer_attentions
from .model_config import ModelConfig
from .values import dtype_name, flag, number, positive, probability, whole

__all__ = ["LayerAttention", "ModelAttention", "model_attention"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelAttention:
    """All layers: what they share, and one LayerAttention each. A `softmax_scale` of None means 1/sqrt(head_dim). A model without
    attention has 0 heads. positions: None if the config has no longest length; key_positions: of the keys, if it isn't that.

    latent: the sizes of latent attention, in the names of LatentDims; empty without it. indexer: the sizes of what picks keys for
    the layers that are `indexed`: heads and head_dim, and top_k keys, or top_blocks of block_size keys with the last local_blocks
    among them; empty without such layers.
    """

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
    positions: int | None
    cross: bool
    layers: tuple[LayerAttention, ...]
    notes: tuple[Note, ...]
    latent: tuple[tuple[str, int | str], ...] = ()
    indexer: tuple[tuple[str, int], ...] = ()
    key_positions: int | None = None


def model_attention(config: ModelConfig, dtype: Any = None) -> ModelAttention:
    """Derive the attention of a config. `dtype` overrides the config's. Errors: ConfigError for invalid values."""
    if "image_size" in config.fields:
        return _of_images(config, dtype)
    if "num_attention_heads" not in config.fields:
        return _of_states(config, dtype)
    f, rules, notes = config.fields, config.rules, list(config.notes)
    q_heads = whole(config, "num_attention_heads")
    kv_heads = q_heads if f.get("num_key_value_heads") is None else whole(config, "num_key_value_heads")
    if q_heads % kv_heads:
        default = "" if "num_key_value_heads" in config.declared_keys else f", the default of {config.family}"
        raise config.error(
            f"num_attention_heads={q_heads} is not a multiple of num_key_value_heads={kv_heads}{default}."
        )
    head_dim, value_dim = _dims(config, q_heads, kv_heads)
    causal = is_causal(config)
    runtime_dtype = _dtype(config, dtype, notes)
    layers = layer_attentions(config, head_dim, causal, notes)
    if all(layer.mask is None for layer in layers):
        notes.append(note("model.no_attention"))
    return ModelAttention(
        name=config.name,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        softmax_scale=_scale(config, head_dim),
        logits_soft_cap=None if f.get("attn_logit_softcapping") is None else positive(config, "attn_logit_softcapping"),
        dropout_prob=probability(config, "attention_dropout") if "attention_dropout" in f else 0.0,
        causal=causal,
        sinks=rules.sinks,
        return_weights=flag(config, "output_attentions"),
        dtype=runtime_dtype,
        positions=whole(config, "max_position_embeddings") if "max_position_embeddings" in f else None,
        cross=rules.cross,
        layers=layers,
        notes=tuple(notes),
        latent=_latent(config, q_heads, value_dim),
        indexer=indexer_of(config) if any(layer.indexed for layer in layers) else (),
        key_positions=whole(config, "max_source_positions") if "max_source_positions" in f else None,
    )


def _latent(config: ModelConfig, heads: int, value_dim: int) -> tuple[tuple[str, int | str], ...]:
    if config.fields.get("kv_lora_rank") is None:
        return ()
    read = {"nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", "latent_dim": "kv_lora_rank"}
    sizes = {name: whole(config, key) for name, key in read.items()}
    latent: dict[str, int | str] = {"heads": heads, "value_dim": value_dim, **sizes}
    if config.fields.get("q_lora_rank") is not None:
        interleaved = config.fields.get("rope_interleave", True)
        if not isinstance(interleaved, bool):
            raise config.error(f"rope_interleave={shown(interleaved)}; wanted true or false.")
        latent["query_latent_dim"] = whole(config, "q_lora_rank")
        latent["rope_pairs"] = "interleaved" if interleaved else "halves"
    return tuple(latent.items())


def _dims(config: ModelConfig, q_heads: int, kv_heads: int) -> tuple[int, int]:
    f = config.fields
    if "qk_rope_head_dim" in f:
        rope = whole(config, "qk_rope_head_dim")
        both = whole(config, "qk_nope_head_dim") + rope
        # transformers writes qk_rope_head_dim, the rotated part, as head_dim
        for key, meant in (("qk_head_dim", (both,)), ("head_dim", (rope, both))):
            if f[key] is not None and f[key] not in meant:
                raise config.error(
                    f"{key}={shown(f[key])}, but qk_nope_head_dim and qk_rope_head_dim add up to {both}."
                )
        if kv_heads != q_heads:
            raise config.error(
                f"num_key_value_heads={kv_heads} with latent attention, where each of the {q_heads} heads has its own key."
            )
        return both, whole(config, "v_head_dim")
    if f.get("head_dim") is not None:
        head_dim = whole(config, "head_dim")
        return head_dim, head_dim if f.get("v_head_dim") is None else whole(config, "v_head_dim")
    hidden = whole(config, "hidden_size")
    if hidden % q_heads:
        raise config.error(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={q_heads}, and head_dim is missing."
        )
    return hidden // q_heads, hidden // q_heads


def _scale(config: ModelConfig, head_dim: int) -> float | None:
    """The factor of q.k, if all layers share one and it isn't 1/sqrt(head_dim); else None."""
    f = config.fields
    if config.rules.scale is not None:
        return config.rules.scale
    if f.get("softmax_scale") is not None:
        return positive(config, "softmax_scale")
    if "query_pre_attn_scalar" in f:
        return positive(config, "query_pre_attn_scalar") ** -0.5
    if f.get("attention_multiplier") is not None:
        return positive(config, "attention_multiplier")
    if "scale_attn_weights" in f and not flag(config, "scale_attn_weights"):
        return 1.0
    if "qk_rope_head_dim" not in f:
        return None
    if f["rope_parameters"] and f["rope_scaling"] and f["rope_parameters"] != f["rope_scaling"]:
        raise config.error("rope_parameters and rope_scaling contradict each other; keep one.")
    rope = f["rope_parameters"] or f["rope_scaling"] or {}
    if not isinstance(rope, Mapping):
        raise config.error(f"rope_scaling={shown(rope)}; wanted an object.")
    # DeepSeek's yarn: the logits are scaled by the square of what the YaRN paper calls the temperature
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return None
    factor, all_dim = (number(config, f"rope_scaling.{key}", rope.get(key)) for key in ("factor", "mscale_all_dim"))
    mscale = 0.1 * all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return head_dim**-0.5 * mscale**2


def _of_images(config: ModelConfig, dtype: Any) -> ModelAttention:
    """The same for layers that attend to the patches of an image, whose number follows from the config."""
    layers, notes = image_layers(config), list(config.notes)
    runtime_dtype = _dtype(config, dtype, notes)
    sizes = [layer.sizes for layer in layers if layer.sizes is not None]
    first = sizes[0]
    if any(one.windows > 1 for one in sizes):
        notes.append(note("model.windows"))
    if config.family == "swinv2":
        notes.append(note("model.cosine"))
    if any(one.masked for one in sizes):
        notes.append(note("model.shifted_windows"))
    return ModelAttention(
        name=config.name,
        q_heads=first.q_heads,
        kv_heads=first.q_heads,
        head_dim=first.head_dim,
        value_dim=first.head_dim,
        softmax_scale=config.rules.scale,
        logits_soft_cap=None,
        dropout_prob=probability(config, "attention_dropout") if "attention_dropout" in config.fields else 0.0,
        causal=False,
        sinks=False,
        return_weights=flag(config, "output_attentions"),
        dtype=runtime_dtype,
        positions=max(one.tokens for one in sizes),
        cross=False,
        layers=layers,
        notes=tuple(notes),
    )


def _of_states(config: ModelConfig, dtype: Any) -> ModelAttention:
    """The same for a model whose layers have a state and no attention."""
    notes = list(config.notes)
    runtime_dtype = _dtype(config, dtype, notes)
    layers = layer_attentions(config, 0, is_causal(config), notes)
    notes.append(note("model.no_attention"))
    return ModelAttention(
        name=config.name,
        q_heads=0,
        kv_heads=0,
        head_dim=0,
        value_dim=0,
        softmax_scale=None,
        logits_soft_cap=None,
        dropout_prob=0.0,
        causal=True,
        sinks=False,
        return_weights=False,
        dtype=runtime_dtype,
        positions=None,
        cross=False,
        layers=layers,
        notes=tuple(notes),
    )


def _dtype(config: ModelConfig, asked: Any, notes: list[Note]) -> str | None:
    value = config.fields["dtype"] if asked is None else asked
    if value is None:
        notes.append(note("model.no_dtype"))
        return None
    if asked is not None:
        return dtype_name(asked)
    name = dtype_name(value)
    if name not in _DTYPES:
        raise config.error(
            f"dtype={shown(name)}; wanted one of {', '.join(_DTYPES)}: give dtype= with the dtype that the model computes in."
        )
    return name
