"""WrittenPage: a page of the manual with tables that a tool makes, between two markers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["WrittenPage", "table"]

DOCS = Path(__file__).resolve().parent.parent / "docs"


class WrittenPage:
    """name: the page's file under docs; tool: the tool's name; tables: makes what is between the markers."""

    def __init__(self, name: str, tool: str, tables: Callable[[], str]) -> None:
        self.path, self.tables = DOCS / name, tables
        self.begin, self.end = (f"<!-- {mark}: written by tools/{tool}.py -->" for mark in ("begin", "end"))

    def updated(self) -> str:
        """The page with the tables between its markers."""
        head, _, rest = self.path.read_text(encoding="utf-8").partition(self.begin)
        _, _, tail = rest.partition(self.end)
        return f"{head}{self.begin}\n\n{self.tables()}\n\n{self.end}{tail}"

    def main(self, about: str) -> None:
        """Print the tables, or with --write put them into the page. about: the tool's docstring."""
        parser = argparse.ArgumentParser(description=about.partition("\n")[0])
        parser.add_argument("--write", action="store_true", help=f"put the tables into docs/{self.path.name}")
        if not parser.parse_args().write:
            print(self.tables())
            return
        self.path.write_text(self.updated(), encoding="utf-8")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    titles = tuple(head)
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
