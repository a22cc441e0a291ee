"""The one exception family of attnops.

Every message says what was got, what is wanted, and the mend. Each class is also the builtin that a Python user
would expect, so `except ValueError` keeps working. Source: docs/design.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from .words import a_type, first_line, shown

__all__ = [
    "AttnOpsError",
    "ConfigError",
    "ConfigWarning",
    "FallbackWarning",
    "InputError",
    "InputTypeError",
    "MaskError",
    "ProcessError",
    "RefusedError",
    "ShardingError",
    "UnknownNameError",
    "a_type",
    "first_line",
    "nearest",
    "shown",
]

_LONGEST_NAME = 200  # to compare with longer ones takes seconds


class AttnOpsError(Exception):
    """Base of everything that attnops raises on purpose."""


class ConfigError(AttnOpsError, ValueError):
    """A declaration (metadata, operation config, JSON file) that has no meaning."""


class InputError(AttnOpsError, ValueError):
    """An argument of a call with a wrong shape or value."""


class InputTypeError(AttnOpsError, TypeError):
    """An argument of a call with a wrong type or dtype."""


class MaskError(AttnOpsError, ValueError):
    """A mask that can't be built, bound or serialised."""


class ShardingError(AttnOpsError, ValueError):
    """A PartitionSpec that doesn't fit its tensor or its mesh, where that was declared an error."""


class ProcessError(AttnOpsError, RuntimeError):
    """Processes of one job that disagree on what they declare; `processes` has the ids of those that differ from the most."""

    def __init__(self, message: str, processes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


class RefusedError(AttnOpsError, NotImplementedError):
    """No implementation that may be used can express the request; carries every reason."""


class UnknownNameError(AttnOpsError, LookupError):
    """A name that nothing is registered under."""


class ConfigWarning(UserWarning):
    """A model's config says more than what it is asked for can hold."""


class FallbackWarning(UserWarning):
    """A platform's own implementation refused, and forward_native runs instead."""


def nearest(name: Any, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known name, or an empty string; also for what is no name at all."""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
