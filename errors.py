"""The one exception family of attnops.

Every message says what came, what is wanted, and a hint. Each class is also the builtin that a Python user
would expect, so `except ValueError` keeps working. Source: docs/design.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AttnOpsError",
    "CapacityError",
    "ConfigError",
    "ConfigWarning",
    "FallbackWarning",
    "InputError",
    "InputTypeError",
    "MaskError",
    "ProcessError",
    "RefusedError",
    "ShardingError",
    "UnfitError",
    "UnknownNameError",
    "a_type",
    "first_line",
    "nearest",
    "shown",
]

_LONGEST_NAME = 200  # to compare with longer ones takes seconds
_LONGEST = 80
_DIGITS = 60  # beyond them an int is told by its length: Python itself refuses to write very long ones
_ITEMS = 8


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


class UnfitError(ShardingError):
    """Specs that don't fit, where the declaration makes that a refusal (strict, kv_heads='error')."""


class ProcessError(AttnOpsError, RuntimeError):
    """Processes of one job that disagree on what they declare; `processes` has the ids of those that differ from the most."""

    def __init__(self, message: str, processes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


class CapacityError(AttnOpsError, RuntimeError):
    """More pages than a pool has left: `wanted` and `available` say how many; nothing was changed."""

    def __init__(self, message: str, wanted: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.available = available


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


def shown(value: Any, longest: int = _LONGEST) -> str:
    """`repr` of what somebody gave, in one line of about `longest` characters, whatever it is."""
    text = _repr(value, longest, 0)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def a_type(value: Any) -> str:
    """The type of a value with its article: 'an int', 'a list'; None is 'None'."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"  # u is left out: a uint8


def first_line(error: BaseException, longest: int = 200) -> str:
    """The first line of another library's message, for one of ours."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".:") if lines else type(error).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _repr(value: Any, longest: int, depth: int) -> str:
    """No more of it than can be shown: a value may be millions of characters long, or nested without end."""
    kind = type(value)
    if kind in (str, bytes):
        return repr(value if len(value) <= longest else value[:longest])
    if kind is int and value.bit_length() > 4 * _DIGITS:
        return f"{'-' if value < 0 else ''}(an int of about {int(value.bit_length() * 0.30103) + 1} digits)"
    if kind in (list, tuple, dict, set, frozenset) and value:
        return _collection(value, longest, depth)
    if hasattr(value, "shape") and hasattr(value, "dtype") and getattr(value, "shape", ()) != ():
        return f"{kind.__name__}(shape={value.shape}, dtype={value.dtype})"
    try:
        return " ".join(repr(value).split())
    except Exception:  # somebody else's __repr__ is no reason to lose the message
        return f"<{kind.__name__}>"


def _collection(value: Any, longest: int, depth: int) -> str:
    first, last = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    if depth > 3:
        return f"{first}...{last}"
    parts: list[str] = []
    for item in value.items() if isinstance(value, dict) else value:
        if len(parts) == _ITEMS:
            parts.append("...")
            break
        texts = [_repr(part, longest, depth + 1) for part in (item if isinstance(value, dict) else (item,))]
        parts.append(": ".join(texts))
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    text = f"{first}{', '.join(parts)}{comma}{last}"
    return f"frozenset({text})" if isinstance(value, frozenset) else text
