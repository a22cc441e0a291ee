"""TilePicture: which tiles of a matrix of queries and keys are dead, partial or full, as text and SVG."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pictures import Picture
from .svg import label, picture, rectangle

__all__ = ["LEFT", "PLOT", "TOP", "TilePicture", "axis", "cut", "ticks"]

_NAMES = ("dead", "partial", "full")
_MARKS = ".+#"  # available in every terminal
_CHARACTERS = 32  # most tiles in a line of text; each is followed by a space
_CELLS = 256  # most cells along a side of an SVG, about a pixel each
PLOT, LEFT, TOP = 352.0, 60.0, 62.0


@dataclass(frozen=True)
class TilePicture(Picture):
    """Tiles, int8 [rows, columns]: 0 dead, 1 partial, 2 full. `print` shows the text, a notebook the SVG.

    first_query, first_key: the index of the first row and column. visible: the share of the matrix that is visible, or None if
    unknown. remark: a remark on the tiles, or "".
    """

    title: str
    tiles: NDArray[np.int8]
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    visible: float | None = None
    remark: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of dead, partial and full tiles."""
        return {name: int((self.tiles == kind).sum()) for kind, name in enumerate(_NAMES)}

    def text(self) -> str:
        """The picture as text for a terminal: at most 72 columns of plain characters, with a legend."""
        cells, (rows, columns) = self._merged(_CHARACTERS)
        width = max(len(str((len(cells) - 1) * rows * self.block_q)), 4)
        lines = [self.title, f"{self._sizes()}", *self._remarks(rows, columns), ""]
        lines.append(" " * (width + 2) + ticks(cells.shape[1], columns * self.block_kv))
        for number, row in enumerate(cells):
            start = number * rows * self.block_q
            lines.append(f"{start:>{width}}  {' '.join(_MARKS[kind] for kind in row)}")
        present = [kind for kind in (2, 1, 0) if (cells == kind).any()]
        return "\n".join([*lines, "", "   ".join(f"{_MARKS[kind]} {self._names()[kind]}" for kind in present)])

    def svg(self) -> str:
        """The picture as SVG for a page, in light and dark, without fonts or scripts from elsewhere."""
        cells, (rows, columns) = self._merged(_CELLS)
        height = min(max(PLOT * self.q_len / max(self.kv_len, 1), 16.0), 1.5 * PLOT)
        below = TOP + height
        remarks = self._remarks(rows, columns)
        parts = [
            label(12, 20, cut(self.title), class_="ao-strong"),
            label(12, 37, self._sizes(), class_="ao-small"),
            rectangle(LEFT, TOP, PLOT, height, class_="ao-dead"),
            *self._rectangles(cells, height),
            rectangle(LEFT, TOP, PLOT, height, class_="ao-frame"),
            *axis(self.kv_len),
            *axis(self.q_len, height),
            *self._legend(below + 20),
            *(label(12, below + 40 + 16 * n, line, class_="ao-small") for n, line in enumerate(remarks)),
        ]
        return picture(LEFT + PLOT + 24, below + 34 + 16 * len(remarks), f"Mask {self.title}: {self._sizes()}", parts)

    def _sizes(self) -> str:
        tile = f"a tile is {self.block_q} x {self.block_kv}"
        return f"{self.q_len} queries (down) x {self.kv_len} keys (across), {tile}"

    @property
    def _is_exact(self) -> bool:
        """Whether each tile is one query and one key, so that none is partial."""
        return self.block_q == self.block_kv == 1 and not (self.tiles == 1).any()

    def _names(self) -> tuple[str, str, str]:
        return ("hidden", "partial", "visible") if self._is_exact else _NAMES

    def _remarks(self, rows: int, columns: int) -> list[str]:
        """Counts, the visible share, and the size of a cell in the picture if it is more than one tile."""
        counts = self.counts
        line = "tiles: " + ", ".join(f"{counts[name]} {name}" for name in reversed(_NAMES))
        if self._is_exact:
            line = f"{counts['full']} of {self.q_len * self.kv_len} visible"
        elif self.visible is not None:
            line += f"; {100 * self.visible:.3g}% of the matrix is visible"
        lines = [line]
        if (rows, columns) != (1, 1):
            lines.append(f"each cell is {rows} x {columns} tiles: partial where they differ")
        return lines + ([self.remark] if self.remark else [])

    def _merged(self, limit: int) -> tuple[NDArray[np.int8], tuple[int, int]]:
        """The tiles, merged to at most `limit` per side, and the number of tiles per cell along each side. Mixed cells are
        partial."""
        rows, columns = (-(-size // limit) for size in self.tiles.shape)
        if (rows, columns) == (1, 1):
            return self.tiles, (1, 1)
        tops, lefts = (np.arange(0, size, n) for size, n in zip(self.tiles.shape, (rows, columns), strict=True))
        smallest, largest = (
            reduce.reduceat(reduce.reduceat(self.tiles, tops, axis=0), lefts, axis=1)
            for reduce in (np.minimum, np.maximum)
        )
        return np.where(smallest == largest, smallest, 1).astype(np.int8), (rows, columns)

    def _rectangles(self, cells: NDArray[np.int8], height: float) -> Iterator[str]:
        """A rectangle for each run of equal cells in a row that aren't dead. The last cells may be shorter than the others."""
        merged_q, merged_kv = (-(-n // m) for n, m in zip(self.tiles.shape, cells.shape, strict=True))
        y = np.minimum(np.arange(len(cells) + 1) * merged_q * self.block_q, self.q_len) * (height / max(self.q_len, 1))
        x = np.minimum(np.arange(cells.shape[1] + 1) * merged_kv * self.block_kv, self.kv_len)
        x = LEFT + x * (PLOT / max(self.kv_len, 1))
        for number, row in enumerate(cells):
            edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
            for first, last in itertools.pairwise(edges):
                if kind := int(row[first]):
                    at = float(x[first]), float(TOP + y[number])
                    size = float(x[last] - x[first]), float(y[number + 1] - y[number])
                    yield rectangle(*at, *size, class_=("", "ao-part", "ao-full")[kind])

    def _legend(self, y: float) -> Iterator[str]:
        for number, name in enumerate(reversed(self._names())):
            if self._is_exact and number == 1:
                continue
            x = LEFT + 90 * number
            yield rectangle(x, y - 10, 12, 12, class_=("ao-full", "ao-part", "ao-dead")[number])
            yield rectangle(x, y - 10, 12, 12, class_="ao-frame")
            yield label(x + 18, y, name)


def axis(size: int, height: float | None = None) -> Iterator[str]:
    """Indices at the start, the quarters and the end: of keys above the picture, or of queries (with `height`) beside it."""
    for quarter in range(5):
        index, share = size * quarter // 4, quarter / 4
        if quarter in (1, 2, 3) and (size % 4 or (height is not None and height < 60)):
            continue
        if height is None:
            anchor = ("start", "middle", "middle", "middle", "end")[quarter]
            yield label(LEFT + share * PLOT, TOP - 6, str(index), class_="ao-small", text_anchor=anchor)
        elif quarter == 0 or height >= 30:
            y = TOP + share * height + (10, 4, 4, 4, 0)[quarter]
            yield label(LEFT - 6, y, str(index), class_="ao-small", text_anchor="end")


def ticks(cells: int, size: int) -> str:
    """The index of every eighth cell, above it."""
    line = ""
    for cell in range(0, cells, 8):
        line = f"{line:<{2 * cell}}{cell * size}  "
    return line.rstrip()


def cut(title: str, limit: int = 64) -> str:
    """A title no longer than a picture is wide."""
    return title if len(title) <= limit else title[: limit - 3] + "..."
