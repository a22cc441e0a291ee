"""Progress of work that takes seconds, on standard error: a bar if it is a terminal, and a line every 30 s in which nothing is
done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from .console import errors

__all__ = ["ReportProgress", "bar"]

ReportProgress = Callable[[int, int, str], None]  # (done, of, what is being done)
EVERY = 30.0  # seconds


@contextlib.contextmanager
def bar(title: str, *, quiet: bool = False) -> Iterator[ReportProgress]:
    """Show a progress bar and yield a function that updates it. Until the first update it only shows activity; at the end it
    disappears. Work without an update for long is told in a line, also where there is no bar."""
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
        with contextlib.nullcontext() if quiet else _slow(console, title) as begins:

            def report(done: int, of: int, what: str) -> None:
                changed = what != progress.tasks[0].fields["what"]  # drawn at once, so that short work is seen too
                progress.update(task, completed=done, total=of, count=f"{done} of {of}", what=what, refresh=changed)
                if begins is not None:
                    begins(what)

            yield report


@contextlib.contextmanager
def _slow(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Print a line every EVERY seconds in which what is being done stays the same; yields a function that is told what is."""
    ended = threading.Event()
    now = [("", time.monotonic())]

    def begins(what: str) -> None:
        now[0] = what, time.monotonic()

    def watch() -> None:
        lines = 0
        doing = now[0]
        while not ended.wait(EVERY / 10):
            if now[0] is not doing:
                doing, lines = now[0], 0
            elapsed = time.monotonic() - doing[1]
            if elapsed >= EVERY * (lines + 1):
                lines += 1
                what = f"{title}: {doing[0]}" if doing[0] else title
                console.print(f"attnops: {what}: {EVERY * lines:g} s so far", soft_wrap=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield begins
    finally:
        ended.set()
        thread.join()
