"""The part of a model's config that OperationMetadata can hold, and a warning about the rest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, ConfigWarning, a_type
from ..models.config_dict import as_dict, is_model_config
from ..models.model_attention import ModelAttention, model_attention
from ..models.model_config import read_model_config
from .kinds import pick
from .unset import UNSET

__all__ = ["arguments_of", "metadata_of"]

# Attributes that identify an object without model_type as a model's config.
_SIGNS = ("num_attention_heads", "num_hidden_layers", "n_head", "n_heads")


def metadata_of(attention: ModelAttention) -> dict[str, Any]:
    """The fields of OperationMetadata, which apply to every layer."""
    fields: dict[str, Any] = {"causal": attention.causal}
    if attention.dtype is not None:
        fields["runtime_dtype"] = attention.dtype
    if attention.softmax_scale is not None:
        fields["softmax_scale"] = attention.softmax_scale
    if attention.dropout_prob:
        fields["dropout_prob"] = attention.dropout_prob
    return fields


def arguments_of(
    config: Any, changes: Mapping[str, Any], own_names: Mapping[str, str], reading: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that OperationMetadata.from_config passes to OperationMetadata.

    A file, a dict with a model_type, and a transformers config object are read by their family. A ConfigWarning lists what
    belongs to the call. `own_names` in them, and any other object, are treated as a base_config. `reading` is passed to
    read_model_config.
    """
    if not _is_read(config, own_names, reading):
        return {"base_config": config, **changes}
    data, name = as_dict(config)
    base = {key: data.pop(key) for key in own_names.values() if key in data}
    attention = model_attention(read_model_config(data, name=name, **reading), changes.get("runtime_dtype"))
    left = _for_the_call(attention)
    if left:
        warnings.warn(
            f"{attention.name}: {'; '.join(left)}: metadata can't hold that. Give it in each call, or use "
            "ModelDeclaration.from_config, which declares every layer.",
            ConfigWarning,
            stacklevel=3,
        )
    fields = metadata_of(attention)
    if base.get("attn_dtype") is not None:
        fields.pop("runtime_dtype", None)
    return ({"base_config": base} if base else {}) | fields | dict(changes)


def _is_read(config: Any, own_names: Mapping[str, str], reading: Mapping[str, Any]) -> bool:
    if isinstance(config, str | os.PathLike):
        return True
    plain = isinstance(config, Mapping) or type(config).__module__.split(".")[0] == "transformers"
    framework = not plain and any(pick(config, name) not in (UNSET, None) for name in own_names.values())
    if not framework and (is_model_config(config) or _looks_like_one(config) or reading["family"] is not None):
        return True
    arguments = [name for name, value in reading.items() if value]
    if arguments:
        raise ConfigError(
            f"from_config: {', '.join(arguments)} for {a_type(config)}, which isn't a model's config; "
            "only attributes of base_config are read from it."
        )
    return False


def _looks_like_one(config: Any) -> bool:
    return any(pick(config, name) is not UNSET for name in _SIGNS)


def _for_the_call(attention: ModelAttention) -> list[str]:
    left = []
    kinds: dict[str, int] = {}
    for layer in attention.layers:
        if layer.kind != "global":
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    left += [f"{count} of {len(attention.layers)} layers are {kind}" for kind, count in kinds.items()]
    if attention.logits_soft_cap is not None:
        left.append(f"logits_soft_cap={attention.logits_soft_cap:g}")
    if attention.sinks or any(layer.heads is not None and layer.heads.sinks for layer in attention.layers):
        left.append("softmax_aux, the sinks")
    for score in dict.fromkeys(layer.score for layer in attention.layers if layer.score is not None):
        left.append(f"score={score}")
    if any(layer.softmax_scale is not None for layer in attention.layers):
        left.append("softmax_scale differs from layer to layer")
    if attention.return_weights:
        left.append("return_weights=True")
    return left
