"""SlotAccounting: what a pool of slots records of its sequences, and what a call would take. Nothing here changes the pool."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..errors import CapacityError, InputError, shown
from .checked_arguments import whole_number
from .page_owners import PageOwners
from .sequence_records import SequenceRecords
from .slot_states import SlotState, SlotStep
from .snapshot_index import SnapshotIndex

__all__ = ["MOST", "SlotAccounting"]

MOST = 2**31 - 1  # slot ids and lengths are int32 on the device


class SlotNeed(NamedTuple):
    """What more tokens of a sequence need. copied: whether its state has to be copied before it is written in place; missing: how
    many slots; lost: its slots that prefixes must not lead to any more; available: how many slots there are."""

    copied: bool
    missing: int
    lost: tuple[int, ...]
    available: int


class SlotAccounting(SequenceRecords[SlotState]):
    """The records of a StateSlots, which creates and changes them."""

    slots: int
    page_size: int
    drafts: int
    _index: SnapshotIndex
    _owners: PageOwners[SnapshotIndex]

    def _could_grow(self, sequence: Hashable, tokens: int, *, new: bool = False) -> None:
        state = (self._find(sequence) or SlotState()) if new else self._get(sequence)
        self._must_have(sequence, state, tokens)

    def _could_adopt(self, sequence: Hashable, ids: array[int], tokens: int) -> None:
        self._must_have(sequence, self._adopted(sequence, ids), tokens, new=True)

    def _could_resume(self, sequence: Hashable, ids: array[int], length: int) -> None:
        self._must_be_new(sequence)
        self._capacity(sequence, min(length, 1), self._owners.available, length)

    def _truncated(self, sequence: Hashable, length: int) -> tuple[SlotState, int]:
        """The sequence and its new length. Errors: those of truncate."""
        state = self._get(sequence)
        length = whole_number("length", length, 0, state.length)
        if length and length != state.length and length not in state.kept:
            kept = ", ".join(map(str, sorted(state.kept)))
            raise InputError(
                f"sequence {shown(sequence)} of {state.length} tokens cut to {length}: states are kept of {kept or 'no'} tokens. "
                f"Hint: with drafts={self.drafts} the last {self.drafts} tokens can be taken back; declare more, or free the "
                "sequence and prefill it again."
            )
        return state, length

    def _prefix_lengths(self, keys: Sequence[bytes]) -> set[int]:
        """The numbers of pages (including 0) after which a sequence can start."""
        return self._index.lengths(keys)

    def _adopted(self, sequence: Hashable, ids: array[int]) -> SlotState:
        """A new sequence on the longest prefix whose state is kept; its slot isn't counted yet."""
        self._must_be_new(sequence)
        keys, slot = self._index.find(ids)
        length = len(keys) * self.page_size
        return SlotState(length, {} if slot is None else {length: slot}, [], ids[:length], keys)

    def _step(self, sequence: Hashable, tokens: int) -> SlotStep:
        """What a step with so many tokens of a sequence reads and writes; without tokens, it reads the state."""
        state = self._get(sequence)
        if not tokens:
            return SlotStep(0, state.kept.get(state.length), ())
        return SlotStep(0, None, ()) if state.step is None else state.step

    def _alone(self, slot: int) -> bool:
        """Whether a slot may be written: one sequence has it, and no prefix leads to it."""
        return self._owners.references.get(slot, 0) == 1 and slot not in self._index.content

    def _need(self, state: SlotState, tokens: int, *, new: bool = False) -> SlotNeed:
        """What so many more tokens need, in one step or several; new: the sequence's own slots aren't counted yet.

        The new states after the last `drafts` tokens and all of them need slots. Older ones leave theirs, if no one else has
        them. A state that a prefix leads to stays, unless there is no other slot: then it is found no more.
        """
        references = self._owners.references
        own = {at: slot for at, slot in state.kept.items() if references.get(slot, 0) + new == 1}
        written = min(tokens, 1 + self.drafts)
        oldest = state.length + written - self.drafts  # the first length whose state stays
        available = self._owners.available - (sum(slot not in references for slot in state.kept.values()) if new else 0)
        for forced in (False, True):
            alone = {at for at, slot in own.items() if forced or slot not in self._index.content}
            copied = tokens > self.drafts and state.length in state.kept and state.length not in alone
            left = sum(at < oldest for at in alone | ({state.length} if copied else set()))
            missing = max(0, copied + max(0, written - left) - len(state.spare))
            if missing <= available:
                break
        lost = tuple(slot for at, slot in own.items() if at < oldest) if forced else ()
        return SlotNeed(copied, missing, lost, available)

    def _must_have(self, sequence: Hashable, state: SlotState, tokens: int, *, new: bool = False) -> None:
        """Check that there are enough slots. Errors: CapacityError; InputError for more tokens than int32 counts."""
        if state.length + tokens > MOST:
            raise InputError(
                f"sequence {shown(sequence)} would have {state.length + tokens} tokens; wanted less than 2**31."
            )
        need = self._need(state, tokens, new=new)
        self._capacity(sequence, need.missing, need.available, tokens)

    def _capacity(self, sequence: Hashable, needed: int, available: int, tokens: int) -> None:
        if needed > available:
            raise CapacityError(
                f"sequence {shown(sequence)} needs {needed} {'slot' if needed == 1 else 'slots'} for {tokens} more tokens; "
                f"{available} of {self.slots} are available, and {self.slots - available} are in use. "
                "Hint: free a sequence, or make the pool larger.",
                needed,
                available,
            )
