"""Write where the source is, and where the notebook opens, into the home and the start page, from packaging/address.toml.

`python tools/source_links.py --write` after a change of that file, then `tools/notebook.py --write`. A test compares; until the
project has a public address, the links have the placeholder of that file, with which `make release-check ARGS=--publish` fails.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path

from written_page import WrittenPage

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "example.invalid"


def address() -> dict[str, str]:
    """packaging/address.toml."""
    return tomllib.loads((ROOT / "packaging" / "address.toml").read_text("utf-8"))


def colab(where: Mapping[str, str]) -> str:
    """Where the notebook opens: Colab reads it from GitHub."""
    repository = where["repository"].removeprefix("https://").removeprefix("github.com/")
    return f"https://colab.research.google.com/github/{repository}/blob/{where['branch']}/docs/notebooks/tour.ipynb"


def source(where: Mapping[str, str]) -> str:
    """The line of the home page."""
    repository = where["repository"]
    later = " (a placeholder, until the project has a public address)" if PLACEHOLDER in repository else ""
    link = f"[{repository.removeprefix('https://')}]({repository})"
    return f"Source: {link}{later}. In a clone, `make run` runs the main example and `make test` the tests."


def notebook(where: Mapping[str, str]) -> str:
    """The line of the start page."""
    later = " (from where the source will be)" if PLACEHOLDER in where["repository"] else ""
    return f"The same as a notebook: [tour.ipynb](notebooks/tour.ipynb), or [in Colab]({colab(where)}){later}."


def badge(where: Mapping[str, str]) -> str:
    """Colab's badge, of the notebook's first cell."""
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab(where)})"


PAGES = (
    WrittenPage("index.md", "source_links", lambda: source(address())),
    WrittenPage("start.md", "source_links", lambda: notebook(address())),
)


def main() -> None:
    """Print the lines, or write them into their pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put them into docs/index.md and docs/start.md")
    write = parser.parse_args().write
    for page in PAGES:
        if write:
            page.path.write_text(page.updated(), encoding="utf-8")
        else:
            print(page.tables())


if __name__ == "__main__":
    main()
