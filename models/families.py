"""The model families whose configs can be read: the keys that each family reads, their defaults, and the kinds of layers.

Source of every row: the family's configuration and modelling files in transformers 5.24, checked against it by
tests/models/test_model_transformers.py. The family doesn't read a key that isn't in `defaults`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ALIASES", "CHUNKED", "COMPOSITES", "FAMILIES", "GLOBAL", "LOCAL", "PARTS", "Composite", "Family"]

GLOBAL, LOCAL, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How to read one `model_type`.

    defaults: every key that the family reads, with its value if the config doesn't have the key. kinds: the kind of each layer
    if the config has no `layer_types`. names: the family's own names for keys. skips: keys of other parts of the model.
    causal: whether tokens see only earlier ones. sinks: whether each query head has a learned logit. cross: whether the keys
    are an encoder's.
    """

    defaults: Mapping[str, Any]
    kinds: Callable[[Fields], list[str]] = field(default=lambda f: [GLOBAL] * f["num_hidden_layers"])
    names: Mapping[str, str] = field(default_factory=dict)
    skips: tuple[str, ...] = ()
    causal: bool = True
    sinks: bool = False
    cross: bool = False


def _sizes(hidden: int, layers: int, heads: int, kv: int | None, positions: int, **more: Any) -> dict[str, Any]:
    fields = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": None,
        "max_position_embeddings": positions,
        "attention_dropout": 0.0,
        "is_causal": None,
    } | more
    return {key: value for key, value in fields.items() if value is not _NOT_READ}


_NOT_READ: Any = object()


def _by(test: Callable[[Fields, int], Any], yes: str = LOCAL) -> Callable[[Fields], list[str]]:
    """Layers of kind `yes` where test(fields, layer number) holds, and global layers elsewhere."""
    return lambda f: [yes if test(f, layer) else GLOBAL for layer in range(f["num_hidden_layers"])]


def _all_but_every(period: int | str) -> Callable[[Fields], list[str]]:
    """Local layers, except that every n-th layer, counted from 1, is global."""
    return _by(lambda f, layer: (layer + 1) % (f[period] if isinstance(period, str) else period))


def _has_window(f: Fields, layer: int) -> bool:
    return f["sliding_window"] is not None and f.get("use_sliding_window") is not False


def _rope(f: Fields, layer: int) -> bool:
    listed = f["no_rope_layers"]
    return bool(listed[layer] if listed else (layer + 1) % f["no_rope_layer_interval"])


_WINDOW: dict[str, Any] = {"sliding_window": 4096}
_NO_WINDOW: dict[str, Any] = {"sliding_window": None}
_QWEN: dict[str, Any] = _WINDOW | {"use_sliding_window": False}
_TYPES: dict[str, Any] = {"layer_types": None}
_GEMMA: dict[str, Any] = {"head_dim": 256, "use_bidirectional_attention": None}
_NO_ROPE: dict[str, Any] = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_MLA: dict[str, Any] = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": None,
    "v_head_dim": 128,
    "rope_parameters": None,
    "rope_scaling": None,
}
_BERT: dict[str, Any] = _sizes(768, 12, 12, _NOT_READ, 512, head_dim=_NOT_READ, is_causal=_NOT_READ)
_BERT |= {"attention_dropout": 0.1}
_BERT_NAMES = {"attention_probs_dropout_prob": "attention_dropout"}
_BERT_FAMILY = Family(_BERT | {"is_decoder": False}, names=_BERT_NAMES, causal=False)


def _parts(
    name: str,
    *,
    width: int,
    layers: int | tuple[int, int],
    heads: int,
    dropout: float = 0.0,
    source: tuple[str, int] = ("max_position_embeddings", 1024),
    target: tuple[str, int] | None = None,
) -> dict[str, Family]:
    """The three attentions of an encoder-decoder, with BART's names for its keys.

    layers: the default of both sides, or (encoder, decoder). source, target: the key of each side's maximum length and its
    default; `target` is `source` if it isn't given.
    """
    families = {}
    depths = layers if isinstance(layers, tuple) else (layers, layers)
    target = source if target is None else target
    for part, whose, depth, (positions, longest) in (
        ("encoder", "encoder", depths[0], source),
        ("decoder", "decoder", depths[1], target),
        ("cross", "decoder", depths[1], target),
    ):
        defaults = {
            "hidden_size": width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "max_position_embeddings": longest,
            "attention_dropout": dropout,
            "is_encoder_decoder": True,
        }
        names = {f"{whose}_layers": "num_hidden_layers", f"{whose}_attention_heads": "num_attention_heads"}
        names |= {"d_model": "hidden_size", positions: "max_position_embeddings"}
        families[f"{name} {part}"] = Family(
            defaults,
            names=names,
            skips=() if part == "encoder" else ("num_hidden_layers", "num_attention_heads"),
            causal=part == "decoder",
            cross=part == "cross",
        )
    return families


