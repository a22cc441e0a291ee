"""HeatPicture: a number for each tile of a matrix of queries and keys, as text and SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pictures import Picture
from .svg import element, label, picture, rectangle
from .tiles import LEFT, PLOT, TOP, axis, cut, ticks

__all__ = ["HeatPicture"]

_MARKS = ".:-=+*#%@"  # from the least to the most, available in every terminal
_STEPS = 7  # colours in a legend


@dataclass(frozen=True)
class HeatPicture(Picture):
    """A number for each tile [rows, columns], at most 32 each. `print` shows the text, a notebook the SVG.

    what: what the numbers are. Negative and positive ones have colours of their own, the stronger the larger.
    """

    title: str
    values: NDArray[np.float64]
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    what: str

    @property
    def _ends(self) -> tuple[float, float]:
        return float(self.values.min()), float(self.values.max())

    def text(self) -> str:
        """The picture as text for a terminal: at most 72 columns of plain characters, with a legend."""
        least, most = self._ends
        spread = most - least or 1.0
        levels = np.minimum(((self.values - least) / spread * len(_MARKS)).astype(int), len(_MARKS) - 1)
        width = max(len(str((len(levels) - 1) * self.block_q)), 4)
        lines = [self.title, *self._lines(), "", " " * (width + 2) + ticks(levels.shape[1], self.block_kv)]
        lines += [f"{n * self.block_q:>{width}}  {' '.join(_MARKS[x] for x in row)}" for n, row in enumerate(levels)]
        edges = np.linspace(least, most, len(_MARKS) + 1)
        present = [n for n in range(len(_MARKS)) if (levels == n).any()]
        legend = [f"{_MARKS[n]} {edges[n]:.3g} to {edges[n + 1]:.3g}" for n in present]
        rows = ["   ".join(legend[n : n + 3]) for n in range(0, len(legend), 3)]
        return "\n".join([*lines, "", *(rows if most > least else [f"{_MARKS[0]} {least:.3g}"])])

    def svg(self) -> str:
        """The picture as SVG for a page, in light and dark, without fonts or scripts from elsewhere."""
        height = min(max(PLOT * self.q_len / max(self.kv_len, 1), 16.0), 1.5 * PLOT)
        below, lines = TOP + height, self._lines()
        parts = [
            label(12, 20, cut(self.title), class_="ao-strong"),
            label(12, 37, lines[0], class_="ao-small"),
            *self._cells(height),
            rectangle(LEFT, TOP, PLOT, height, class_="ao-frame"),
            *axis(self.kv_len),
            *axis(self.q_len, height),
            *self._legend(below + 20),
            label(12, below + 60, lines[1], class_="ao-small"),
        ]
        return picture(LEFT + PLOT + 24, below + 74, f"Score {self.title}: {lines[1]}", parts)

    def _lines(self) -> list[str]:
        tile = f"a tile is {self.block_q} x {self.block_kv}"
        least, most = self._ends
        return [
            f"{self.q_len} queries (down) x {self.kv_len} keys (across), {tile}",
            f"{self.what}, at the middle of each tile: {least:.4g} to {most:.4g}",
        ]

    def _cells(self, height: float) -> Iterator[str]:
        y = np.minimum(np.arange(len(self.values) + 1) * self.block_q, self.q_len) * (height / self.q_len)
        x = np.minimum(np.arange(self.values.shape[1] + 1) * self.block_kv, self.kv_len) * (PLOT / self.kv_len)
        for row, values in enumerate(self.values):
            for column, value in enumerate(values):
                at = LEFT + float(x[column]), TOP + float(y[row])
                yield self._square(*at, float(x[column + 1] - x[column]), float(y[row + 1] - y[row]), value)

    def _square(self, x: float, y: float, width: float, height: float, value: float) -> str:
        largest = max(abs(end) for end in self._ends) or 1.0
        return element(
            "rect", x=x, y=y, width=width, height=height, class_="ao-less" if value < 0 else "ao-more",
            fill_opacity=float(abs(value) / largest),
        )  # fmt: skip

    def _legend(self, y: float) -> Iterator[str]:
        least, most = self._ends
        for number, value in enumerate(np.linspace(least, most, _STEPS if most > least else 1)):
            x = LEFT + 52 * number
            yield self._square(x, y - 10, 44, 12, float(value))
            yield rectangle(x, y - 10, 44, 12, class_="ao-frame")
            yield label(x + 22, y + 18, f"{value:.3g}", class_="ao-small", text_anchor="middle")
