"""The model families whose configs can be read: the keys that each family reads, their defaults, and the kinds of layers.

Source of every row: the family's configuration and modelling files in transformers 5.24, checked against it by
tests/models/test_model_transformers.py. The family doesn't read a key that isn't in `defaults`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .family import CHUNKED, GLOBAL, INDEXED, LOCAL, NOT_READ, Family, Fields, Spans, parts, sizes
from .image_families import IMAGE_FAMILIES
from .latent_families import LATENT_FAMILIES
from .linear_families import LINEAR_FAMILIES
from .mamba_families import MAMBA_FAMILIES
from .mixed_families import MIXED_FAMILIES
from .plain_families import PLAIN, PLAIN_FAMILIES, has_window
from .scored_families import SCORED_FAMILIES

__all__ = [
    "ALIASES", "CHUNKED", "COMPOSITES", "FAMILIES", "GLOBAL", "INDEXED", "LOCAL", "NESTED_PARTS", "PARTS", "Composite", "Family",
]  # fmt: skip


def _by(test: Callable[[Fields, int], Any], yes: str = LOCAL) -> Callable[[Fields], list[str]]:
    """Layers of kind `yes` where test(fields, layer number) holds, and global layers elsewhere."""
    return lambda f: [yes if test(f, layer) else GLOBAL for layer in range(f["num_hidden_layers"])]


def _all_but_every(period: int | str) -> Callable[[Fields], list[str]]:
    """Local layers, except that every n-th layer, counted from 1, is global."""
    return _by(lambda f, layer: (layer + 1) % (f[period] if isinstance(period, str) else period))


def _has_window(f: Fields, layer: int) -> bool:
    return has_window(f)


def _rope(f: Fields, layer: int) -> bool:
    listed = f["no_rope_layers"]
    return bool(listed[layer] if listed else (layer + 1) % f["no_rope_layer_interval"])


_WINDOW: dict[str, Any] = {"sliding_window": 4096}
_NO_WINDOW: dict[str, Any] = {"sliding_window": None}
_QWEN: dict[str, Any] = _WINDOW | {"use_sliding_window": False}
_TYPES: dict[str, Any] = {"layer_types": None}
_GEMMA: dict[str, Any] = {"head_dim": 256, "use_bidirectional_attention": None}
_NO_ROPE: dict[str, Any] = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_TUNED: dict[str, Any] = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
_BERT: dict[str, Any] = sizes(768, 12, 12, NOT_READ, 512, head_dim=NOT_READ, is_causal=NOT_READ)
_BERT |= {"attention_dropout": 0.1}
_BERT_NAMES = {"attention_probs_dropout_prob": "attention_dropout"}
_BERT_FAMILY = Family(_BERT | {"is_decoder": False}, names=_BERT_NAMES, causal=False)


FAMILIES: dict[str, Family] = {
    **parts("bart", width=1024, layers=12, heads=16),
    "bert": _BERT_FAMILY,
    **parts("blenderbot", width=2560, layers=(2, 24), heads=32, source=("max_position_embeddings", 128)),
    **parts("blenderbot-small", width=512, layers=8, heads=16, source=("max_position_embeddings", 512)),
    "cohere": Family(sizes(8192, 40, 64, None, 8192)),
    "cohere2": Family(
        sizes(8192, 40, 64, None, 8192) | _WINDOW | _TYPES | {"sliding_window_pattern": 4},
        _all_but_every("sliding_window_pattern"),
    ),
    "distilbert": Family(
        _BERT | {"num_hidden_layers": 6},
        names={"dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
        causal=False,
    ),
    "electra": Family(
        _BERT | {"hidden_size": 256, "num_attention_heads": 4, "is_decoder": False}, names=_BERT_NAMES, causal=False
    ),
    "ernie4_5": Family(
        {k: v for k, v in sizes(1024, 18, 16, 2, 131072, head_dim=128).items() if k != "attention_dropout"}
    ),
    "exaone4": Family(
        sizes(4096, 32, 32, 32, 2048) | _WINDOW | _TYPES | {"sliding_window_pattern": 4},
        _by(lambda f, layer: f["sliding_window"] is not None and (layer + 1) % f["sliding_window_pattern"]),
    ),
    "gemma": Family(sizes(3072, 28, 16, 16, 8192) | _GEMMA),
    "gemma2": Family(
        sizes(2304, 26, 8, 4, 8192)
        | _GEMMA
        | _WINDOW
        | _TYPES
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "sliding_window_size": None},
        _all_but_every(2),
    ),
    "gemma3_text": Family(
        sizes(2304, 26, 8, 4, 131072)
        | _GEMMA
        | _WINDOW
        | _TYPES
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "sliding_window_pattern": 6},
        _all_but_every("sliding_window_pattern"),
    ),
    "glm": Family(sizes(4096, 40, 32, 2, 131072, head_dim=128)),
    "glm4_moe": Family(sizes(4096, 46, 96, 8, 131072)),
    "glm4": Family(sizes(4096, 40, 32, 2, 131072, head_dim=128)),
    "gpt2": Family(
        sizes(768, 12, 12, NOT_READ, 1024, head_dim=NOT_READ)
        | {"attention_dropout": 0.1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        names={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
            "attn_pdrop": "attention_dropout",
        },
    ),
    "gpt_neox": Family(sizes(6144, 44, 64, NOT_READ, 2048, head_dim=NOT_READ)),
    "gpt_oss": Family(
        sizes(2880, 36, 64, 8, 131072, head_dim=64) | {"sliding_window": 128} | _TYPES, _all_but_every(2), sinks=True
    ),
    "granite": Family(sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0}),
    "granitemoe": Family(sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0}),
    "llama": Family(sizes(4096, 32, 32, None, 2048)),
    "llama4_text": Family(
        sizes(5120, 48, 40, 8, 131072, head_dim=128) | _NO_ROPE | _TYPES | {"attention_chunk_size": 8192} | _TUNED,
        _by(_rope, CHUNKED),
    ),
    **parts("m2m_100", width=1024, layers=12, heads=16, dropout=0.1),
    **parts("marian", width=1024, layers=12, heads=16),
    **parts("mbart", width=1024, layers=12, heads=16),
    "ministral": Family(sizes(4096, 32, 32, 8, 131072) | _WINDOW | _TYPES, _by(_has_window)),
    "mistral": Family(sizes(4096, 32, 32, 8, 131072) | _WINDOW, _by(_has_window)),
    "mixtral": Family(sizes(4096, 32, 32, 8, 131072) | _NO_WINDOW, _by(_has_window)),
    "modernbert": Family(
        sizes(768, 22, 12, NOT_READ, 8192, head_dim=NOT_READ, is_causal=NOT_READ)
        | _TYPES
        | {"local_attention": 128, "global_attn_every_n_layers": 3},
        _by(lambda f, layer: layer % f["global_attn_every_n_layers"]),
        causal=False,
    ),
    "olmo": Family(sizes(4096, 32, 32, None, 2048)),
    "olmo2": Family(sizes(4096, 32, 32, None, 2048)),
    "olmo3": Family(sizes(4096, 32, 32, None, 2048) | _WINDOW | _TYPES, _all_but_every(4)),
    "opt": Family(sizes(768, 12, 12, NOT_READ, 2048, head_dim=NOT_READ)),
    **parts("pegasus", width=1024, layers=12, heads=16),
    "phi": Family(sizes(2048, 24, 32, None, 2048)),
    "phi3": Family(sizes(3072, 32, 32, None, 4096) | _NO_WINDOW, _by(_has_window)),
    **parts("plbart", width=768, layers=6, heads=12, dropout=0.1),
    "qwen2": Family(
        sizes(4096, 32, 32, 32, 32768) | _QWEN | _TYPES | {"max_window_layers": 28},
        _by(lambda f, layer: _has_window(f, layer) and layer >= f["max_window_layers"]),
    ),
    "qwen2_moe": Family(
        sizes(2048, 24, 16, 16, 32768) | _QWEN | _TYPES | {"max_window_layers": 28},
        _by(lambda f, layer: _has_window(f, layer) and (layer + 1) % 2 and layer < f["max_window_layers"]),
    ),
    "qwen3": Family(
        sizes(4096, 32, 32, 32, 32768, head_dim=128) | _QWEN | _TYPES | {"max_window_layers": 28},
        _by(lambda f, layer: _has_window(f, layer) and layer >= f["max_window_layers"]),
    ),
    "qwen3_moe": Family(sizes(2048, 24, 32, 4, 32768) | _QWEN, _by(_has_window)),
    "roberta": _BERT_FAMILY,
    "seed_oss": Family(sizes(4096, 64, 80, 8, 524288, head_dim=128) | {"attention_dropout": 0.1}),
    "smollm3": Family(
        sizes(2048, 36, 16, 4, 32768) | _NO_WINDOW | {"use_sliding_window": False} | _NO_ROPE | _TYPES,
        _by(lambda f, layer: _has_window(f, layer) and not _rope(f, layer)),
    ),
    "stablelm": Family(sizes(2560, 32, 32, 32, 4096, head_dim=NOT_READ)),
    "starcoder2": Family(sizes(3072, 30, 24, 2, 4096) | _NO_WINDOW, _by(_has_window)),
    **parts(
        "whisper",
        width=384,
        layers=4,
        heads=6,
        source=("max_source_positions", 1500),
        target=("max_target_positions", 448),
    ),
    "xlm-roberta": _BERT_FAMILY,
    **LATENT_FAMILIES,
    **LINEAR_FAMILIES,
    **MAMBA_FAMILIES,
    **MIXED_FAMILIES,
    **SCORED_FAMILIES,
    **IMAGE_FAMILIES,
    **PLAIN_FAMILIES,
}

PARTS = {
    whole: tuple(part for part in ("encoder", "decoder", "cross") if f"{whole} {part}" in FAMILIES)
    for whole in dict.fromkeys(name.partition(" ")[0] for name in FAMILIES if " " in name)
}
"""Encoder-decoders. Their attentions are read one at a time: FAMILIES has them as `bart encoder` and so on."""

ALIASES = {"kimi_k2": "deepseek_v3", "minimax_m1": "minimax", "minimax_text_01": "minimax"}
"""Model types with code of their own in their checkpoints, whose attention and keys are those of a family."""


@dataclass(frozen=True)
class Composite:
    """A model of several parts, of which one is read by `part`, by default the text. Not of all models is the text read.

    parts: the family of each part's config if that has no model_type: `vision` is that of vision_config. spans: the kinds of
    layers of text where tokens of one image, or of a prefix, see each other: all of them, or those that the window leaves."""

    parts: Mapping[str, str]
    spans: Mapping[str, Spans] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        return self.parts.get("text")


NESTED_PARTS = ("text", "vision", "audio")
"""The parts of composites: each has a config of its own, such as `text_config`."""


def _composite(text: str, vision: str | None = None, spans: Mapping[str, Spans] | None = None) -> Composite:
    return Composite({"text": text} | ({} if vision is None else {"vision": vision}), spans or {})


COMPOSITES: dict[str, Composite] = {
    "aimv2": Composite({"vision": "aimv2_vision_model"}),
    "chinese_clip": Composite({"vision": "chinese_clip_vision_model"}),
    "gemma3": _composite("gemma3_text", "siglip_vision_model", spans={GLOBAL: "all", LOCAL: "in_window"}),
    "gemma4": _composite("gemma4_text", spans={LOCAL: "in_window"}),  # if use_bidirectional_attention is 'vision'
    "kimi_k25": _composite("deepseek_v3"),
    "llama4": _composite("llama4_text"),
    "llava": _composite("llama", "clip_vision_model"),
    "llava_next": _composite("llama", "clip_vision_model"),
    "minimax_m3_vl": _composite("minimax_m3_vl_text"),
    "mistral3": _composite("mistral", "pixtral"),
    "paligemma": _composite("gemma", "siglip_vision_model", spans={GLOBAL: "all", LOCAL: "all"}),
    "pix2struct": _composite("pix2struct_text_model", "pix2struct_vision_model"),
    "qwen3_5": _composite("qwen3_5_text"),
    "qwen3_5_moe": _composite("qwen3_5_moe_text"),
    "sam": Composite({"vision": "sam_vision_model"}),  # it has no text
    "siglip": Composite({"vision": "siglip_vision_model"}),
    "siglip2": Composite({"vision": "siglip2_vision_model"}),
    **{name: Composite(parts) for name, parts in PLAIN["composites"].items()},
}
