"""Progress bars for work that takes seconds. They are shown on standard error if it is a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from .console import errors

__all__ = ["Told", "bar"]

Told = Callable[[int, int, str], None]  # (done, of, what is being done)


@contextlib.contextmanager
def bar(title: str, *, quiet: bool = False) -> Iterator[Told]:
    """Show a progress bar and yield a function that updates it. Until the first update it only shows activity; at the end it
    disappears."""
    console = errors()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False, table_column=Column(no_wrap=True)),
    )
    disable = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(title, total=None, count="", what="")
        yield lambda done, of, what: progress.update(task, completed=done, total=of, count=f"{done} of {of}", what=what)
