"""The manual's pages as blocks: what a reader would copy, and what the page says comes out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
)
IDS = [page.relative_to(ROOT).as_posix().removeprefix("docs/") for page in PAGES]

_FENCE = re.compile(r"```(\w*)$")
_MARK = re.compile(r"<!-- (output|declaration|exit|needs)(?:: (\S+))? -->$")


@dataclass
class Block:
    """A fenced block: its language, the line of its first line of text, and the comments just above it."""

    page: Path
    language: str
    line: int
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    opened: Block | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            if line == "```":
                opened.text = "\n".join(lines) + "\n"
                found.append(opened)
                opened, lines = None, []
            else:
                lines.append(line)
        elif fence:
            opened, marks = Block(page, fence[1], number + 1, "", marks), {}
        elif mark := _MARK.match(line):
            marks[mark[1]] = mark[2] or ""
        elif line:
            assert not marks, f"{page.name}:{number}: {marks} stands above no block"
    assert opened is None, f"{page.name}: a block isn't closed"
    return found


def prose(page: Path) -> list[tuple[int, str]]:
    """Numbered lines outside fenced blocks."""
    inside, found = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            found.append((number, line))
    return found


def table(page: Path, name: str) -> dict[str, str]:
    """{first cell: second cell}, without backticks, of the table below `<!-- defaults: name -->`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"<!-- defaults: {name} -->") + 1
    rows = {}
    for line in lines[start:]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows[cells[0].strip("`")] = cells[1].strip("`")
        elif rows:
            break
    return dict(list(rows.items())[2:])  # without the head and the rule


def anchors(page: Path) -> set[str]:
    """What `#...` may name in a page, by mkdocs' rule for headings."""
    titles = [line.lstrip("#").strip() for _, line in prose(page) if line.startswith("#")]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
