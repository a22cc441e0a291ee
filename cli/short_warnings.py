"""Warnings as the command shows them: a fallback in one line, and those that plans and runs print not at all."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from ..errors import FallbackWarning, MaskWarning, ShardingWarning

__all__ = ["short_warnings"]


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """Show warnings so inside."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=FallbackWarning)
        for category in (MaskWarning, ShardingWarning):  # plans and runs print what they say
            warnings.filterwarnings("ignore", category=category)
        warnings.showwarning = _short_warning(warnings.showwarning)
        yield


def _short_warning(otherwise: Any) -> Any:
    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, FallbackWarning):
            print(f"attnops: warning: {str(message).splitlines()[0]}", file=sys.stderr)
        else:
            otherwise(message, category, filename, lineno, file, line)

    return show
