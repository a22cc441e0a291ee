"""`attnops advise`: search for the best declaration for a target, and print a table."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from ..advising import Advice, advise
from ..advising.report import COLUMNS, ESTIMATES, TIES, rows, term_rows
from ..errors import ConfigError
from ..registry.declaration import Declaration
from ..sharding import parse_mesh
from .console import fields, table, text, title
from .file_notes import enabled_notes
from .progress import bar

__all__ = ["AdviseOptions", "print_advice", "run_advise"]

_REFUSED = 8  # refused kinds that are printed


class AdviseOptions(NamedTuple):
    """The options of `attnops advise`."""

    config: Path
    target: str
    batches: tuple[int, ...]
    devices: str | None
    mesh: str | None
    operations: tuple[str, ...]
    mode: str | None
    compiled: int
    rows: int
    write: Path | None


def run_advise(options: AdviseOptions) -> tuple[Advice, tuple[str, ...]]:
    """Return the advice and the command's notes. With `write`, also write the best declaration."""
    declaration = Declaration.load(options.config)
    sizes = {} if options.mesh is None else parse_mesh(options.mesh)
    with bar(options.target) as progress:
        advice = advise(
            declaration,
            options.target,
            batches=options.batches,
            devices=options.devices,
            mesh=sizes,
            operations=options.operations,
            mode=options.mode,
            most_compiled=options.compiled,
            progress=progress,
        )
    notes = list(enabled_notes(declaration))
    if options.write is not None and advice.entries:
        _write(advice.best.declaration, options.write)
        notes.append(f"written: {options.write}")
    return advice, tuple(notes)


def _write(declaration: Declaration, path: Path) -> None:
    try:
        path.write_text(declaration.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; wanted a file to write to.") from None


def print_advice(advice: Advice, options: AdviseOptions, notes: tuple[str, ...]) -> None:
    """Print the table, the terms of the best entry, and why others are refused."""
    console = text()
    if advice.entries:
        best = advice.best
        console.print(title(best.plan.problem.describe()))
        console.print(title(Text(ESTIMATES)), "", sep="\n")
        ranked, losing = table(*COLUMNS[:-1]), list[tuple[str, str | Text]]()
        for row in rows(advice.entries, options.rows):
            ranked.add_row(*row[:-1], style="bold green" if row[-1] == "" else None)
            if row[-1]:
                losing.append(("why not", f"{' '.join(w for w in (row[0], row[2]) if w)}: {row[-1]}"))
        console.print(ranked)
        if (hidden := len(advice.entries) - options.rows) > 0:
            console.print(f"and {hidden} more; --rows shows them, --json has all")
        rows_of_best: list[tuple[str, str | Text]] = [
            *term_rows(best),
            *(("note", note) for note in best.notes),
            *losing,
        ]
        console.print("", fields(rows_of_best), sep="\n")
    refused: list[tuple[str, str | Text]] = [("refused", str(refusal)) for refusal in advice.refused[:_REFUSED]]
    if (hidden := len(advice.refused) - _REFUSED) > 0:
        refused.append(("refused", f"{hidden} more kinds; --json has all"))
    shown = [entry.ranked_seconds for entry in advice.entries[: options.rows]]
    ties = (TIES,) if len({*shown}) < len(shown) else ()
    refused += [("note", note) for note in (*advice.notes, *ties, *notes)]
    if refused:
        console.print("", fields(refused), sep="\n")
