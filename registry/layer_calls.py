"""The fields of a model's calls: those that all its layers share, and those of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..masks import SEGMENT_IDS, And, Mask, Or
from ..models.layers import LayerAttention, LayerHeads, LayerSizes
from ..models.model_attention import ModelAttention
from ..sharding.modes import GENERATION, canonical_mode

__all__ = ["is_cached", "layer_call", "model_call", "without_spans"]

_SPANS = 2  # that are drawn, where arrays are


def without_spans(mask: Mask) -> Mask:
    """The mask of tokens that belong to no span: what is beside the place of segment ids in an Or."""
    parts = [_beside_spans(part) if isinstance(part, Or) else part for part in mask.conjuncts()]
    return And(tuple(parts)) if len(parts) > 1 else parts[0]


def _beside_spans(mask: Or) -> Mask:
    beside = tuple(part for part in mask.masks if part != SEGMENT_IDS)
    return beside[0] if len(beside) == 1 else Or(beside)


def is_cached(mode: str | None) -> bool:
    """Whether a mode attends to a cache, so that each row has its own length. Errors: InputError."""
    return mode is not None and canonical_mode(mode) in GENERATION


def model_call(
    attention: ModelAttention,
    *,
    batch: int | None,
    q_len: int | None,
    kv_len: int | None,
    mode: str | None,
    layout: str | None,
) -> dict[str, Any]:
    """The fields that all calls of a model have. Errors: ConfigError for lengths that don't go together."""
    names = ("q_heads", "kv_heads", "head_dim") if attention.q_heads else ()
    call: dict[str, Any] = {name: getattr(attention, name) for name in names}
    if attention.value_dim != attention.head_dim:
        call["value_dim"] = attention.value_dim
    optional = {
        "batch": batch,
        "q_len": q_len,
        "kv_len": kv_len,
        "mode": mode,
        "layout": layout,
        "dtype": attention.dtype,
    }
    call |= {name: value for name, value in optional.items() if value is not None}
    if attention.logits_soft_cap is not None:
        call["logits_soft_cap"] = attention.logits_soft_cap
    if attention.sinks:
        call["softmax_aux"] = [attention.q_heads]
    if attention.return_weights:
        call["return_weights"] = True
    if kv_len is not None and q_len is None:
        raise ConfigError(f"kv_len={kv_len} without q_len; give both.")
    if attention.cross:
        if q_len is not None and kv_len is None:
            raise ConfigError(
                f"q_len={q_len} without kv_len, but the keys of cross-attention are the encoder's; give both."
            )
        return call
    shorter = kv_len is not None and q_len is not None and q_len != kv_len
    cached = is_cached(mode)
    if (shorter or cached) and not attention.causal:
        raise ConfigError(
            f"q_len={q_len}, kv_len={kv_len}, mode={mode!r}: this model's tokens see each other in both directions, so queries "
            "and keys are the same tokens; give q_len alone."
        )
    if shorter and q_len is not None and kv_len is not None and q_len > kv_len:
        raise ConfigError(f"q_len={q_len} is more than kv_len={kv_len}; the queries are the last of the kv_len tokens.")
    if cached or (shorter and q_len == 1 and mode is None):
        call["kv_lengths"] = True
    elif shorter and q_len is not None and kv_len is not None:
        call["query_offset"] = kv_len - q_len
    return call


def layer_call(layer: LayerAttention, attention: ModelAttention, call: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a call that differ between layers."""
    its: dict[str, Any] = {"mask": layer.mask}
    if layer.mask is not None and not layer.mask.is_static:
        # One query at a time is generated text, which belongs to no span.
        one = call.get("q_len") == 1 and is_cached(call.get("mode", "autoregressive"))
        its |= {"mask": without_spans(layer.mask)} if one else {"segment_ids": _SPANS}
    if layer.softmax_scale is not None:
        its["softmax_scale"] = layer.softmax_scale
    if layer.score is not None:
        its["score"] = layer.score
    if layer.sizes is not None:
        its |= _of_image(layer.sizes, attention, call)
    return its | ({} if layer.heads is None else _of_heads(layer.heads, attention.q_heads))


def _of_image(sizes: LayerSizes, attention: ModelAttention, call: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a layer that attends to an image's patches. Errors: ConfigError for lengths, a mode or a layout that it can't
    have."""
    given = {name: call[name] for name in ("q_len", "kv_len") if call.get(name) not in (None, attention.positions)}
    if given or is_cached(call.get("mode")) or call.get("layout") == "thd":
        raise ConfigError(
            f"{attention.name}: {given or {name: call.get(name) for name in ('mode', 'layout')}}: the layers attend to the "
            f"patches of an image, {attention.positions} at most; leave lengths, mode and layout out."
        )
    rows = call.get("batch", 1) * sizes.windows
    fields: dict[str, Any] = {"q_heads": sizes.q_heads, "kv_heads": sizes.q_heads, "head_dim": sizes.head_dim}
    fields |= {"batch": rows, "q_len": sizes.tokens, "kv_len": sizes.tokens}
    return fields | ({"dense_mask": [rows, 1, sizes.tokens, sizes.tokens]} if sizes.masked else {})


def _of_heads(heads: LayerHeads, q_heads: int) -> dict[str, Any]:
    """The fields of a layer whose heads aren't those of all layers."""
    fields: dict[str, Any] = {"kv_heads": heads.kv_heads, "head_dim": heads.head_dim, "value_dim": heads.value_dim}
    return fields | ({"softmax_aux": [q_heads]} if heads.sinks else {})
