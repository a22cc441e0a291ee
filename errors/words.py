"""Words of messages: values shown short, and the article of a type's name."""

from __future__ import annotations

from typing import Any

__all__ = ["a_type", "first_line", "shown"]

_LONGEST = 80
_DIGITS = 60  # beyond them an int is told by its length: Python itself refuses to write very long ones
_ITEMS = 8


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
