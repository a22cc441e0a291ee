"""Every key that a declaration may have, by its place; read from signatures and fields, not from the code that refuses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from eformer.escale import PartitionAxis

from attnops import KVCache, LayerGroup, OperationMetadata, OperationRegistry
from attnops.registry.declaration import CallDeclaration, Declaration
from attnops.registry.step_declaration import StepDeclaration

__all__ = ["CALL_FIELDS", "METADATA_FIELDS", "unknown_in_declaration", "unknown_in_metadata"]

METADATA_FIELDS = tuple(
    name
    for name, parameter in inspect.signature(OperationMetadata).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name not in ("base_config", "partition_manager")
)
CALL_FIELDS = tuple(CallDeclaration.model_fields)
_OVER_PAGES = {"cache": tuple(KVCache.model_fields), "step": tuple(StepDeclaration.model_fields)}
_TOP = tuple("$schema" if name == "schema_uri" else name for name in Declaration.model_fields)
_AXIS = tuple(field.name for field in dataclasses.fields(PartitionAxis))
_MESH = ("axis_names", "axis_sizes", "axis_types", "platform", "device_kind", "num_cores", "abstract")
_MASK = {
    "full": (), "causal": ("offset",), "sliding_window": ("left", "right", "offset"), "chunked": ("size", "offset"),
    "prefix": ("length",), "mask_function": ("name", "offset"), "and": ("masks",), "or": ("masks",), "not": ("mask",),
    "blocks": ("layout", "block_q", "block_kv"),
}  # fmt: skip


def unknown_in_declaration(data: dict[str, Any]) -> list[str]:
    """The places of keys that mean nothing."""
    found = [*_beyond("", data, _TOP)]
    call = data.get("call", {})
    found += _beyond("call.", call, CALL_FIELDS)
    found += _in_mask("call.mask", call.get("mask"))
    for name, fields in _OVER_PAGES.items():
        part = data.get(name) or {}
        found += _beyond(f"{name}.", part, fields)
        found += _in_mask(f"{name}.mask", part.get("mask"))
    layers = (data.get("cache") or {}).get("layers")
    for number, group in enumerate(layers if isinstance(layers, list) else ()):
        found += _beyond(f"cache.layers[{number}].", group, tuple(LayerGroup.model_fields))
    return found + unknown_in_metadata(data.get("metadata", {}))


def unknown_in_metadata(data: dict[str, Any]) -> list[str]:
    """The same in a dict of metadata."""
    found = [*_beyond("metadata.", data, (*METADATA_FIELDS, "schema_version"))]
    if isinstance(data.get("partition_axis"), dict):
        found += _beyond("metadata.partition_axis.", data["partition_axis"], _AXIS)
    mesh = data.get("mesh")
    if isinstance(mesh, dict) and ("axis_names" in mesh or "axis_sizes" in mesh):
        found += _beyond("metadata.mesh.", mesh, _MESH)
    for name, config in (data.get("operation_configs") or {}).items():
        if isinstance(config, dict):
            found += _beyond(f"{name}.", config, tuple(OperationRegistry.get(name).config.model_fields))
    return found


def _in_mask(at: str, mask: Any) -> Iterator[str]:
    if isinstance(mask, dict):
        yield from _beyond(f"{at}.", mask, ("kind", *_MASK[mask["kind"]]))
        for part in (*mask.get("masks", ()), *([mask["mask"]] if "mask" in mask else ())):
            yield from _in_mask(at, part)


def _beyond(at: str, data: dict[str, Any], known: tuple[str, ...]) -> Iterator[str]:
    return (f"{at}{key}" for key in data if key not in known)
