"""Window: which pages of a sequence its next token sees."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Window"]


class Window(NamedTuple):
    """tokens: how many tokens a query sees at most, including itself; None: all."""

    tokens: int | None
    page_size: int

    def first_visible_page(self, length: int) -> int:
        """The first page that a query at position `length`, or a later one, sees."""
        return 0 if self.tokens is None else max(0, length - self.tokens + 1) // self.page_size