FAMILIES: dict[str, Family] = {
    **_parts("bart", width=1024, layers=12, heads=16),
    "bert": _BERT_FAMILY,
    **_parts("blenderbot", width=2560, layers=(2, 24), heads=32, source=("max_position_embeddings", 128)),
    **_parts("blenderbot-small", width=512, layers=8, heads=16, source=("max_position_embeddings", 512)),
    "cohere": Family(_sizes(8192, 40, 64, None, 8192)),
    "cohere2": Family(
        _sizes(8192, 40, 64, None, 8192) | _WINDOW | _TYPES | {"sliding_window_pattern": 4},
        _all_but_every("sliding_window_pattern"),
    ),
    "deepseek_v2": Family(_sizes(4096, 32, 32, None, 2048) | _MLA),
    "deepseek_v3": Family(_sizes(7168, 61, 128, 128, 4096) | _MLA),
    "distilbert": Family(
        _BERT | {"num_hidden_layers": 6},
        names={"dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
        causal=False,
    ),
    "electra": Family(
        _BERT | {"hidden_size": 256, "num_attention_heads": 4, "is_decoder": False}, names=_BERT_NAMES, causal=False
    ),
    "ernie4_5": Family(
        {k: v for k, v in _sizes(1024, 18, 16, 2, 131072, head_dim=128).items() if k != "attention_dropout"}
    ),
    "exaone4": Family(
        _sizes(4096, 32, 32, 32, 2048) | _WINDOW | _TYPES | {"sliding_window_pattern": 4},
        _by(lambda f, layer: f["sliding_window"] is not None and (layer + 1) % f["sliding_window_pattern"]),
    ),
    "gemma": Family(_sizes(3072, 28, 16, 16, 8192) | _GEMMA),
    "gemma2": Family(
        _sizes(2304, 26, 8, 4, 8192)
        | _GEMMA
        | _WINDOW
        | _TYPES
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "sliding_window_size": None},
        _all_but_every(2),
    ),
    "gemma3_text": Family(
        _sizes(2304, 26, 8, 4, 131072)
        | _GEMMA
        | _WINDOW
        | _TYPES
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "sliding_window_pattern": 6},
        _all_but_every("sliding_window_pattern"),
    ),
    "glm": Family(_sizes(4096, 40, 32, 2, 131072, head_dim=128)),
    "glm4_moe": Family(_sizes(4096, 46, 96, 8, 131072)),
    "glm4": Family(_sizes(4096, 40, 32, 2, 131072, head_dim=128)),
    "gpt2": Family(
        _sizes(768, 12, 12, _NOT_READ, 1024, head_dim=_NOT_READ)
        | {"attention_dropout": 0.1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        names={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
            "attn_pdrop": "attention_dropout",
        },
    ),
    "gpt_neox": Family(_sizes(6144, 44, 64, _NOT_READ, 2048, head_dim=_NOT_READ)),
    "gpt_oss": Family(
        _sizes(2880, 36, 64, 8, 131072, head_dim=64) | {"sliding_window": 128} | _TYPES, _all_but_every(2), sinks=True
    ),
    "granite": Family(_sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0}),
    "granitemoe": Family(_sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0}),
    "llama": Family(_sizes(4096, 32, 32, None, 2048)),
    "llama4_text": Family(
        _sizes(5120, 48, 40, 8, 131072, head_dim=128) | _NO_ROPE | _TYPES | {"attention_chunk_size": 8192},
        _by(_rope, CHUNKED),
    ),
    **_parts("m2m_100", width=1024, layers=12, heads=16, dropout=0.1),
    **_parts("marian", width=1024, layers=12, heads=16),
    **_parts("mbart", width=1024, layers=12, heads=16),
    "ministral": Family(_sizes(4096, 32, 32, 8, 131072) | _WINDOW | _TYPES, _by(_has_window)),
    "mistral": Family(_sizes(4096, 32, 32, 8, 131072) | _WINDOW, _by(_has_window)),
    "mixtral": Family(_sizes(4096, 32, 32, 8, 131072) | _NO_WINDOW, _by(_has_window)),
    "modernbert": Family(
        _sizes(768, 22, 12, _NOT_READ, 8192, head_dim=_NOT_READ, is_causal=_NOT_READ)
        | _TYPES
        | {"local_attention": 128, "global_attn_every_n_layers": 3},
        _by(lambda f, layer: layer % f["global_attn_every_n_layers"]),
        causal=False,
    ),
    "olmo": Family(_sizes(4096, 32, 32, None, 2048)),
    "olmo2": Family(_sizes(4096, 32, 32, None, 2048)),
    "olmo3": Family(_sizes(4096, 32, 32, None, 2048) | _WINDOW | _TYPES, _all_but_every(4)),
    "opt": Family(_sizes(768, 12, 12, _NOT_READ, 2048, head_dim=_NOT_READ)),
    **_parts("pegasus", width=1024, layers=12, heads=16),
    "phi": Family(_sizes(2048, 24, 32, None, 2048)),
    "phi3": Family(_sizes(3072, 32, 32, None, 4096) | _NO_WINDOW, _by(_has_window)),
    **_parts("plbart", width=768, layers=6, heads=12, dropout=0.1),
    "qwen2": Family(
        _sizes(4096, 32, 32, 32, 32768) | _QWEN | _TYPES | {"max_window_layers": 28},
        _by(lambda f, layer: _has_window(f, layer) and layer >= f["max_window_layers"]),
    ),
    "qwen2_moe": Family(
        _sizes(2048, 24, 16, 16, 32768) | _QWEN | _TYPES | {"max_window_layers": 28},
        _by(lambda f, layer: _has_window(f, layer) and (layer + 1) % 2 and layer < f["max_window_layers"]),
    ),
    "qwen3": Family(
        _sizes(4096, 32, 32, 32, 32768, head_dim=128) | _QWEN | _TYPES | {"max_window_layers": 28},
        _by(lambda f, layer: _has_window(f, layer) and layer >= f["max_window_layers"]),
    ),
    "qwen3_moe": Family(_sizes(2048, 24, 32, 4, 32768) | _QWEN, _by(_has_window)),
    "roberta": _BERT_FAMILY,
    "seed_oss": Family(_sizes(4096, 64, 80, 8, 524288, head_dim=128) | {"attention_dropout": 0.1}),
    "smollm3": Family(
        _sizes(2048, 36, 16, 4, 32768) | _NO_WINDOW | {"use_sliding_window": False} | _NO_ROPE | _TYPES,
        _by(lambda f, layer: _has_window(f, layer) and not _rope(f, layer)),
    ),
    "stablelm": Family(_sizes(2560, 32, 32, 32, 4096, head_dim=_NOT_READ)),
    "starcoder2": Family(_sizes(3072, 30, 24, 2, 4096) | _NO_WINDOW, _by(_has_window)),
    **_parts(
        "whisper",
        width=384,
        layers=4,
        heads=6,
        source=("max_source_positions", 1500),
        target=("max_target_positions", 448),
    ),
    "xlm-roberta": _BERT_FAMILY,
}

PARTS = dict.fromkeys(
    (name.removesuffix(" encoder") for name in FAMILIES if name.endswith(" encoder")), ("encoder", "decoder", "cross")
)
"""Encoder-decoders. Their three attentions are read one at a time: FAMILIES has them as `bart encoder` and so on."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types with code of their own in their checkpoints, whose attention and keys are those of a family."""


@dataclass(frozen=True)
class Composite:
    """A multimodal model whose `text_config` is read. text: the family of its text if the text_config has no model_type.
    leaves_out: what the text alone leaves out about attention."""

    text: str
    leaves_out: str | None = None


COMPOSITES: dict[str, Composite] = {
    "gemma3": Composite(
        "gemma3_text", "tokens of one image see each other in both directions there; the masks here are those of text"
    ),
    "kimi_k25": Composite("deepseek_v3"),
    "llama4": Composite("llama4_text"),
    "llava": Composite("llama"),
    "llava_next": Composite("llama"),
    "mistral3": Composite("mistral"),
}
