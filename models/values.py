"""Read single values of a model's config: an integer, a positive number, a probability, a flag or a dtype."""

from __future__ import annotations

import math
from typing import Any

from ..errors import is_whole, shown
from .model_config import ModelConfig

__all__ = ["dtype_name", "flag", "number", "positive", "probability", "whole"]

_LIMIT = 2**31 - 1


def dtype_name(value: Any) -> str:
    """The name, such as 'bfloat16', of a string, a NumPy dtype, a jnp scalar type or a torch dtype."""
    text = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
    return str(text).removeprefix("torch.")


def whole(config: ModelConfig, key: str, minimum: int = 1, maximum: int = _LIMIT) -> int:
    """An integer from `minimum` to `maximum`. Errors: ConfigError."""
    value = config.fields[key]
    if not is_whole(value, minimum, maximum):
        upto = "up" if maximum == _LIMIT else f"to {maximum}"
        raise config.error(f"{key}={shown(value)}; wanted a whole number from {minimum} {upto}.")
    return value


def positive(config: ModelConfig, key: str) -> float:
    """A positive number. Errors: ConfigError."""
    return number(config, key, config.fields[key])


def number(config: ModelConfig, key: str, value: Any) -> float:
    """The same for a nested value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise config.error(f"{key}={shown(value)}; wanted a positive number.")
    return float(value)


def probability(config: ModelConfig, key: str) -> float:
    """A probability in [0, 1). Errors: ConfigError."""
    value = config.fields[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise config.error(f"{key}={shown(value)}; wanted a probability in [0, 1).")
    return float(value)


def flag(config: ModelConfig, key: str) -> bool:
    """True or False. Errors: ConfigError."""
    value = config.fields[key]
    if not isinstance(value, bool):
        raise config.error(f"{key}={shown(value)}; wanted true or false.")
    return value
