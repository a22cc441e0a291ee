"""PageAccounting: what a page pool records of its sequences, and what a call would take. Nothing here changes the pool."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from ..errors import CapacityError, InputError, shown
from .checked_arguments import whole_number
from .page_owners import PageOwners
from .prefix_index import PrefixIndex
from .sequence_records import SequenceRecords
from .sequence_state import SequenceState
from .window import Window

__all__ = ["PageAccounting"]


class PageAccounting(SequenceRecords[SequenceState]):
    """The records of a PagePool, which creates and changes them."""

    pages: int
    page_size: int
    max_pages_per_sequence: int | None
    sequence_shards: int
    _window: Window
    _index: PrefixIndex
    _owners: PageOwners[PrefixIndex]

    def _could_grow(self, sequence: Hashable, tokens: int, *, new: bool = False) -> None:
        """Errors: those of growing, before anything changes."""
        state = (self._find(sequence) or SequenceState()) if new else self._get(sequence)
        self._allocation(sequence, state, tokens)

    def _could_adopt(self, sequence: Hashable, ids: array[int], tokens: int) -> None:
        """Errors: those of adopt, before anything changes."""
        state, pages = self._matched_prefix(sequence, ids)
        self._allocation(sequence, state, tokens, pages)

    def _could_resume(self, sequence: Hashable, ids: array[int], length: int) -> None:
        """Errors: those of resume, before anything changes."""
        self._must_be_new(sequence)
        self._allocation(sequence, SequenceState(), length)

    def _prefix_lengths(self, keys: Sequence[bytes]) -> set[int]:
        """The numbers of pages (including 0) after which a sequence can start."""
        return self._index.lengths(keys, self._window)

    def _truncated(self, sequence: Hashable, length: int) -> tuple[SequenceState, int]:
        """The sequence and its new length. Errors: those of truncate."""
        state = self._get(sequence)
        length = whole_number("length", length, 0, state.length)
        if self._window.first_visible_page(length) < state.released:
            raise InputError(
                f"sequence {shown(sequence)} of {state.length} tokens cut to {length}: its next token would see pages that were "
                f"released, the first {state.released}. Hint: release after truncate."
            )
        return state, length

    def _matched_prefix(self, sequence: Hashable, ids: array[int]) -> tuple[SequenceState, list[int]]:
        """A new sequence on the longest published prefix, and its pages, not yet counted. Errors: if the sequence is here
        already."""
        self._must_be_new(sequence)
        keys, pages = self._index.walk(ids, self._window)
        matched, released = len(keys) * self.page_size, len(keys) - len(pages)
        table = array("i", [self.pages]) * released + array("i", pages)
        return SequenceState(matched, table, ids[:matched], keys, released), pages

    def _allocation(
        self, sequence: Hashable, state: SequenceState, tokens: int, prefix_pages: Sequence[int] = ()
    ) -> tuple[list[int], int | None, bool]:
        """(the shards of new pages, the existing page that is written first, whether it has to be copied). Changes nothing.
        Errors: those of growing."""
        owners = self._owners
        inside, offset = divmod(state.length, self.page_size)
        last = state.pages[inside] if offset and tokens else None
        copied = last is not None and owners.references[last] > 1
        reached = -(-(state.length + tokens) // self.page_size)
        if self.max_pages_per_sequence is not None and reached > self.max_pages_per_sequence:
            raise InputError(
                f"sequence {shown(sequence)} of {state.length} tokens would get {tokens} more and take {reached} pages; "
                f"max_pages_per_sequence is {self.max_pages_per_sequence}. Hint: end the sequence, or declare a wider table."
            )
        n = self.sequence_shards
        shards = [inside % n] * copied + [number % n for number in range(len(state.pages), reached)]
        self._must_have(sequence, shards, tokens, prefix_pages)
        return shards, last, copied

    def _must_have(self, sequence: Hashable, shards: Sequence[int], tokens: int, prefix_pages: Sequence[int]) -> None:
        """Check that each shard has enough pages; `prefix_pages` are kept. Errors: CapacityError."""
        owners, n = self._owners, self.sequence_shards
        per_shard = self.pages // n
        reused = [page % n for page in prefix_pages if page not in owners.references]
        for shard in range(n):
            needed, available = shards.count(shard), owners.available_on(shard) - reused.count(shard)
            if needed > available:
                where = "" if n == 1 else f" on sequence shard {shard} of {n}"
                raise CapacityError(
                    f"sequence {shown(sequence)} needs {needed} {'page' if needed == 1 else 'pages'}{where} for {tokens} more "
                    f"tokens; {available} of {per_shard} are available, and {per_shard - available} are in use. "
                    "Hint: free a sequence, or make the pool larger.",
                    needed,
                    available,
                )
