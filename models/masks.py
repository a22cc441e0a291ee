"""The kind and the mask of each layer in a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import shown
from ..masks import SEGMENT_IDS, Causal, Chunked, Full, Mask, SlidingWindow
from ..planning.notes import Note, note
from .families import CHUNKED, GLOBAL, INDEXED, LOCAL
from .family import HYBRID
from .hybrid_layers import layer_state, state_label, state_notes
from .indexers import indexed_kinds
from .layer_heads import layer_heads, shared_keys
from .layer_scores import layer_score
from .layers import LayerAttention
from .model_config import ModelConfig
from .values import flag, whole

__all__ = ["is_causal", "layer_attentions"]

# Keys that give a rule for what layer_types lists.
_PATTERNS = ("sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers")

_MAX_LAYERS = 10_000  # each is processed; more are taken for a typing error


def layer_attentions(config: ModelConfig, head_dim: int, causal: bool, notes: list[Note]) -> tuple[LayerAttention, ...]:
    """One LayerAttention per layer. Errors: ConfigError."""
    f, kinds = config.fields, _kinds(config, notes)
    indexed, shared = indexed_kinds(config, kinds, notes), shared_keys(config, kinds, notes)
    if not causal and (own := set(kinds) & set(config.rules.own_kinds)):
        raise config.error(
            f"is_causal is false, but {sorted(own)[0]} layers see earlier tokens alone; wanted a causal mask."
        )
    state_notes(config, kinds, notes)
    if causal and any(_has_spans(config, kind) for kind in kinds):
        notes.append(note("model.spans"))
    elif f.get("use_bidirectional_attention") == "vision":
        remark = (
            "in a gemma4, tokens of one image see each other in local layers; the masks here are those of text alone"
        )
        notes.append(note("model.noted", key="use_bidirectional_attention", value="'vision'", remark=remark))
    layers = []
    for number, kind in enumerate(kinds):
        if kind in config.rules.own_kinds and kind != HYBRID:
            layers.append(LayerAttention(state_label(config, kind), None, state=layer_state(config, kind)))
            continue
        attends = GLOBAL if kind == HYBRID else kind
        layer = _layer(config, attends, number, head_dim, causal)
        label = (indexed[number] or layer.kind) + " shared kv" * (number in shared)
        heads, reads = layer_heads(config, kind, number), shared.get(number)
        state = layer_state(config, kind) if kind == HYBRID else None
        label += f" + {state_label(config, kind)}" if state is not None else ""
        layers.append(replace(layer, kind=label, heads=heads, indexed=kind == INDEXED, reads_layer=reads, state=state))
    return tuple(layers)


def is_causal(config: ModelConfig) -> bool:
    """Whether tokens see only earlier ones."""
    f, rules = config.fields, config.rules
    if not rules.causal:
        return flag(config, "is_decoder") if "is_decoder" in f else False
    if config.family == "gemma4_text" and f["use_bidirectional_attention"] == "all":
        return False
    if f.get("use_bidirectional_attention") and config.family not in ("gemma3_text", "gemma4_text"):
        raise config.error(
            f"use_bidirectional_attention={shown(f['use_bidirectional_attention'])}: transformers builds a causal mask for "
            f"{config.family} anyway; remove it, and set is_causal=false if the mask should not be causal."
        )
    if config.family == "gemma3_text" and f["use_bidirectional_attention"]:
        return not flag(config, "use_bidirectional_attention")
    return True if f.get("is_causal") is None else flag(config, "is_causal")


def _kinds(config: ModelConfig, notes: list[Note]) -> list[str]:
    """The kind of each layer, by layer_types if the config has it, else by the family's rule."""
    f, count = config.fields, whole(config, "num_hidden_layers", maximum=_MAX_LAYERS)
    if "use_sliding_window" in f:
        flag(config, "use_sliding_window")
    for key in ("no_rope_layers", "layer_types"):
        listed = f.get(key)
        if listed and (not isinstance(listed, list | tuple) or len(listed) != count):
            got = f"{len(listed)} entries" if isinstance(listed, list | tuple) else repr(listed)
            raise config.error(f"{key}: got {got}; wanted a list with one entry for each of {count} layers.")
    types = f.get("layer_types")
    if not types:
        return _by_rule(config)
    known = (GLOBAL, LOCAL, CHUNKED, *((INDEXED,) if "index_n_heads" in f else ()), *config.rules.own_kinds)
    for number, kind in enumerate(types):
        if kind not in known:
            raise config.error(
                f"layer_types[{number}] is {shown(kind)}; wanted {', '.join(known[:-1])} or {known[-1]}. attnops doesn't know "
                f"other kinds of layers of {config.family}, such as linear attention."
            )
    patterns = [key for key in _PATTERNS if key in config.declared_keys and f.get(key)]
    if patterns and list(types) != (_by_letters(f, count) or _by_rule(config)):
        notes.append(note("model.layer_types", patterns=patterns))
    return list(types)


