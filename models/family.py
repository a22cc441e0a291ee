"""Family: how the configs of one model type are read; and what the tables of families are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..planning.notes import Note

__all__ = [
    "CHUNKED", "CONV", "GLOBAL", "HYBRID", "INDEXED", "LINEAR", "LOCAL", "MLP", "MOE", "NOT_READ", "Family", "Fields", "Prepare",
    "Spans",
    "parts", "sizes",
]  # fmt: skip

GLOBAL, LOCAL, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"  # an indexer picks the keys of each query
LINEAR, CONV = "linear_attention", "conv"  # an operation with a state; a convolution alone
HYBRID = "hybrid"  # attention, and an operation with a state
MLP, MOE = "mlp", "moe"  # neither
Fields = Mapping[str, Any]
Spans = Literal["all", "in_window"]
Prepare = Callable[[Fields, str, list[Note]], Fields]


@dataclass(frozen=True)
class Family:
    """How to read one `model_type`.

    defaults: every key that the family reads, with its value if the config doesn't have the key. kinds: the kind of each layer
    if the config has no `layer_types`. names: the family's own names for keys. skips: keys of other parts of the model.
    causal: whether tokens see only earlier ones. sinks: whether each query head has a learned logit. cross: whether the keys
    are an encoder's. scale: the factor of q.k if it is one number for all configs. prepare: the config's keys with those of
    nested objects, and with what depends on several keys, from (keys, the config's name, notes to add to). recurrence: the
    operation of layers with a state. own_kinds: the kinds in layer_types besides those of attention. extra_tokens: how many
    tokens an image has beside its patches, if its layers attend to all of them and have no bias.
    """

    defaults: Mapping[str, Any]
    kinds: Callable[[Fields], list[str]] = field(default=lambda f: [GLOBAL] * f["num_hidden_layers"])
    names: Mapping[str, str] = field(default_factory=dict)
    skips: tuple[str, ...] = ()
    causal: bool = True
    sinks: bool = False
    cross: bool = False
    scale: float | None = None
    prepare: Prepare | None = None
    recurrence: str | None = None
    own_kinds: tuple[str, ...] = ()
    extra_tokens: int | None = None


NOT_READ: Any = object()


def sizes(hidden: int, layers: int, heads: int, kv: int | None, positions: int, **more: Any) -> dict[str, Any]:
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
    return {key: value for key, value in fields.items() if value is not NOT_READ}


def parts(
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
        if part == "cross" and source[0] != target[0]:  # its keys have lengths of their own
            defaults[source[0]] = source[1]
        names = {f"{whose}_layers": "num_hidden_layers", f"{whose}_attention_heads": "num_attention_heads"}
        unread = (source[0],) if part == "decoder" and source[0] != target[0] else ()
        names |= {"d_model": "hidden_size", positions: "max_position_embeddings"}
        families[f"{name} {part}"] = Family(
            defaults,
            names=names,
            skips=() if part == "encoder" else ("num_hidden_layers", "num_attention_heads", *unread),
            causal=part == "decoder",
            cross=part == "cross",
        )
    return families
