"""How the command prints: results to stdout, everything else to stderr; lines break between words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

__all__ = ["Columns", "Fields", "Title", "errors", "fields", "table", "text", "title"]

_WIDTH = 80  # of a pipe or a file; a terminal has its own width
_ANY = 10_000
_MIN_WIDTH = 24  # least columns for a value, however long its label
# A number stays with its unit.
_WORD = re.compile(r"\(?~?\d[\d.,]* (?:[KMG]iB|B|s|ms|us|GFLOP)\b\S*\s*|\S+\s*|\s+")


class _Console(Console):
    """A console that doesn't break a word longer than the line, so that it can be copied whole."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False} | options)


class Title:
    """A bold heading, or a text of other styles, on several lines if it is long."""

    def __init__(self, words: str | Text) -> None:
        self.words = Text(words, style="bold") if isinstance(words, str) else words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in _wrapped(self.words, options.max_width):
            yield from _line(Text(), line, console)


class Fields:
    """Labelled lines. A repeated label is printed once."""

    def __init__(self, rows: Sequence[tuple[str, str | Text]]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = 2 + max((len(label) for label, _ in self.rows), default=0)
        last = ""
        for label, value in self.rows:
            lines = _wrapped(value, options.max_width - indent)
            for number, line in enumerate(lines):
                head = label if number == 0 and label != last else ""
                yield from _line(Text(head.ljust(indent), style="bold"), line, console)
            last = label


class Columns:
    """A table with a header. If its rows don't fit the width, each row becomes a paragraph: its first cell, then the others."""

    def __init__(self, *heads: str) -> None:
        self.heads = heads
        self.rows: list[tuple[tuple[Text, ...], str | None]] = []

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row with one cell for each column; missing cells are empty."""
        filled = (*cells, *[""] * (len(self.heads) - len(cells)))
        self.rows.append((tuple(cell if isinstance(cell, Text) else Text(cell) for cell in filled), style))

    def fits(self, width: int) -> bool:
        """Whether every row fits on one line."""
        console = Console(width=_ANY)
        return self._table().__rich_measure__(console, console.options).maximum <= width

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for head in self.heads:
            table.add_column(Text(head), no_wrap=True)
        for cells, style in self.rows:
            table.add_row(*cells, style=style)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.fits(options.max_width):
            for row in console.render_lines(self._table(), options, pad=False):
                yield from _without_end(row)
                yield Segment.line()
            return
        for cells, style in self.rows:
            yield from _line(Text(), cells[0] + Text(), console, style or "bold")
            named = zip(self.heads[1:], cells[1:], strict=True)
            rest = Text("; ").join(Text(head.replace("\n", ".") + " ") + cell for head, cell in named if cell.plain)
            for line in _wrapped(rest, options.max_width - 2):
                yield from _line(Text("  "), line, console, style or "")


def _without_end(line: list[Segment]) -> list[Segment]:
    """The line without spaces at its end."""
    segments = list(line)
    while segments and not segments[-1].text.rstrip():
        segments.pop()
    if segments:
        segments[-1] = segments[-1]._replace(text=segments[-1].text.rstrip())
    return segments


def _wrapped(value: str | Text, width: int) -> list[Text]:
    """Lines of at most this width, broken between words. A longer word gets a line of its own."""
    text = value if isinstance(value, Text) else Text(value)
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        starts, used = [], 0
        for word in _WORD.finditer(line.plain):
            if used and used + cell_len(word[0].rstrip()) > max(width, _MIN_WIDTH):
                starts.append(word.start())
                used = 0
            used += cell_len(word[0])
        lines += line.divide(starts)
    return lines


def _line(head: Text, line: Text, console: Console, style: str = "") -> Iterator[Segment]:
    segments = head + line
    segments.rstrip()
    if style:
        segments.stylize(style)
    yield from segments.render(console)
    yield Segment.line()


def text(width: int = _WIDTH) -> Console:
    """The console for results. `width` applies to a pipe or a file. Created for each use, as sys.stdout may be replaced."""
    return _console(stderr=False, width=width)


def errors() -> Console:
    """The console for errors, warnings and progress."""
    return _console(stderr=True, width=_WIDTH)


def table(*columns: str) -> Columns:
    """A table with a header, whose cells are never broken."""
    return Columns(*columns)


def title(words: str | Text) -> Title:
    """A bold heading, or a text of other styles, broken between words."""
    return Title(words)


def fields(rows: Sequence[tuple[str, str | Text]]) -> Fields:
    """Labelled lines. A repeated label is printed once."""
    return Fields(rows)


def _console(*, stderr: bool, width: int) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    has_width = stream.isatty() or "COLUMNS" in os.environ
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if has_width else width)