def _by_rule(config: ModelConfig) -> list[str]:
    """The kinds by the family's rule. Errors: ConfigError for keys of the rule that aren't numbers."""
    f = config.fields
    if isinstance(f.get("sliding_window_pattern"), str):
        raise config.error(
            f"sliding_window_pattern={shown(f['sliding_window_pattern'])}; wanted a whole number from 1 up, or letters L and G "
            "beside layer_types, which then has the kind of each layer."
        )
    for key in ("sliding_window_pattern", "no_rope_layer_interval", "global_attn_every_n_layers"):
        if key in f and not (config.family == "exaone4" and f["sliding_window"] is None):  # where it is 0
            whole(config, key)
    if f.get("max_window_layers") is not None:
        whole(config, "max_window_layers", minimum=0)
    return config.rules.kinds(f)


def _by_letters(f: Mapping[str, Any], count: int) -> list[str] | None:
    """The kinds by a pattern of letters such as 'LLLG', repeated, in which the last layer is global; None if it isn't letters.

    EXAONE's configs have it beside layer_types. transformers can't read it alone.
    """
    letters = f.get("sliding_window_pattern")
    if not isinstance(letters, str) or not letters or set(letters) - {"L", "G"}:
        return None
    kinds = [LOCAL if letters[layer % len(letters)] == "L" else GLOBAL for layer in range(count)]
    return [*kinds[:-1], GLOBAL]


def _layer(config: ModelConfig, kind: str, number: int, head_dim: int, causal: bool) -> LayerAttention:
    f = config.fields
    scale = None
    if f.get("scale_attn_by_inverse_layer_idx") and flag(config, "scale_attn_by_inverse_layer_idx"):
        scale = (1.0 if f["scale_attn_weights"] is False else head_dim**-0.5) / (number + 1)
    score = layer_score(config, kind, number, head_dim, causal)
    if kind == INDEXED and "index_topk_blocks" in f and not causal:
        raise config.error(
            f"layer {number} is indexed, but is_causal is false: its indexer picks from earlier keys alone; wanted a causal mask."
        )
    spans = causal and _has_spans(config, kind)
    if kind == GLOBAL and spans:
        return LayerAttention("global spans", Causal() | SEGMENT_IDS, scale, score)
    if kind in (GLOBAL, INDEXED):
        return LayerAttention("global", Causal() if causal else Full(), scale, score)
    if kind == CHUNKED:
        size = f.get("attention_chunk_size")
        if size is None or not causal:
            why = "attention_chunk_size is missing" if size is None else "is_causal is false"
            raise config.error(
                f"layer {number} is {CHUNKED}, but {why}; wanted attention_chunk_size and a causal mask."
            )
        return LayerAttention(
            f"chunked {whole(config, 'attention_chunk_size')}", Causal() & Chunked(size), scale, score
        )
    left, right = _window(config, number, causal)
    if spans:
        seen: Mask = (Causal() & SlidingWindow(left=left, right=right)) | SEGMENT_IDS
        if config.spans[LOCAL] == "in_window":  # which then has no end after the query
            seen = (Causal() | SEGMENT_IDS) & SlidingWindow(left=left, right=None)
        return LayerAttention(f"local {left + 1} spans", seen, scale, score)
    label = f"local {left + 1}" if right == 0 else f"local ±{left}"
    window = SlidingWindow(left=left, right=right)
    return LayerAttention(label, Causal() & window if causal else window, scale, score)


def _has_spans(config: ModelConfig, kind: str) -> bool:
    """Whether tokens of one image see each other in a layer of this kind."""
    if config.family == "gemma4_text" and config.fields["use_bidirectional_attention"] != "vision":
        return False
    return kind in config.spans


def _window(config: ModelConfig, number: int, causal: bool) -> tuple[int, int]:
    """The distances of a local layer, as in transformers' masking_utils: kv > q - W, or |q - kv| <= W."""
    f = config.fields
    if "local_attention" in f:
        half = whole(config, "local_attention", minimum=2) // 2
        return half, half
    if "local_radius" in f:
        radius = whole(config, "local_radius")
        return radius, radius
    if f.get("sliding_window") is None or f.get("use_sliding_window") is False:
        off = "use_sliding_window is false" if f.get("use_sliding_window") is False else "sliding_window is null"
        raise config.error(f"layer_types[{number}] is {LOCAL}, but {off}; specify the window, or use {GLOBAL}.")
    width = whole(config, "sliding_window")
    if f.get("sliding_window_size") not in (None, width):
        raise config.error(
            f"sliding_window={width} and sliding_window_size={f['sliding_window_size']} contradict each other; keep one."
        )
    if causal:
        return width - 1, 0
    if f.get("use_bidirectional_attention") == "all":
        return width // 2 + 1, width // 2 + 1  # gemma4_text: |q - kv| <= W // 2 + 1
    if config.family == "gemma3_text" and f["use_bidirectional_attention"]:
        return width // 2, width // 2  # |q - kv| < W // 2 + 1
    return width, width
