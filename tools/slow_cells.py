"""Choose the parametrised cells that only `make test-all` runs, by how long they took: tests/slow_cells.txt.

    python -m pytest -n 2 --durations=0 --durations-min=0.05 > log; python tools/slow_cells.py log

Of the cells of a test that take longer than --longer, one in --keep stays, by name, in each group of cells whose ids begin alike
(`splash.forward_tpu-`): each kernel and each kind keeps some. Tests without parameters stay, and so do pages of the manual.
Ids that no longer exist mark nothing: such a test runs everywhere again.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests" / "slow_cells.txt"
_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+::.*\S)\s*$")
_ALWAYS = ("tests/docs/",)


def seconds_of(log: str) -> Counter[str]:
    """Node id -> seconds of setup, call and teardown."""
    found: Counter[str] = Counter()
    for line in log.splitlines():
        if made := _LINE.match(line):
            found[made[2]] += float(made[1])  # type: ignore[assignment]
    return found


def slow_cells(seconds: Counter[str], longer: float, keep: int) -> list[str]:
    """The ids to leave out."""
    alike: dict[str, list[str]] = {}
    for name in sorted(seconds):
        if "[" in name and not name.startswith(_ALWAYS) and seconds[name] > longer:
            alike.setdefault(name.partition("-")[0], []).append(name)
    groups: dict[str, list[str]] = {}
    for start, names in alike.items():  # the few of a kind are one group of their test's
        groups.setdefault(start if len(names) >= keep else start.partition("[")[0], []).extend(names)
    return sorted(name for group in groups.values() for n, name in enumerate(group) if n % keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--longer", type=float, default=0.2, help="seconds; shorter cells all stay")
    parser.add_argument("--keep", type=int, default=6, help="one in so many of the longer ones stays")
    parser.add_argument("--only", default="tests/", help="tests whose ids begin so")
    parser.add_argument("--add", action="store_true", help="to the list as it is, from a run without its cells")
    options = parser.parse_args()
    seconds = seconds_of(options.log.read_text())
    some = Counter({name: taken for name, taken in seconds.items() if name.startswith(options.only)})
    cells = {*slow_cells(some, options.longer, options.keep), *(LIST.read_text().splitlines() if options.add else ())}
    LIST.write_text("".join(f"{cell}\n" for cell in sorted(cells)))
    print(f"{len(cells)} cells are left to make test-all")


if __name__ == "__main__":
    main()
