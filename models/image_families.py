"""Families of images whose tokens are the places of a grid, with a bias by the two distances.

Source: the families' configuration and modelling files in transformers 5.24, checked by tests/models/test_scores_of_models.py.
"""

from __future__ import annotations

from typing import Any

from .family import NOT_READ, Family, sizes

__all__ = ["IMAGE_FAMILIES"]

_DROPOUT = {"attention_probs_dropout_prob": "attention_dropout"}
_SWIN: dict[str, Any] = {
    "image_size": 224, "patch_size": 4, "hidden_size": 96, "depths": (2, 2, 6, 2), "num_attention_heads": (3, 6, 12, 24),
    "window_size": 7, "attention_dropout": 0.0,
}  # fmt: skip
_SWIN_NAMES = _DROPOUT | {"embed_dim": "hidden_size", "num_heads": "num_attention_heads"}
_SWIN_SKIPS = ("num_layers", "num_hidden_layers", "hidden_size", "pretrained_window_sizes", "encoder_stride")


def _vit(**more: Any) -> dict[str, Any]:
    plain = sizes(768, 12, 12, NOT_READ, NOT_READ, head_dim=NOT_READ, is_causal=NOT_READ)
    return plain | {"image_size": 224, "patch_size": 16} | more


IMAGE_FAMILIES: dict[str, Family] = {
    "beit": Family(
        _vit(use_relative_position_bias=False, use_shared_relative_position_bias=False), names=_DROPOUT, causal=False
    ),
    "sam_vision_model": Family(
        _vit(image_size=1024, use_rel_pos=True, window_size=14, global_attn_indexes=(2, 5, 8, 11)), causal=False
    ),
    "swin": Family(_SWIN, names=_SWIN_NAMES, skips=_SWIN_SKIPS, causal=False),
    "swinv2": Family(_SWIN, names=_SWIN_NAMES, skips=_SWIN_SKIPS, causal=False, scale=1.0),
    "vitdet": Family(
        {k: v for k, v in _vit().items() if k != "attention_dropout"}
        | {"use_relative_position_embeddings": False, "window_size": 0, "window_block_indices": ()},
        causal=False,
    ),
}
"""Their layers are made by models/image_layers.py."""
