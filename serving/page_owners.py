"""Who has which page: counted references, and which page is given away next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .prefix_index import PrefixIndex

__all__ = ["PageOwners"]


class PageOwners:
    """Every page is used (it has references), free (never used, or returned), or cached (unused, but in the index)."""

    def __init__(self, pages: int, index: PrefixIndex) -> None:
        self.pages = pages
        self.index = index
        self.references: dict[int, int] = {}
        self.next_new = 0  # pages from here on were never given to anybody
        self.returned: deque[int] = deque()

    @property
    def available(self) -> int:
        """How many pages can be given away: free and cached ones."""
        return self.pages - len(self.references)

    @property
    def free(self) -> int:
        return self.available - len(self.index.unused)

    def take(self) -> tuple[int, bool]:
        """A page for one owner, and whether it had one before.

        It is one that was never used, else the one that was returned first, else the cached one that was left first.
        """
        old = self.next_new == self.pages
        if old:
            page = self.returned.popleft() if self.returned else self.index.evict()
        else:
            page = self.next_new
            self.next_new += 1
        self.references[page] = 1
        return page, old

    def retain(self, pages: Iterable[int]) -> None:
        """One owner more."""
        for page in pages:
            self.references[page] = self.references.get(page, 0) + 1
            self.index.unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One owner less; the last page first, so that it is evicted before those that it can't be found without."""
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                if page in self.index.content:
                    self.index.unused[page] = None
                else:
                    self.returned.append(page)
