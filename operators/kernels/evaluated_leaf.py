"""EvaluatedLeaf: a kernel's result for a mask leaf on one tile, in place of that leaf."""

from __future__ import annotations

from typing import Any

from ...masks import Mask

__all__ = ["EvaluatedLeaf"]


class EvaluatedLeaf(Mask):
    """A leaf that has already been evaluated."""

    kind = "answer"

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return self.seen
