"""known_sizes: what a step over pages takes has sizes that are numbers, not symbolic dimensions of jax.export."""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from ...symbolic import is_symbolic

__all__ = ["known_sizes"]


def known_sizes(**arrays: Any) -> None:
    """Refuse symbolic sizes, by the array's name. Errors: InputError."""
    for name, array in arrays.items():
        shape = getattr(array, "shape", ())
        if any(map(is_symbolic, shape)):
            raise InputError(
                f"{name} has shape {tuple(shape)}; wanted numbers: a step over pages is planned for them. Export one step for "
                "each number of tokens, and pad to the nearest."
            )
