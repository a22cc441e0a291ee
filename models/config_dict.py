"""A model's config as a dict: from a file, a dict or an object with its attributes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, a_type, shown
from ..strict_json import parse_json, read_text
from .keys import ATTENTION

__all__ = ["as_dict", "is_model_config"]


def is_model_config(config: Any) -> bool:
    """Whether this is a file, or a dict or object with a model_type."""
    if isinstance(config, str | os.PathLike):
        return True
    kind = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return isinstance(kind, str) and bool(kind)


def as_dict(config: Any) -> tuple[dict[str, Any], str]:
    """A config's keys, and its name in messages."""
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        with contextlib.suppress(OSError, ValueError):  # an impossible file name: read_text reports it
            path = path / "config.json" if path.is_dir() else path
        data = parse_json(read_text(path, "the config.json of a model"), str(path), infinity=True)
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: got {a_type(data)}; wanted the config.json of a model: an object.")
        return data, str(path)
    if isinstance(config, Mapping):
        odd = [key for key in config if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"model config: has the key {shown(odd[0])}; wanted strings, as in a config.json.")
        return dict(config), "model config"
    name = type(config).__name__
    attributes = config.to_dict() if callable(getattr(config, "to_dict", None)) else getattr(config, "__dict__", None)
    if not isinstance(attributes, Mapping):
        raise ConfigError(f"model config: got {name}; wanted a path, a dict, or an object with a config's attributes.")
    data = {key: value for key, value in attributes.items() if value is not None or key in ATTENTION}
    if "model_type" not in data and isinstance(getattr(config, "model_type", None), str):
        data["model_type"] = config.model_type  # transformers keeps it on the class
    return data, name
