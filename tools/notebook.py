"""Make docs/notebooks/tour.ipynb of docs/start.md: text, code, and what the code prints.

`python tools/notebook.py --write` writes it. Tests check that it is that of the page, and run its cells.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from source_links import address, badge

DOCS = Path(__file__).resolve().parent.parent / "docs"
SOURCE, PAGE = DOCS / "start.md", DOCS / "notebooks" / "tour.ipynb"
_BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_ELSEWHERE = re.compile(r"<!-- begin: .*?<!-- end: [^>]*>\n\n", re.DOTALL)  # that there is a notebook
_SETUP = """%pip install --quiet 'attnops[tpu]'  # libtpu, for the last cell
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # eight virtual devices on a CPU; before jax is imported
"""


def main() -> None:
    """Print the notebook, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/notebooks/tour.ipynb")
    if not parser.parse_args().write:
        print(notebook())
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(notebook(), encoding="utf-8")


def notebook() -> str:
    """The notebook as JSON."""
    cells: list[dict[str, Any]] = []
    page, end = _ELSEWHERE.sub("", SOURCE.read_text(encoding="utf-8")), 0
    for block in _BLOCK.finditer(page):
        text = re.sub(r"<!--.*?-->", "", page[end : block.start()]).strip()
        text = text if cells else f"{badge(address())}\n\n{text}"
        end = block.end()
        if text:
            cells.append(_markdown(text))
        kind, body = block[1], block[2]
        if kind == "python":
            cells.append(_code(body))
        elif body == "pip install attnops\n":
            cells.append(_code(_SETUP))
        elif kind == "sh":
            cells.append(_code("".join(f"!{line}\n" for line in body.splitlines())))
        elif cells[-1]["cell_type"] == "code":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": _lines(body)}]
        else:
            cells.append(_markdown(f"```text\n{body}```"))
    if rest := page[end:].strip():
        cells.append(_markdown(rest))
    numbered = [cell | {"id": f"cell-{number}"} for number, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    data = {"cells": numbered, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(data, indent=1) + "\n"


def _markdown(text: str) -> dict[str, Any]:
    """A cell of text. Links to other pages of the manual lead nowhere in a notebook, and become plain text."""
    plain = re.sub(r"\[([^\]]+)\]\((?![a-z]+:)[^)]+\)", r"\1", text)
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(plain)}


def _code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": _lines(text.rstrip("\n")),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main()
