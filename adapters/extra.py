"""extra: the error of an adapter's import if its framework isn't installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..distribution import with_extras

__all__ = ["extra"]


@contextlib.contextmanager
def extra(framework: str) -> Iterator[None]:
    """Import a framework inside this context. Errors: ModuleNotFoundError that names the extra if the framework is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ModuleNotFoundError(
            f"this adapter requires {framework}, which isn't installed; pip install '{with_extras(framework)}'.",
            name=framework,
        ) from error
