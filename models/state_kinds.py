"""What the tables of families whose layers have a state are written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..planning.notes import Note
from .family import GLOBAL, LINEAR, Fields

__all__ = ["ACT", "NAMED", "TYPES", "global_where", "plain_kinds"]

_OLDER = {"mamba": LINEAR, "attention": GLOBAL}  # kinds as older configs have them
TYPES: dict[str, Any] = {"layer_types": None}
NAMED = {"layers_block_type": "layer_types"}
ACT: dict[str, Any] = {"hidden_act": "silu"}


def global_where(test: Callable[[Fields, int], Any], other: str = LINEAR) -> Callable[[Fields], list[str]]:
    """Global layers where test(fields, layer number) holds, and layers with a state elsewhere."""
    return lambda f: [GLOBAL if test(f, layer) else other for layer in range(f["num_hidden_layers"])]


def plain_kinds(data: Fields, name: str, notes: list[Note]) -> dict[str, Any]:
    """The kinds of layers by today's names."""
    data = dict(data)
    if data.get("layers_block_type") is not None and data.get("layer_types") is None:
        data["layer_types"] = data.pop("layers_block_type")
    for key in ("layer_types", "layers_block_type"):
        if isinstance(data.get(key), list | tuple):
            data[key] = [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in data[key]]
    return data
