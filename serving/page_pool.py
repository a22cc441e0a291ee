"""A pool of pages: which pages of a paged KV cache hold which sequence. Plain Python on the host; the device only gets tables."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ..errors import InputError, shown
from .checked_arguments import token_array, whole_number
from .page_accounting import PageAccounting
from .page_owners import PageOwners
from .pool_check import check_pool
from .prefix_index import PrefixIndex
from .results import Growth, PageCounts, PrefixMatch
from .sequence_state import SequenceState
from .window import Window

__all__ = ["PagePool"]

_SLOTS = 2**31 - 1  # page ids, lengths and slots are int32 on the device


class PagePool(PageAccounting):
    """Allocates the pages of a paged KV cache to sequences, shares pages between equal prefixes, and reclaims them.

    The caller chooses each sequence's id: anything hashable except None. A sequence grows by `alloc` (room only) and `append`
    (tokens). Each call returns a Growth: what the device has to do before the tokens are written, in the order of the calls. No
    sequence writes into a page that another one uses: when a forked sequence grows, its last page is copied first. Once the
    device has written a sequence's tokens, publish it; `adopt` can then start other sequences on its whole pages. Published
    pages without a sequence are kept until they are needed; the page unused for longest is evicted first.

    pages, page_size: the number of pages, and of tokens per page. max_pages_per_sequence: the width of the page table, if it is
    fixed. prefix_sharing=False: nothing is published or matched. scrub_on_free=True: a page that had another owner before is
    reported in `to_scrub` when it is handed out again. sequence_shards=n: page number p of a sequence gets an id g with g % n ==
    p % n, as required by a cache whose page_sequence_axis splits each sequence's pages over n devices. window_tokens: the layers
    see at most this many tokens; `release` gives back what the next token doesn't see, and a prefix needs only what it sees.

    A pool serves one cache of one model on one data-parallel shard. Page ids are local to the pool: a caller with several shards
    keeps a pool for each and chooses the shard of each sequence. A pool is not thread-safe.

    A call that raises changes nothing. Errors: CapacityError when too few pages are left; UnknownNameError for an unknown
    sequence; InputError and InputTypeError for arguments.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        max_pages_per_sequence: int | None = None,
        prefix_sharing: bool = True,
        scrub_on_free: bool = False,
        sequence_shards: int = 1,
        window_tokens: int | None = None,
    ) -> None:
        self.pages = whole_number("pages", pages, 1)
        self.page_size = whole_number("page_size", page_size, 1)
        if self.pages * self.page_size > _SLOTS:
            raise InputError(
                f"{shown(pages)} pages of {shown(page_size)} tokens; wanted at most 2**31 - 1 slots (int32)."
            )
        self.sequence_shards = whole_number("sequence_shards", sequence_shards, 1)
        if self.pages % self.sequence_shards:
            raise InputError(
                f"{self.pages} pages for sequence_shards={self.sequence_shards}; wanted a multiple, for equal shards."
            )
        if max_pages_per_sequence is not None:
            max_pages_per_sequence = whole_number("max_pages_per_sequence", max_pages_per_sequence, 1)
        self.max_pages_per_sequence = max_pages_per_sequence
        self.window_tokens = None if window_tokens is None else whole_number("window_tokens", window_tokens, 1)
        self._window = Window(self.window_tokens, self.page_size)
        self.prefix_sharing = bool(prefix_sharing)
        self.scrub_on_free = bool(scrub_on_free)
        self._sequences: dict[Hashable, SequenceState] = {}
        self._index = PrefixIndex(self.page_size, self.sequence_shards)
        self._owners = PageOwners(self.pages, self._index)

    # -- growing sequences ---------------------------------------------------------------------------------------------

    def alloc(self, sequence: Hashable, tokens: int) -> Growth:
        """Give a sequence, existing or new, pages for `tokens` more tokens; its length doesn't change.

        The next `tokens` tokens then need no new page, unless the sequence is forked first.
        """
        tokens = whole_number("tokens", tokens, 0)
        state = self._find(sequence) or SequenceState()
        growth = self._grow(sequence, state, tokens)
        self._sequences[sequence] = state
        return growth

    def append(self, sequence: Hashable, token_ids: Iterable[int]) -> Growth:
        """Append these tokens to a sequence, with new pages where they are needed."""
        state, ids = self._get(sequence), token_array(token_ids)
        growth = self._grow(sequence, state, len(ids))
        if self.prefix_sharing and len(state.tokens) == state.length:
            state.tokens.extend(ids)
        state.length += len(ids)
        return growth

    def append_count(self, sequence: Hashable, tokens: int) -> Growth:
        """Append tokens whose ids aren't known. Pages from there on are never shared by prefix."""
        state, tokens = self._get(sequence), whole_number("tokens", tokens, 0)
        growth = self._grow(sequence, state, tokens)
        state.length += tokens
        return growth

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Cut a sequence to its first `length` tokens, for example after rejected speculative tokens; pages beyond them are given
        back. Errors: InputError for a length at which the next token would see pages that were released."""
        state, length = self._truncated(sequence, length)
        state.length = length
        keep = -(-length // self.page_size)
        self._owners.release(state.pages[keep:])
        del state.pages[keep:], state.tokens[length:], state.keys[length // self.page_size :]

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Start `child` with all tokens of `parent`, on the same pages. Room without tokens stays with the parent."""
        state = self._get(parent)
        self._must_be_new(child)
        new = state.copy(-(-state.length // self.page_size))
        self._owners.retain(new.current_pages)
        self._sequences[child] = new

    def free(self, sequence: Hashable) -> None:
        """Give back all pages of a sequence and forget it."""
        pages = self._get(sequence).current_pages
        del self._sequences[sequence]
        self._owners.release(pages)

    def release(self, sequence: Hashable) -> int:
        """Give back the pages that no later token of the sequence sees; return how many. Without a window there are none.

        In the page table they become padding. Sequences that share them keep them, and published pages can still be matched. Call
        this once the step that writes the sequence's last tokens has its page table, and after `publish` and `truncate`.
        """
        state = self._get(sequence)
        first = self._window.first_visible_page(state.length)
        count = first - state.released
        if count > 0:
            self._owners.release(state.pages[state.released : first])
            state.pages[state.released : first] = array("i", [self.pages]) * count
            state.released = first
        return max(0, count)

    def resume(self, sequence: Hashable, token_ids: Iterable[int], length: int | None = None) -> Growth:
        """Start a sequence whose tokens the caller restores instead of computing them, as after preemption, with pages for them.

        length: of the sequence, if the ids of only its first tokens are known; default: as many as there are ids.
        """
        ids, length = self._resumed(sequence, token_ids, length)
        state = SequenceState()
        growth = self._grow(sequence, state, length)
        state.length, state.tokens = length, ids if self.prefix_sharing else ids[:0]
        self._sequences[sequence] = state
        return growth

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def publish(self, sequence: Hashable) -> None:
        """Let other sequences find this sequence's whole pages from now on. The device must have written all its tokens.

        This is a step of its own because sequences of one step may run in any order: none may read what another is about to
        write.
        """
        state = self._get(sequence)
        if self.prefix_sharing:
            self._index.insert(state.tokens, state.keys, state.pages, state.released)

    def match(self, token_ids: Iterable[int]) -> PrefixMatch:
        """The longest published prefix of these tokens, in whole pages; with a window, only the pages that its next token sees.
        Nothing changes, and nothing is reserved for the caller."""
        keys, pages = self._index.walk(token_array(token_ids), self._window)
        return PrefixMatch(len(keys) * self.page_size, tuple(pages))

    def adopt(self, sequence: Hashable, token_ids: Iterable[int], tokens: int = 0) -> Growth:
        """Start a sequence on the longest published prefix of these tokens, with pages for `tokens` more after it.

        `matched` in the result is the sequence's length. Leave out a prompt's last token, because its query has to run.
        """
        tokens = whole_number("tokens", tokens, 0)
        state, pages = self._matched_prefix(sequence, token_array(token_ids))
        matched = state.length
        growth = self._grow(sequence, state, tokens, prefix_pages=pages)
        self._sequences[sequence] = state
        return growth._replace(matched=matched)

    # -- for the device -----------------------------------------------------------------------------------------------

    def page_table(self, sequences: Sequence[Hashable | None], width: int | None = None) -> np.ndarray:
        """int32 [sequences, width]: the pages of each sequence, padded with the id `pages`. No page has that id; scatters drop
        what goes to it. It also replaces pages that were released. A row is empty where None stands for a sequence. `width`
        defaults to max_pages_per_sequence.
        """
        if width is None and self.max_pages_per_sequence is None:
            raise InputError("page_table has no width. Hint: pass width= here or max_pages_per_sequence= to the pool.")
        width = whole_number("width", self.max_pages_per_sequence if width is None else width, 0)
        states = [None if sequence is None else self._get(sequence) for sequence in sequences]
        for sequence, state in zip(sequences, states, strict=True):
            if state is not None and len(state.pages) > width:
                raise InputError(
                    f"sequence {shown(sequence)} has {len(state.pages)} pages; the table's width is {width}. "
                    f"Hint: width={len(state.pages)}, or max_pages_per_sequence={width} for the pool."
                )
        table = np.full((len(states), width), self.pages, np.int32)
        for row, state in zip(table, states, strict=True):
            if state is not None:
                row[: len(state.pages)] = state.pages
        return table

    # -- contents and checks ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        owners = self._owners
        counts = f"{len(owners.references)} used, {owners.free} free, {sum(map(len, self._index.unused))} cached"
        return f"PagePool({self.pages} pages of {self.page_size}: {counts}; {len(self)} sequences)"

    @property
    def available(self) -> int:
        """How many pages can be handed out: free and cached ones."""
        return self._owners.available

    def pages_of(self, sequence: Hashable) -> tuple[int, ...]:
        """The pages of a sequence in the order of its tokens; the id `pages` replaces those that were released."""
        return tuple(self._get(sequence).pages)

    def counts(self) -> PageCounts:
        """How many pages are used, free and cached, and how many slots of used pages are empty. Goes through all tables."""
        filled: dict[int, int] = {}
        for state in self._sequences.values():
            whole, rest = divmod(state.length, self.page_size)
            filled.update(dict.fromkeys(state.pages[state.released : whole], self.page_size))
            if rest:
                filled[state.pages[whole]] = max(rest, filled.get(state.pages[whole], 0))
        used = len(self._owners.references)
        padding = used * self.page_size - sum(filled.values())
        return PageCounts(used, self._owners.free, sum(map(len, self._index.unused)), padding)

    def check(self) -> None:
        """Prove that no page leaks or is shared wrongly. Errors: AttnOpsError, which names the page and what is wrong with it."""
        check_pool(self._owners, self._sequences, self._window)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _grow(self, sequence: Hashable, state: SequenceState, tokens: int, prefix_pages: Sequence[int] = ()) -> Growth:
        """Allocate pages for more tokens, or raise before anything changes; `prefix_pages`: the state's pages that aren't counted
        yet."""
        owners, inside = self._owners, state.length // self.page_size
        shards, last, copied = self._allocation(sequence, state, tokens, prefix_pages)
        owners.retain(prefix_pages)
        taken = [owners.take(shard) for shard in shards]
        new = [page for page, _ in taken]
        copies: tuple[tuple[int, int], ...] = ()
        if last is not None and copied:
            copies = ((last, new[0]),)
            owners.release([last])
            state.pages[inside] = new[0]
        elif last is not None:
            self._index.remove(last)
        state.pages.extend(new[copied:])
        # A copy overwrites its whole page, so its destination needs no zeros.
        zeroed = tuple(page for page, old in taken[copied:] if old) if self.scrub_on_free else ()
        return Growth(tuple(new), copies, zeroed)
