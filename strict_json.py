"""Strict JSON: duplicate keys, NaN, Infinity (unless it is asked for) and halves of surrogate pairs are refused, so that nothing
is lost."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from .errors import ConfigError, shown

__all__ = ["parse_json", "read_text", "refuse_surrogates"]

_LONGEST_NAME = 300
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str, source: str, *, infinity: bool = False) -> Any:
    """Parse JSON text. infinity: whether Infinity may stand there, as in configs of Mamba models. Errors: ConfigError that names
    the source and the position."""
    constant = _infinite if infinity else _no_constant
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        hint = " JSON allows no comma after the last item." if _ends_in_a_comma(text, error.pos) else ""
        raise ConfigError(
            f"{source}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}.{hint}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply for a declaration.") from None
    except ValueError as error:  # from the hooks, and Python's own limit on digits
        raise ConfigError(f"{source}: {error}") from None
    refuse_surrogates(value, source)
    return value


def refuse_surrogates(value: Any, source: str) -> None:
    """Refuse halves of surrogate pairs in keys and strings: JSON can spell them, but UTF-8 can't. Errors: ConfigError."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            rest += item
        elif isinstance(item, str) and _SURROGATE.search(item):
            raise ConfigError(
                f"{source}: {shown(item)} holds half of a surrogate pair, which can't be written as UTF-8; wanted whole "
                "characters."
            )


def read_text(path: Path, description: str) -> str:
    """Read a UTF-8 file. Errors: ConfigError, also for a file that can't be read."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_name(path)}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: an impossible file name, with a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{_name(path)}: {reason}; wanted {description}.") from None


def _ends_in_a_comma(text: str, at: int) -> bool:
    """Whether the error is a comma before a closing bracket. Python points at the bracket, from 3.13 on at the comma."""
    before, after = text[:at].rstrip(), text[at:].lstrip()
    if after.startswith(","):
        before, after = ",", after[1:].lstrip()
    return before.endswith(",") and after.startswith(("}", "]"))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)} appears twice in one object; the first would be lost. Keep one.")
        result[key] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number; wanted a finite number.")


def _infinite(text: str) -> float:
    return math.inf if text == "Infinity" else _no_constant(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large for a float; wanted a finite one.")
    return value


def _name(path: Path) -> str:
    """A path as given, cut off if it is longer than any file name."""
    return text if len(text := str(path)) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."
