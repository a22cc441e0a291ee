"""Which defaults of a family a note mentions when the config lacks the key: those that change what is declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import INDEXED

__all__ = ["has_dims", "is_noted"]

_PATTERNS = ("sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval")
_LISTED_BY: dict[str, tuple[str, ...]] = {  # the keys that list the same for each layer
    **dict.fromkeys(_PATTERNS, ("layer_types", "no_rope_layers")),
    **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset"), ("indexer_types", "index_topk_pattern")),
    "global_head_dim": ("per_layer_config",),
    "full_attention_interval": ("layer_types",),
}


# Their defaults declare nothing: no limit, float32, chunks that the result doesn't depend on.
_SILENT = ("time_step_limit", "mamba_ssm_cache_dtype", "mamba_chunk_size", "block_size")


def is_noted(key: str, fields: Mapping[str, Any]) -> bool:
    """Whether a note must mention a default that was used because the config doesn't have the key."""
    if key in ("sliding_window", "max_window_layers") and fields.get("use_sliding_window") is False:
        return False
    if any(fields.get(other) for other in _LISTED_BY.get(key, ())):
        return False
    if key == "hidden_size" and has_dims(fields):
        return False
    if "index_topk_blocks" in fields and key.startswith("index_") and INDEXED not in (fields["layer_types"] or ()):
        return False
    return key not in ("max_position_embeddings", "max_source_positions", *_SILENT) and fields[key] not in (
        None,
        False,
        0,
    )


def has_dims(fields: Mapping[str, Any]) -> bool:
    """Whether the dims of heads are given, so that hidden_size isn't needed for them."""
    return fields.get("head_dim") is not None or "qk_rope_head_dim" in fields
