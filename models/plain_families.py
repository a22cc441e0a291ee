"""PLAIN_FAMILIES: the families whose attention follows from common keys, read from plain_families.json.

Source: tools/plain_families.py makes the file from transformers' own models, and tests/models/test_plain_families.py holds it
against the calls that it caught there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from .family import GLOBAL, LOCAL, Family, Fields

__all__ = ["PLAIN", "PLAIN_FAMILIES", "has_window", "plain_family"]

PLAIN: Mapping[str, Any] = json.loads(files(__package__).joinpath("plain_families.json").read_text(encoding="utf-8"))
"""transformers: the version; families: the rows; unread: why each other type of that version isn't read."""


def has_window(f: Fields) -> bool:
    """Whether layers that may have a window do."""
    return f.get("sliding_window") is not None and f.get("use_sliding_window") is not False


def plain_family(row: Mapping[str, Any]) -> Family:
    """The family of one row: `defaults`, `names`, `skips`, `causal`, `sinks`, as of Family; `layers`: which of them may have a
    window, 'none', 'all', 'late': from max_window_layers on, or [period, first]: every period-th, from `first` on, is
    global, and the last one if -1 follows;
    extra_tokens: an image's tokens beside its patches and those that keys of `defaults` count."""
    return Family(
        row["defaults"],
        _kinds(row["layers"]),
        names=row["names"],
        skips=tuple(row["skips"]),
        causal=row["causal"],
        sinks=row["sinks"],
        extra_tokens=row.get("extra_tokens"),
    )


def _kinds(layers: str | list[int]) -> Callable[[Fields], list[str]]:
    if layers == "none":
        return lambda f: [GLOBAL] * f["num_hidden_layers"]
    if layers == "late":
        return lambda f: [
            LOCAL if has_window(f) and number >= f["max_window_layers"] else GLOBAL
            for number in range(f["num_hidden_layers"])
        ]
    if layers == "all":
        return lambda f: [LOCAL if has_window(f) else GLOBAL] * f["num_hidden_layers"]
    period, first = int(layers[0]), int(layers[1])

    def kinds(f: Fields) -> list[str]:
        count = f["num_hidden_layers"]
        wide = {*range(first, count, period), *([count - 1] if layers[2:] else ())}
        return [LOCAL if has_window(f) and number not in wide else GLOBAL for number in range(count)]

    return kinds


PLAIN_FAMILIES: dict[str, Family] = {name: plain_family(row) for name, row in PLAIN["families"].items()}
