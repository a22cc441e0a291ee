"""What the benchmarks of compiled cells share: measure the requested ones, keep them as JSON, put their tables into a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["arguments", "run_cells"]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of such a benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="leave out the cells that the file has")
    parser.add_argument("--report", action="store_true", help="measure nothing, and print what the file has")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    return parser


def run_cells(
    options: argparse.Namespace,
    cells: Sequence[str],
    measure: Callable[[str], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    marks: tuple[str, str],
) -> None:
    """Measure the requested cells, one after another, and print the tables. Cells of the file that aren't measured stay in it.
    marks: the lines of the page between which the tables are."""
    found: dict[str, Any] = {"cells": {}}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    if not options.report:
        found |= {"libtpu": version("libtpu"), "jax": version("jax")}
        for name in cells if options.only is None else options.only:
            if options.resume and "error" not in found["cells"].get(name, {"error": ""}):
                continue
            found["cells"][name] = measure(name)
            print(name, json.dumps(found["cells"][name])[:300], file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    text = report(found)
    print(text)
    if options.page:
        begin, end = marks
        before, _, rest = options.page.read_text().partition(begin)
        options.page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")
