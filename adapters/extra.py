"""extra: what an adapter's import says where its framework isn't installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["extra"]


@contextlib.contextmanager
def extra(framework: str) -> Iterator[None]:
    """Import a framework within. Errors: ModuleNotFoundError that names the extra, if it is the framework that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ModuleNotFoundError(
            f"this adapter needs {framework}, which isn't installed; pip install 'attnops[{framework}]'.",
            name=framework,
        ) from error
