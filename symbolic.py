"""Sizes that jax.export knows only by name: what holds for all their values, and how JSON and text show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import export

from .compat import InconclusiveSize

__all__ = ["is_symbolic", "size_value", "surely"]


def is_symbolic(size: Any) -> bool:
    """Whether a size is an expression of jax.export's symbolic dimensions, such as `2*b`."""
    return export.is_symbolic_dim(size)


def surely(comparison: Callable[[], bool]) -> bool:
    """Whether a comparison of sizes holds for every value that they may have, by the constraints that they were made with."""
    try:
        return bool(comparison())
    except InconclusiveSize:
        return False


def size_value(size: Any) -> int | str:
    """A size as a JSON value: a number, or the expression as text."""
    return str(size) if is_symbolic(size) else size
