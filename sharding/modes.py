"""The four run-time modes and the three tensor layouts, and the names that callers can use for them."""

from __future__ import annotations

from typing import Literal

from ..errors import InputError, nearest, shown

__all__ = ["GENERATION", "LAYOUTS", "MODES", "Layout", "canonical_layout", "canonical_mode"]

Layout = Literal["bthd", "bhtd", "thd"]

# eformer's names of the modes.
MODES: tuple[str, ...] = ("__train__", "__prefill__", "__autoregressive__", "__insert__")
GENERATION: frozenset[str] = frozenset({"__autoregressive__", "__insert__"})
LAYOUTS: tuple[Layout, ...] = ("bthd", "bhtd", "thd")

_BY_NAME = {name: mode for mode in MODES for name in (mode, mode.strip("_"))} | {"decode": "__autoregressive__"}


def canonical_mode(mode: str) -> str:
    """Return the dunder name of a mode (`train` -> `__train__`).

    Errors: InputError for anything else; eformer would silently resolve an unknown mode as train.
    """
    if isinstance(mode, str) and mode in _BY_NAME:
        return _BY_NAME[mode]
    raise InputError(
        f"mode={shown(mode)} is not a mode; wanted one of {', '.join(sorted(_BY_NAME))}." + nearest(mode, _BY_NAME)
    )


def canonical_layout(layout: str) -> Layout:
    """Return the layout if it is one of bthd, bhtd, thd. Errors: InputError otherwise."""
    for known in LAYOUTS if isinstance(layout, str) else ():
        if layout == known:
            return known
    raise InputError(
        f"layout={shown(layout)} is not a layout; wanted one of {', '.join(LAYOUTS)}." + nearest(layout, LAYOUTS)
    )
