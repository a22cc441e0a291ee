"""The check that a pool's records of slots are right: no slot leaks, none is used twice, every prefix's state is its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from ..errors import shown
from .page_owners import PageOwners
from .pool_check import check_places, must
from .prefix_index import chain_keys
from .slot_states import SlotState
from .snapshot_index import SnapshotIndex

__all__ = ["check_slots"]


def check_slots(owners: PageOwners[SnapshotIndex], sequences: Mapping[Hashable, SlotState], drafts: int) -> None:
    """Raise an AttnOpsError that names the slot or the sequence unless all records agree."""
    index = owners.index
    used = Counter(slot for state in sequences.values() for slot in state.slots)
    for name, state in sequences.items():
        _check_sequence(name, state, owners.pages, drafts)
    check_places(owners, used, "slot")
    _check_index(index)
    holders: dict[int, tuple[Hashable, int]] = {}
    for name, state in sequences.items():
        _check_spare(name, state, used, index)
        _check_prefixes(name, state, index)
        for at, slot in state.kept.items():
            other, same = holders.setdefault(slot, (name, at))
            _must_be_same(slot, (other, same, sequences[other]), (name, at, state))


def _check_sequence(name: Hashable, state: SlotState, slots: int, drafts: int) -> None:
    """The state of all tokens is kept, in slots that exist and are distinct, and no state is of more tokens, or too old."""
    one, kept = f"sequence {shown(name)}", state.kept
    must(not state.length or state.length in kept, f"{one} of {state.length} tokens keeps no state of them")
    wrong = [at for at in kept if not max(1, state.length - drafts) <= at <= state.length]
    must(not wrong, f"{one} of {state.length} tokens keeps a state of {min(wrong, default=0)} tokens")
    for slot, count in Counter(state.slots).items():
        must(0 <= slot < slots, f"{one} has slot {slot} of {slots}")
        must(count == 1, f"{one} has slot {slot} {count} times")
    known = len(state.tokens)
    must(known <= state.length, f"{one} has {state.length} tokens and {known} token ids")
    if (step := state.step) is not None:
        right = {state.length - back: slot for back, slot in enumerate(step.written)}
        same = step.written and right.items() <= kept.items()
        must(bool(same), f"{one} wrote slots {shown(list(step.written))} last, but keeps {shown(kept)}")


def _check_spare(name: Hashable, state: SlotState, used: Counter[int], index: SnapshotIndex) -> None:
    """Slots for later tokens belong to one sequence, and hold no state that is found."""
    for slot in state.spare:
        must(used[slot] == 1, f"slot {slot} is spare in sequence {shown(name)} and has {used[slot]} owners")
        must(slot not in index.content, f"slot {slot} is spare in sequence {shown(name)} but is found by a prefix")


def _check_index(index: SnapshotIndex) -> None:
    """Every snapshot is found by its key, at a length that is declared."""
    for slot, snapshot in index.content.items():
        must(index.slot_of.get(snapshot.key) == slot, f"the key of cached slot {slot} doesn't lead to it")
        must(
            index.at(snapshot.pages * index.page_size), f"cached slot {slot} holds a state after {snapshot.pages} pages"
        )
    for slot in index.slot_of.values():
        must(slot in index.content, f"a key leads to slot {slot}, whose prefix isn't known")


def _check_prefixes(name: Hashable, state: SlotState, index: SnapshotIndex) -> None:
    """A sequence's keys match its tokens, and a slot that is found by a prefix holds the state of that prefix."""
    keys = list(chain_keys(state.tokens, index.page_size))
    must(state.keys == keys[: len(state.keys)], f"the keys of sequence {shown(name)} don't match its tokens")
    for at, slot in state.kept.items():
        if (snapshot := index.content.get(slot)) is not None:
            pages = at // index.page_size
            right = at <= len(state.tokens) and snapshot == (keys[pages - 1] if pages else b"", pages)
            right = right and at == pages * index.page_size
            must(right, f"cached slot {slot} holds another state than that of {at} tokens of sequence {shown(name)}")


def _must_be_same(slot: int, one: tuple[Hashable, int, SlotState], other: tuple[Hashable, int, SlotState]) -> None:
    """Two sequences that share a slot have the same tokens there."""
    known = min(one[1], len(one[2].tokens), len(other[2].tokens))
    same = one[1] == other[1] and one[2].tokens[:known] == other[2].tokens[:known]
    must(
        same,
        f"slot {slot} holds the state of {one[1]} tokens of sequence {shown(one[0])} and of {other[1]} other tokens of "
        f"sequence {shown(other[0])}",
    )
