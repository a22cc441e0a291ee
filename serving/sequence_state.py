"""A page pool's record of one sequence."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

__all__ = ["SequenceState"]


@dataclass(slots=True)
class SequenceState:
    """Pages, and what is known of their contents.

    `pages` may reach beyond `length`: room from alloc that no token fills yet. `tokens` holds the ids of the first tokens, as far
    as they are known; `keys` the prefix keys of the first whole pages, as far as they were published or matched. The first
    `released` pages were given back, because no query sees them any more; the pool's number of pages stands in their place.
    """

    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    keys: list[bytes] = field(default_factory=list)
    released: int = 0

    @property
    def current_pages(self) -> array[int]:
        """The pages that the sequence still has."""
        return self.pages[self.released :]

    def copy(self, pages: int) -> SequenceState:
        """The same tokens on the first `pages` pages."""
        return SequenceState(self.length, self.pages[:pages], self.tokens[:], self.keys[:], self.released)
