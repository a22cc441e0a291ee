"""How the command writes: results to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["errors", "fields", "seconds_text", "table", "text"]

_WIDTH = 100  # of a pipe or a file; a terminal says its own width


def text(width: int = _WIDTH) -> Console:
    """The console of results; `width` is that of a pipe or a file. Made for each use: sys.stdout may be replaced."""
    return _console(stderr=False, width=width)


def errors() -> Console:
    """The console of errors, warnings and progress."""
    return _console(stderr=True, width=_WIDTH)


def table(*columns: str) -> Table:
    """A table with a thin rule under its head, that folds long cells instead of cutting them."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(Text(column), overflow="fold")
    return made


def fields(rows: list[tuple[str, str | Text]]) -> Table:
    """Labelled lines; a label that repeats is written once."""
    made = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    last = ""
    for label, value in rows:
        made.add_row("" if label == last else label, value if isinstance(value, Text) else Text(value))
        last = label
    return made


def seconds_text(seconds: float) -> str:
    """`36.9 us`."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def _console(*, stderr: bool, width: int) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if known else width)
