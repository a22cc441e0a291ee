"""Attention by keywords: which belong to the call, to the metadata and to the operation's config."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...call_arguments import CALL_OPTIONS
from ...errors import ConfigError, InputTypeError, a_type, nearest, shown
from ...planning.other_names import other_name
from ...registry import OperationMetadata, OperationRegistry
from ...registry.declaration import Declaration
from ...registry.metadata import METADATA_ARGUMENTS
from ...registry.step_declaration import STEP_OPTIONS
from ..choices.bounded_cache import BoundedCache

__all__ = ["ParsedAttention", "is_operation_name", "parse_attention"]

_CALL = ("mask", "score", *CALL_OPTIONS)
_TAGS = frozenset({"operation", "schema_version"})


class ParsedAttention(NamedTuple):
    """What an Attention is made of: `metadata` is complete; the fields in `stated` were specified."""

    declaration: Declaration
    metadata: OperationMetadata
    stated: frozenset[str]


_LONGEST = 255
_cache: BoundedCache[ParsedAttention] = BoundedCache(256)


def is_operation_name(text: str) -> bool:
    """Whether a string names an operation: an existing one, or a bare word without a matching file."""
    bare = text.isidentifier() and len(text) <= _LONGEST
    return text in OperationRegistry.names() or (bare and not os.path.exists(text))


def parse_attention(declared: Any, keywords: Mapping[str, Any]) -> ParsedAttention:
    """Read a declaration, or an operation's name with its keywords.

    Errors: ConfigError, InputTypeError for unknown keywords; UnknownNameError for an operation that isn't registered.
    """
    if isinstance(declared, str) and is_operation_name(declared):
        return _cached(declared, keywords)
    others = [name for name in keywords if name not in METADATA_ARGUMENTS]
    if others:
        raise InputTypeError(
            f"{', '.join(map(shown, others))}: given with a declaration, which specifies them itself; wanted fields of "
            "OperationMetadata, such as mesh. Put the others into the declaration, or pass an operation's name instead."
            + nearest(others[0], METADATA_ARGUMENTS)
        )
    if isinstance(declared, str | Path):
        declared = Declaration.load(declared)
    elif not isinstance(declared, Declaration):
        declared = Declaration.from_dict(declared)
    declared = declared.checked()
    return ParsedAttention(
        declared, declared.operation_metadata(keywords), frozenset({**declared.metadata, **keywords})
    )


def _cached(name: str, keywords: Mapping[str, Any]) -> ParsedAttention:
    """`_named`, cached for equal keywords: a model may make an Attention in every layer."""
    key = (name, OperationRegistry.get(name), *((key, _types(value), value) for key, value in keywords.items()))
    try:
        declared = None if "base_config" in keywords else _cache.find(key)
    except TypeError:  # not hashable, for example a mesh given as a dict
        return _named(name, keywords)
    if declared is None:
        declared = _named(name, keywords)
        if "base_config" not in keywords:  # its attributes may change
            _cache.put(key, declared)
    return declared


def _types(value: Any) -> Any:
    """1 and True are equal, but only one of them is a flag."""
    return tuple(map(type, value)) if isinstance(value, tuple) else type(value)


def _named(name: str, keywords: Mapping[str, Any]) -> ParsedAttention:
    """The declaration that the keywords make; `metadata` among them is a complete OperationMetadata."""
    operation: Any = OperationRegistry.get(name)
    fields = [field for field in operation.config.model_fields if field not in _TAGS]
    # When a step writes its keys is a field of its operation's config too, where it is a default for all layers.
    of_step = tuple(option for option in STEP_OPTIONS if option not in fields)
    of_call = ("mode", "layout") if operation.family == "recurrence" else _CALL
    request, options = ("call", of_call) if operation.keys_in == "arrays" else ("step", of_step)
    parts: dict[str, dict[str, Any]] = {request: {}, "metadata": {}, "config": {}}
    for key, value in keywords.items():
        if key == "metadata":
            continue
        # What both the call and the metadata have goes to the call: it applies to every call, even with a Mask object.
        groups_of_names = {request: options, "metadata": METADATA_ARGUMENTS, "config": fields}
        part = next((part for part, names in groups_of_names.items() if key in names), None)
        if part is None:
            every = sorted({*options, *METADATA_ARGUMENTS, *fields, "metadata"})
            groups = {
                f"of the {request}": options,
                "of the metadata": METADATA_ARGUMENTS,
                "of the operation's config": fields,
            }
            accepted = "; ".join(f"{whose}: {', '.join(sorted(names))}" for whose, names in groups.items() if names)
            raise InputTypeError(
                f"{shown(key)} is not an argument of Attention({name!r}, ...)."
                + (other_name(key, every, "call") or f" Wanted one {accepted}.")
            )
        parts[part][key] = value
    metadata = _metadata(name, parts["metadata"], parts["config"], keywords.get("metadata"))
    declared = {request: parts[request]} if parts[request] else {}
    declaration = Declaration.from_dict({"operation": name} | declared, f"Attention({name!r}, ...)")
    return ParsedAttention(
        declaration.checked(), metadata, frozenset(parts["metadata"]) | _stated_fields(keywords.get("metadata"))
    )


def _metadata(name: str, fields: dict[str, Any], config: dict[str, Any], whole: Any) -> OperationMetadata:
    if whole is not None:
        if not isinstance(whole, OperationMetadata):
            raise InputTypeError(f"metadata is {a_type(whole)}; wanted an OperationMetadata.")
        if fields:
            raise ConfigError(
                f"{', '.join(fields)}: given with metadata={type(whole).__name__}(...), which has them; set them there."
            )
    metadata = OperationMetadata(**fields) if whole is None else whole
    if not config:
        return metadata
    if name in metadata.operation_configs:
        raise ConfigError(
            f"{', '.join(config)}: given with operation_configs[{name!r}], which is the same config; set them there."
        )
    return metadata.replace(operation_configs={**metadata.operation_configs, name: config})


def _stated_fields(metadata: OperationMetadata | None) -> frozenset[str]:
    """The fields of a whole metadata that differ from their defaults."""
    if metadata is None:
        return frozenset()
    unsaid = OperationMetadata().to_dict()
    return frozenset(name for name, value in metadata.to_dict().items() if value != unsaid[name])
