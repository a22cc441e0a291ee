"""Families of text whose logits have a bias by distance: ALiBi or T5's buckets. models/layer_scores.py has the formulas.

Source: the families' configuration and modelling files in transformers 5.24, checked by tests/models/test_scores_of_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, shown
from ..planning.notes import Note, note
from .family import GLOBAL, LOCAL, NOT_READ, Family, Fields, sizes

__all__ = ["SCORED_FAMILIES"]

_T5_NAMES = {
    "d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers", "d_kv": "head_dim",
    "dropout_rate": "attention_dropout", "n_positions": "max_position_embeddings",
}  # fmt: skip
_BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


def _decoder_depth(data: Fields, name: str, notes: list[Note]) -> Fields:
    """T5's decoder is as deep as its encoder unless num_decoder_layers says otherwise."""
    depth = data.get("num_decoder_layers")
    return data if depth is None else {**data, "num_layers": depth}


def _local(f: Fields) -> list[str]:
    return [LOCAL] * f["num_hidden_layers"]


def _global(f: Fields) -> list[str]:
    return [GLOBAL] * f["num_hidden_layers"]


def _t5(name: str, *, layers: int, heads: int, local: bool = False) -> dict[str, Family]:
    """The three attentions of a T5. local: the encoder's are in windows."""
    families = {}
    for part in ("encoder", "decoder", "cross"):
        defaults: dict[str, Any] = {
            "hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": 64,
            "max_position_embeddings": 512, "attention_dropout": 0.1, "is_encoder_decoder": True,
        }  # fmt: skip
        windows = local and part == "encoder"
        defaults |= {} if part == "cross" else _BUCKETS
        defaults |= {"local_radius": 127, "encoder_attention_type": "local"} if windows else {}
        skips = ["num_decoder_layers", "is_decoder", *(_BUCKETS if part == "cross" else ())]
        skips += [] if windows else ["local_radius", "global_block_size", "encoder_attention_type"]
        families[f"{name} {part}"] = Family(
            defaults, names=_T5_NAMES, skips=tuple(skips), causal=part == "decoder", cross=part == "cross", scale=1.0,
            prepare=None if part == "encoder" else _decoder_depth, kinds=_local if windows else _global,
        )  # fmt: skip
    return families


def _pix2struct(part: str) -> Family:
    defaults: dict[str, Any] = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "head_dim": 64,
        "max_position_embeddings": 512, "attention_dropout": 0.1,
    }  # fmt: skip
    skips = ("is_decoder", "add_cross_attention", *(_BUCKETS if part == "cross" else ()))
    defaults |= {} if part == "cross" else _BUCKETS
    return Family(defaults, names=_T5_NAMES, skips=skips, causal=part == "decoder", cross=part == "cross", scale=1.0)


_PIX2STRUCT_VISION = Family(
    sizes(768, 12, 12, NOT_READ, 4096, head_dim=64, is_causal=NOT_READ),
    names={"d_kv": "head_dim", "seq_len": "max_position_embeddings"},
    skips=(*_BUCKETS, "dropout_rate"),
    causal=False,
    scale=1.0,
)
_MPT_NAMES = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings", "attn_pdrop": "attention_dropout",
}  # fmt: skip
_MPT_REFUSED = {
    "prefix_lm": "tokens of a prefix that see each other",
    "attn_uses_sequence_id": "packed sequences, which a config doesn't declare",
    "qk_ln": "norms of the query and the key, which transformers leaves out",
}


def _of_attn_config(data: Fields, name: str, notes: list[Note]) -> Fields:
    """MPT's keys about attention are in an object of their own."""
    nested = data.get("attn_config") or {}
    if not isinstance(nested, Mapping) and callable(getattr(nested, "to_dict", None)):
        nested = nested.to_dict()
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{name}: attn_config={shown(nested)}; wanted an object.")
    for key, why in _MPT_REFUSED.items():
        if nested.get(key):
            raise ConfigError(f"{name}: attn_config.{key}={shown(nested[key])}: {why}; wanted false.")
    if nested.get("alibi") is False:
        raise ConfigError(
            f"{name}: attn_config.alibi=False, but transformers' MPT adds ALiBi whatever it says; wanted true."
        )
    if nested.get("attn_type") not in (None, "multihead_attention"):
        raise ConfigError(
            f"{name}: attn_config.attn_type={shown(nested['attn_type'])}; wanted 'multihead_attention', the only one that "
            "transformers has."
        )
    if nested.get("alibi_bias_max", 8) != 8:
        notes.append(
            note(
                "model.noted", key="attn_config.alibi_bias_max", value=shown(nested["alibi_bias_max"]),
                remark="the slopes here follow it, as MPT's own code does; transformers' model computes with 8",
            )
        )  # fmt: skip
    own = {key: nested[key] for key in ("attn_pdrop", "softmax_scale", "alibi_bias_max", "clip_qkv") if key in nested}
    return {key: value for key, value in data.items() if key != "attn_config"} | own


def _falcon(data: Fields, name: str, notes: list[Note]) -> Fields:
    """Falcon's number of key heads follows from three keys, and its dropout is part of ALiBi's code."""
    heads = data.get("num_attention_heads", 71)
    kv_heads = data.get("num_kv_heads")
    if not data.get("new_decoder_architecture") and data.get("multi_query") is not False:
        kv_heads = 1
    elif kv_heads is None:
        kv_heads = heads
    dropped: tuple[str, ...] = ("num_kv_heads", "multi_query", "new_decoder_architecture")
    dropout = data.get("attention_dropout")
    if not data.get("alibi") and dropout:
        remark = "transformers' falcon drops no weights without alibi"
        notes.append(note("model.noted", key="attention_dropout", value=shown(dropout), remark=remark))
        dropped = (*dropped, "attention_dropout")
    return {key: value for key, value in data.items() if key not in dropped} | {"num_key_value_heads": kv_heads}


SCORED_FAMILIES: dict[str, Family] = {
    "bloom": Family(
        sizes(64, 2, 8, NOT_READ, 2048, head_dim=NOT_READ, is_causal=NOT_READ),
        names={
            "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
        },
    ),
    "falcon": Family(
        sizes(4544, 32, 71, 1, 2048, head_dim=NOT_READ, is_causal=NOT_READ) | {"alibi": False},
        names={"n_embed": "hidden_size"},
        prepare=_falcon,
    ),
    **_t5("longt5", layers=6, heads=8, local=True),
    "mpt": Family(
        sizes(2048, 24, 16, NOT_READ, 2048, head_dim=NOT_READ, is_causal=NOT_READ)
        | {"softmax_scale": None, "alibi_bias_max": 8},
        names=_MPT_NAMES,
        prepare=_of_attn_config,
    ),
    **_t5("mt5", layers=8, heads=6),
    "pix2struct_text_model decoder": _pix2struct("decoder"),
    "pix2struct_text_model cross": _pix2struct("cross"),
    "pix2struct_vision_model": _PIX2STRUCT_VISION,
    **_t5("t5", layers=6, heads=8),
    **_t5("umt5", layers=8, heads=6),
}  # fmt: skip
