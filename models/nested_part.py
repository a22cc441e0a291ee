"""The config of one part of a model that has several: its text, its images or its sound."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, nearest, shown
from ..planning.notes import Note, note
from .config_dict import as_dict
from .families import COMPOSITES, NESTED_PARTS, Composite
from .keys import is_quiet, kind_of_key
from .plain_families import PLAIN

__all__ = ["nested_part"]


def nested_part(
    data: dict[str, Any], name: str, family: str | None, part: str, notes: list[Note], assume: str | None
) -> dict[str, Any]:
    """The config of one part of a composite. Errors: ConfigError."""
    key = f"{part}_config"
    kind, nested = data.get("model_type"), data.get(key)
    whole = COMPOSITES.get(kind) if isinstance(kind, str) else None
    if whole is None and (assume is None or not isinstance(kind, str)):
        why = PLAIN["unread"].get(kind) if isinstance(kind, str) else None
        raise ConfigError(
            f"{name}: model_type {shown(kind)} has a text_config, but attnops doesn't know what else its layers see"
            f"{f' ({why})' if why else ''}. If its masks are those of text only, give the text_config itself."
            + nearest(kind, COMPOSITES)
        )
    if whole is None:
        notes.append(note("model.assumed_masks", kind=kind, key=key))
        whole = Composite({"text": str(assume)})
    if part not in whole.parts and whole.text is None and family is None:
        raise ConfigError(
            f"{name}: attnops reads no {part} of a {kind} model; give part={' or '.join(map(repr, whole.parts))}."
        )
    if nested is None:
        has = [one for one in NESTED_PARTS if data.get(f"{one}_config") is not None]
        raise ConfigError(f"{name}: part={part!r}, but there is no {key}; wanted one of {', '.join(has)}.")
    if isinstance(nested, str | os.PathLike | list | tuple | int | float):
        raise ConfigError(f"{name}: {key}={shown(nested)}; wanted an object.")
    if not isinstance(nested, Mapping):
        nested, _ = as_dict(nested)
    notes.append(note("model.nested_config", key=key, kind=kind))
    beside = [key for key, value in data.items() if not _of_the_whole(key) and not is_quiet(key, value)]
    if beside:
        notes.append(note("model.outside_nested_config", config=key, keys=sorted(beside)))
    nested = dict(nested)
    if "dtype" not in nested and "torch_dtype" not in nested:
        nested |= {key: data[key] for key in ("dtype", "torch_dtype") if key in data}
    if nested.get("model_type") in (None, "") and family is None:
        hint = f", such as family={whole.parts[part]!r}" if part in whole.parts else ""
        raise ConfigError(f"{name}: {key} has no model_type; add it, or give its family{hint}.")
    return nested


def _of_the_whole(key: str) -> bool:
    """Whether a key outside the nested config is read, is another part, or is known not to concern attention."""
    return key in ("model_type", "dtype", "torch_dtype") or key.endswith("_config") or kind_of_key(key) == "other"
