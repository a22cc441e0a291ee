"""The exceptions of attnops.

Every message says what was given, what is expected, and how to fix it. Each class is also a subclass of the builtin exception
that a Python user would expect, so `except ValueError` works. Source: docs/design.md.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypeGuard

__all__ = [
    "AttnOpsError",
    "CapacityError",
    "ConfigError",
    "ConfigWarning",
    "FallbackWarning",
    "InputError",
    "InputTypeError",
    "MaskError",
    "MaskWarning",
    "ProcessError",
    "RefusedError",
    "RefusedShardingError",
    "ScoreError",
    "ShardingError",
    "ShardingWarning",
    "UnknownNameError",
    "a_type",
    "first_line",
    "is_whole",
    "nearest",
    "shown",
    "warn_caller",
]

_LONGEST_NAME = 200  # comparing longer names takes seconds
_LONGEST = 80
_CLOSE = 0.8  # of two names of 10 letters, 8 in the same order
_DIGITS = 60  # a longer int is shown by its length: Python refuses to print very long ones
_ITEMS = 8


class AttnOpsError(Exception):
    """Base class of all exceptions that attnops raises."""


class ConfigError(AttnOpsError, ValueError):
    """An invalid declaration (metadata, operation config, JSON file)."""


class InputError(AttnOpsError, ValueError):
    """An argument of a call has a wrong shape or value."""


class InputTypeError(AttnOpsError, TypeError):
    """An argument of a call has a wrong type or dtype."""


class MaskError(AttnOpsError, ValueError):
    """A mask can't be built, bound or serialised."""


class ScoreError(AttnOpsError, ValueError):
    """A score can't be built, used or serialised."""


class ShardingError(AttnOpsError, ValueError):
    """A PartitionSpec doesn't fit its tensor or its mesh, and the declaration makes that an error."""


class RefusedShardingError(ShardingError):
    """Specs don't fit, and the declaration makes that a refusal (strict, kv_heads='error')."""


class ProcessError(AttnOpsError, RuntimeError):
    """The processes of a job declare different things. `processes` has the ids of those that differ from the majority."""

    def __init__(self, message: str, processes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


class CapacityError(AttnOpsError, RuntimeError):
    """A pool has too few free pages or slots: `wanted` and `available` say how many. Nothing was changed."""

    def __init__(self, message: str, wanted: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.available = available


class RefusedError(AttnOpsError, NotImplementedError):
    """No permitted implementation can express the request; the message has every reason."""


class UnknownNameError(AttnOpsError, LookupError):
    """Nothing is registered under this name."""


class ConfigWarning(UserWarning):
    """A model's config says something that the requested declaration can't hold."""


class FallbackWarning(UserWarning):
    """A platform's own implementation refuses the call, so forward_native runs instead."""


class MaskWarning(UserWarning):
    """An array mask shows queries later keys, which `causal`, a default that nobody declared, hides."""


class ShardingWarning(UserWarning):
    """Devices of the mesh repeat each other's work: a length doesn't divide, or nothing is declared split over an axis."""


def nearest(name: Any, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` with the closest known name, or an empty string. Any value of `name` is allowed."""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return ""
    listed = list(known)
    close = difflib.get_close_matches(name, listed, n=1, cutoff=_CLOSE)
    # strict_sharding: strict. A beginning of four letters says more than letters that are merely alike.
    close = close or [other for other in listed if len(other) > 3 and name.startswith(f"{other}_")]
    close = close or difflib.get_close_matches(name, listed, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def shown(value: Any, longest: int = _LONGEST) -> str:
    """Return the `repr` of a user's value on one line of about `longest` characters. Any value is allowed."""
    text = _repr(value, longest, 0)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def a_type(value: Any) -> str:
    """Return the name of a value's type with its article: 'an int', 'a list'. None gives 'None'."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"  # not u: a uint8


def is_whole(
    value: Any, minimum: float = -math.inf, maximum: float = math.inf, *, numpy: bool = False
) -> TypeGuard[int]:
    """Whether a user's value is an integer of Python (or of NumPy) from `minimum` to `maximum`; no bool or float."""
    kind: Any = Integral if numpy else int
    return isinstance(value, kind) and not isinstance(value, bool) and minimum <= value <= maximum


def first_line(error: BaseException, longest: int = 200) -> str:
    """Return the first line of another library's message, to quote in one of ours."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".:") if lines else type(error).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _repr(value: Any, longest: int, depth: int) -> str:
    """Return only as much as can be shown: a value may be millions of characters long, or nested without end."""
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
    except Exception:  # a broken __repr__ must not hide the message
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


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the first line outside this package that led here, whichever of its functions was called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
