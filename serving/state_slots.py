"""A pool of slots: which slots of a cache hold the state of which sequence. Plain Python on the host, as PagePool."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ..errors import InputError, shown
from .checked_arguments import token_array, whole_number
from .page_owners import PageOwners
from .results import SlotCounts, SlotGrowth, SlotMatch
from .slot_accounting import MOST, SlotAccounting
from .slot_check import check_slots
from .slot_states import SlotState, SlotStep
from .snapshot_index import SnapshotIndex

__all__ = ["StateSlots"]


class StateSlots(SlotAccounting):
    """Allocates the slots of layers with states to sequences. A slot holds the state of one sequence after so many tokens.

    Its calls are those of PagePool, so that PagePools drives both. A sequence needs one slot, whatever its length, and one more
    for each draft: a step writes the state after all of its tokens, and those without its last 1, 2, ... `drafts` tokens, so that
    `truncate` takes tokens back without computing anything. `append` takes all tokens that a sequence has in a step, in one call.

    No sequence writes a slot that another one uses: where a forked sequence, or one that starts from a prefix, would write its
    state in place, `copies` has the slot's copy, made before the step. A state of a published prefix can be found if a step
    ended there, at a multiple of `snapshots` pages: see `tokens_to_snapshot`. States without a sequence are kept until their
    slots are needed; the one unused for longest goes first.

    slots: how many there are on the shard. page_size: tokens of a page. drafts: how many of a sequence's last tokens can be taken
    back. snapshots: at every how many pages a prefix's state can be found; None: never. prefix_sharing=False: nothing is
    published or matched. scrub_on_free=True: a slot that had another owner is reported in `to_scrub`.

    A call that raises changes nothing. Errors: CapacityError when too few slots are left; UnknownNameError for an unknown
    sequence; InputError and InputTypeError for arguments.
    """

    def __init__(
        self,
        slots: int,
        page_size: int,
        *,
        drafts: int = 0,
        snapshots: int | None = None,
        prefix_sharing: bool = True,
        scrub_on_free: bool = False,
    ) -> None:
        self.slots = whole_number("slots", slots, 1, MOST)
        self.page_size = whole_number("page_size", page_size, 1)
        self.drafts = whole_number("drafts", drafts, 0)
        self.snapshots = None if snapshots is None else whole_number("snapshots", snapshots, 1)
        self.prefix_sharing = bool(prefix_sharing)
        self.scrub_on_free = bool(scrub_on_free)
        self._sequences: dict[Hashable, SlotState] = {}
        self._index = SnapshotIndex(self.page_size, self.snapshots if self.prefix_sharing else None)
        self._owners = PageOwners(self.slots, self._index)

    # -- growing sequences ---------------------------------------------------------------------------------------------

    def alloc(self, sequence: Hashable, tokens: int) -> SlotGrowth:
        """Give a sequence, existing or new, slots for `tokens` more tokens; its length doesn't change. The device must have
        written its state."""
        tokens = whole_number("tokens", tokens, 0)
        state = self._find(sequence) or SlotState()
        self._must_have(sequence, state, tokens)
        growth = self._reserve(state, tokens)
        self._sequences[sequence] = state
        return growth

    def append(self, sequence: Hashable, token_ids: Iterable[int]) -> SlotGrowth:
        """Append all tokens that a sequence has in a step: it reads the state before them and writes those after them."""
        state, ids = self._get(sequence), token_array(token_ids)
        growth = self._grow(sequence, state, len(ids))
        if self._index.every is not None and len(state.tokens) == state.length - len(ids):
            state.tokens.extend(ids)
        return growth

    def append_count(self, sequence: Hashable, tokens: int) -> SlotGrowth:
        """Append tokens whose ids aren't known. States from there on are never found by prefix."""
        return self._grow(sequence, self._get(sequence), whole_number("tokens", tokens, 0))

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Cut a sequence to its first `length` tokens, as after rejected drafts: the next step reads the slot that holds their
        state. Errors: InputError for a length whose state isn't kept."""
        state, length = self._truncated(sequence, length)
        if length == state.length:
            return
        cut = [at for at in state.kept if at > length]
        self._owners.release([state.kept.pop(at) for at in cut])
        state.length, state.step = length, None
        del state.tokens[length:], state.keys[length // self.page_size :]

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Start `child` with all tokens of `parent`, whose state it shares until one of them grows. The device must have written
        it. States before the last token stay with the parent."""
        state = self._get(parent)
        self._must_be_new(child)
        kept = {state.length: state.kept[state.length]} if state.length else {}
        self._owners.retain(kept.values())
        self._sequences[child] = SlotState(state.length, kept, [], state.tokens[:], state.keys[:])

    def free(self, sequence: Hashable) -> None:
        """Give back all slots of a sequence and forget it, at any time."""
        state = self._get(sequence)
        del self._sequences[sequence]
        self._owners.release(state.slots)

    def release(self, sequence: Hashable) -> int:
        """Nothing: a state is of all tokens. Returns 0."""
        self._get(sequence)
        return 0

    def resume(self, sequence: Hashable, token_ids: Iterable[int], length: int | None = None) -> SlotGrowth:
        """Start a sequence whose state the caller restores, as after preemption: it gets the slot for it. See PagePool.resume."""
        ids, length = self._resumed(sequence, token_ids, length)
        state = SlotState(length, {}, [], ids if self._index.every is not None else ids[:0])
        self._capacity(sequence, min(length, 1), self._owners.available, length)
        if length:
            state.kept[length] = self._owners.take(0)[0]
        self._sequences[sequence] = state
        return SlotGrowth(tuple(state.kept.values()))

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def publish(self, sequence: Hashable) -> None:
        """Let other sequences find the states that this one keeps at multiples of `snapshots` pages. The device must have written
        them."""
        state = self._get(sequence)
        if self._index.every is not None:
            self._index.insert(state.tokens, state.keys, state.kept)

    def tokens_to_snapshot(self, sequence: Hashable) -> int | None:
        """After how many more tokens a step must end for a state that can be found; None without snapshots."""
        state, every = self._get(sequence), self._index.every
        return None if every is None else every * self.page_size - state.length % (every * self.page_size)

    def match(self, token_ids: Iterable[int]) -> SlotMatch:
        """The longest prefix of these tokens whose state is kept. Nothing changes, and nothing is reserved for the caller."""
        keys, slot = self._index.find(token_array(token_ids))
        return SlotMatch(len(keys) * self.page_size, slot)

    def adopt(self, sequence: Hashable, token_ids: Iterable[int], tokens: int = 0) -> SlotGrowth:
        """Start a sequence on the longest prefix of these tokens whose state is kept, with slots for `tokens` more."""
        tokens, ids = whole_number("tokens", tokens, 0), token_array(token_ids)
        state = self._adopted(sequence, ids)
        self._must_have(sequence, state, tokens, new=True)
        self._owners.retain(state.kept.values())
        growth = self._reserve(state, tokens)
        self._sequences[sequence] = state
        return growth._replace(matched=state.length)

    # -- for the device -----------------------------------------------------------------------------------------------

    def slot_tables(self, sequences: Sequence[Hashable | None], q_lens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(read_slots int32 [sequences], write_slots int32 [sequences, 1 + drafts]) of a step with q_lens[n] tokens of the n-th.

        A row reads the state before its tokens. Column j is for the state after them without the last j. The id `slots` is
        padding: of a row that starts from zeros, of columns for which the row has too few tokens, of rows where None stands for
        a sequence. A row with q_lens 0 reads its state and writes nothing. Errors: InputError for tokens that weren't appended.
        """
        rows = list(q_lens)
        if len(rows) != len(sequences):
            raise InputError(f"q_lens has {len(rows)} numbers for {len(sequences)} sequences; wanted one for each.")
        read = np.full(len(rows), self.slots, np.int32)
        write = np.full((len(rows), 1 + self.drafts), self.slots, np.int32)
        for row, (sequence, given) in enumerate(zip(sequences, rows, strict=True)):
            tokens = whole_number(f"q_lens[{row}]", given, 0)
            step = SlotStep(0, None, ()) if sequence is None else self._step(sequence, tokens)
            if step.tokens != tokens:
                raise InputError(
                    f"row {row}: q_lens is {tokens}, but sequence {shown(sequence)} got {step.tokens} last. Hint: append all "
                    "tokens that a sequence has in a step in one call, before the step's tables."
                )
            read[row] = self.slots if step.read is None else step.read
            write[row, : len(step.written)] = step.written
        return read, write

    # -- contents and checks ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        used, free, cached, _ = self.counts()
        return f"StateSlots({self.slots} slots: {used} used, {free} free, {cached} cached; {len(self)} sequences)"

    @property
    def available(self) -> int:
        """How many slots can be handed out: free and cached ones."""
        return self._owners.available

    def slots_of(self, sequence: Hashable) -> dict[int, int]:
        """For each number of tokens after which the sequence's state is kept, the slot that holds it."""
        return dict(self._get(sequence).kept)

    def counts(self) -> SlotCounts:
        """How many slots are used, free and cached, and how many of the used are spare."""
        cached, spare = len(self._index.unused[0]), sum(len(state.spare) for state in self._sequences.values())
        return SlotCounts(len(self._owners.references), self._owners.free, cached, spare)

    def check(self) -> None:
        """Prove that no slot leaks or is used twice. Errors: AttnOpsError, which names the slot and what is wrong with it."""
        check_slots(self._owners, self._sequences, self.drafts)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _reserve(self, state: SlotState, tokens: int) -> SlotGrowth:
        """Take the slots for more tokens, and copy the state if it will be written in place."""
        copied, missing, lost, _ = self._need(state, tokens)
        for slot in lost:
            self._index.remove(slot)
        taken = [self._owners.take(0) for _ in range(missing)]
        state.spare.extend(slot for slot, _ in taken)
        copies: tuple[tuple[int, int], ...] = ()
        if copied:
            source, target = state.kept[state.length], state.spare.pop(0)
            copies, state.kept[state.length], state.step = ((source, target),), target, None
            self._owners.release([source])
        zeroed = (slot for slot, old in taken if old and slot not in [target for _, target in copies])
        return SlotGrowth(tuple(slot for slot, _ in taken), copies, tuple(zeroed) if self.scrub_on_free else ())

    def _grow(self, sequence: Hashable, state: SlotState, tokens: int) -> SlotGrowth:
        """Give the states of more tokens their slots, or raise before anything changes."""
        if not tokens:
            return SlotGrowth()
        self._must_have(sequence, state, tokens)
        growth = self._reserve(state, tokens)
        read, length = state.kept.get(state.length), state.length + tokens
        free = state.spare
        for at in [at for at in state.kept if at < length - self.drafts]:
            slot = state.kept.pop(at)
            if self._alone(slot):
                free.append(slot)
            else:
                self._owners.release([slot])
        written = [free.pop(0) for _ in range(min(tokens, 1 + self.drafts))]
        for back, slot in reversed(list(enumerate(written))):
            state.kept[length - back] = slot
        more = max(0, 1 + self.drafts - len(state.kept))
        self._owners.release(free[more:])
        del free[more:]
        state.length, state.step = length, SlotStep(tokens, read, tuple(written))
        return growth
