"""Page ownership: reference counts, and which page is handed out next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["PageOwners"]


class ContentIndex(Protocol):
    """What pages, or slots, are found by: PrefixIndex or SnapshotIndex."""

    content: dict[int, Any]

    @property
    def unused(self) -> tuple[OrderedDict[int, None], ...]: ...

    def evict(self, shard: int) -> int: ...


_Index = TypeVar("_Index", bound=ContentIndex)


class PageOwners(Generic[_Index]):
    """Every page, or slot, is used (it has references), free (never used, or returned), or cached (unused, but in the index).

    Page g lies on shard g % shards. Each shard has its own free and cached pages, so there are as many lists of each as shards.
    """

    def __init__(self, pages: int, index: _Index) -> None:
        self.pages = pages
        self.index = index
        self.shards = shards = len(index.unused)
        self.references: dict[int, int] = {}
        self.used = [0] * shards  # pages with references
        self.next_new = list(range(shards))  # the first page of each shard that was never handed out
        self.returned: tuple[deque[int], ...] = tuple(deque() for _ in range(shards))

    @property
    def available(self) -> int:
        """How many pages can be handed out: free and cached ones."""
        return self.pages - len(self.references)

    def available_on(self, shard: int) -> int:
        """How many pages of one shard can be handed out."""
        return self.pages // self.shards - self.used[shard]

    @property
    def free(self) -> int:
        return self.available - sum(map(len, self.index.unused))

    def take(self, shard: int) -> tuple[int, bool]:
        """Take a page of a shard for one owner; return it, and whether it had an owner before.

        A page that was never used comes first, then the page returned longest ago, then the page cached longest ago.
        """
        old = self.next_new[shard] >= self.pages
        if old:
            page = self.returned[shard].popleft() if self.returned[shard] else self.index.evict(shard)
        else:
            page = self.next_new[shard]
            self.next_new[shard] += self.shards
        self._use(page, 1)
        return page, old

    def retain(self, pages: Iterable[int]) -> None:
        """Add one owner to each page."""
        for page in pages:
            self._use(page, self.references.get(page, 0) + 1)
            self.index.unused[page % self.shards].pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one owner of each page. The last page goes first, so that it is evicted before the pages that lead to it."""
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                shard = page % self.shards
                del self.references[page]
                self.used[shard] -= 1
                if page in self.index.content:
                    self.index.unused[shard][page] = None
                else:
                    self.returned[shard].append(page)

    def _use(self, page: int, owners: int) -> None:
        self.references[page] = owners
        if owners == 1:
            self.used[page % self.shards] += 1
