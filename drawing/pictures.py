"""Picture: what all pictures do with their text and their SVG."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

__all__ = ["Picture"]


class Picture(ABC):
    """A picture as text and as SVG. `print` shows the text, a notebook the SVG."""

    @abstractmethod
    def text(self) -> str:
        """The picture as text for a terminal, in plain characters."""

    @abstractmethod
    def svg(self) -> str:
        """The picture as SVG for a page, in light and dark, without fonts or scripts from elsewhere."""

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.svg()

    def save(self, path: str | Path) -> Path:
        """Write the SVG to a file, or the text if its name ends in .txt."""
        file = Path(path)
        file.write_text(self.text() + "\n" if file.suffix == ".txt" else self.svg(), encoding="utf-8")
        return file
