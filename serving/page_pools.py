"""The pools of a cache whose layers are in groups: each has its own pages or slots; sequences grow in all of them together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import InputError
from .checked_arguments import token_array, whole_number
from .page_pool import PagePool
from .prefix_index import chain_keys
from .results import Growth, PageCounts, PrefixMatch, SlotCounts, SlotGrowth, SlotMatch
from .state_slots import StateSlots

if TYPE_CHECKING:
    from ..planning.cache.cache_plan import CachePlan

__all__ = ["PagePools"]

_T = TypeVar("_T")


class PagePools:
    """A PagePool for each group of layers with pages, a StateSlots for each with states. Every call goes to all of them and
    returns a tuple in their order.

    A prefix matches as far as every group has the pages that its layers see, or a state there.
    A call that raises changes none of the pools.
    Errors: those of PagePool; InputError for pools that can't hold the same sequences.
    """

    def __init__(self, pools: Sequence[PagePool | StateSlots]) -> None:
        self.pools = tuple(pools)
        if not self.pools:
            raise InputError("PagePools got no pools; wanted one for each group of layers.")
        alike = {(pool.page_size, pool.prefix_sharing, len(pool)) for pool in self.pools}
        if len(alike) > 1 or len(self):
            raise InputError(
                "the pools of one cache must have the same page_size and prefix_sharing, and no sequences yet."
            )

    @classmethod
    def of(cls, plan: CachePlan, *, prefix_sharing: bool = True) -> PagePools:
        """The pools of one data-parallel shard, as the plan of a cache describes them."""
        return cls([_pool_of(group, prefix_sharing) for group in plan.groups])

    # -- growing sequences ---------------------------------------------------------------------------------------------

    def alloc(self, sequence: Hashable, tokens: int) -> tuple[Growth | SlotGrowth, ...]:
        """See PagePool.alloc. With a window, ask only for the next step's tokens: unused room isn't given back."""
        tokens = whole_number("tokens", tokens, 0)
        self._could_grow(sequence, tokens, new=True)
        return self._on_all(lambda pool: pool.alloc(sequence, tokens))

    def append(self, sequence: Hashable, token_ids: Iterable[int]) -> tuple[Growth | SlotGrowth, ...]:
        """See PagePool.append; with states, all tokens of a step in one call."""
        ids = token_array(token_ids)
        self._could_grow(sequence, len(ids))
        return self._on_all(lambda pool: pool.append(sequence, ids))

    def append_count(self, sequence: Hashable, tokens: int) -> tuple[Growth | SlotGrowth, ...]:
        """See PagePool.append_count."""
        tokens = whole_number("tokens", tokens, 0)
        self._could_grow(sequence, tokens)
        return self._on_all(lambda pool: pool.append_count(sequence, tokens))

    def truncate(self, sequence: Hashable, length: int) -> None:
        """See PagePool.truncate; with states, only as far as they are kept."""
        self._on_all(lambda pool: pool._truncated(sequence, length))
        self._on_all(lambda pool: pool.truncate(sequence, length))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """See PagePool.fork."""
        self._on_all(lambda pool: pool.fork(parent, child))

    def free(self, sequence: Hashable) -> None:
        """See PagePool.free."""
        self._on_all(lambda pool: pool.free(sequence))

    def release(self, sequence: Hashable) -> tuple[int, ...]:
        """See PagePool.release: how many pages each pool got back; 0 where the layers see all tokens."""
        return self._on_all(lambda pool: pool.release(sequence))

    def resume(
        self, sequence: Hashable, token_ids: Iterable[int], length: int | None = None
    ) -> tuple[Growth | SlotGrowth, ...]:
        """See PagePool.resume."""
        ids, length = self.pools[0]._resumed(sequence, token_ids, length)
        for pool in self.pools:
            pool._could_resume(sequence, ids, length)
        return self._on_all(lambda pool: pool.resume(sequence, ids, length))

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def publish(self, sequence: Hashable) -> None:
        """See PagePool.publish. Call it before `release`: pages released unpublished can't be found again."""
        self._on_all(lambda pool: pool.publish(sequence))

    def match(self, token_ids: Iterable[int]) -> tuple[PrefixMatch | SlotMatch, ...]:
        """See PagePool.match: the longest prefix that all pools have."""
        common = self._common(token_array(token_ids))
        return self._on_all(lambda pool: pool.match(common))

    def adopt(self, sequence: Hashable, token_ids: Iterable[int], tokens: int = 0) -> tuple[Growth | SlotGrowth, ...]:
        """See PagePool.adopt: `matched` is the same in all pools."""
        tokens, common = whole_number("tokens", tokens, 0), self._common(token_array(token_ids))
        for pool in self.pools:
            pool._could_adopt(sequence, common, tokens)
        return self._on_all(lambda pool: pool.adopt(sequence, common, tokens))

    # -- for the device -----------------------------------------------------------------------------------------------

    def page_tables(self, sequences: Sequence[Hashable | None], width: int | None = None) -> tuple[np.ndarray, ...]:
        """See PagePool.page_table: of each group with pages."""
        return tuple(pool.page_table(sequences, width) for pool in self.pools if isinstance(pool, PagePool))

    def slot_tables(
        self, sequences: Sequence[Hashable | None], q_lens: Sequence[int]
    ) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """See StateSlots.slot_tables: of each group with states."""
        return tuple(pool.slot_tables(sequences, q_lens) for pool in self.pools if isinstance(pool, StateSlots))

    def tokens_to_snapshot(self, sequence: Hashable) -> int | None:
        """See StateSlots.tokens_to_snapshot: the fewest of all groups."""
        ends = [pool.tokens_to_snapshot(sequence) for pool in self.pools if isinstance(pool, StateSlots)]
        return min((end for end in ends if end is not None), default=None)

    def kv_lens(self, sequences: Sequence[Hashable | None]) -> np.ndarray:
        """See PagePool.kv_lens: the same for all pools."""
        return self.pools[0].kv_lens(sequences)

    # -- contents and checks ------------------------------------------------------------------------------------------

    def __contains__(self, sequence: Hashable) -> bool:
        """Whether a sequence is here."""
        return sequence in self.pools[0]

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.pools[0])

    def __repr__(self) -> str:
        return f"PagePools({', '.join(map(repr, self.pools))})"

    def counts(self) -> tuple[PageCounts | SlotCounts, ...]:
        """See PagePool.counts."""
        return self._on_all(lambda pool: pool.counts())

    def check(self) -> None:
        """See PagePool.check; also checks that the pools have the same sequences."""
        self._on_all(lambda pool: pool.check())
        first = self.pools[0]
        for pool in self.pools[1:]:
            lengths = [{name: state.length for name, state in member._sequences.items()} for member in (first, pool)]
            if lengths[0] != lengths[1]:
                raise InputError(
                    "the pools hold different sequences. Hint: make every call on PagePools, never on a single pool."
                )

    # -- internals ----------------------------------------------------------------------------------------------------

    def _on_all(self, call: Callable[[PagePool | StateSlots], _T]) -> tuple[_T, ...]:
        return tuple(call(pool) for pool in self.pools)

    def _could_grow(self, sequence: Hashable, tokens: int, *, new: bool = False) -> None:
        """Ask every pool before changing any. Errors: those of growing."""
        for pool in self.pools:
            pool._could_grow(sequence, tokens, new=new)

    def _common(self, ids: array[int]) -> array[int]:
        """The longest prefix of these tokens that all pools have."""
        size = self.pools[0].page_size
        keys = list(chain_keys(ids, size))
        count = max(set[int].intersection(*(pool._prefix_lengths(keys) for pool in self.pools)))
        return ids[: count * size]


def _pool_of(group: Any, prefix_sharing: bool) -> PagePool | StateSlots:
    """The pool of one group of layers on one data-parallel shard."""
    if not hasattr(group, "pages"):
        return StateSlots(
            group.local_slots,
            group.cache.page_size,
            drafts=group.drafts,
            snapshots=group.declared.snapshots,
            prefix_sharing=prefix_sharing,
            scrub_on_free=group.cache.scrub_on_free,
        )
    return PagePool(
        group.local_pages,
        group.cache.page_size,
        max_pages_per_sequence=group.table_width,
        prefix_sharing=prefix_sharing,
        scrub_on_free=group.cache.scrub_on_free,
        sequence_shards=group.sequence_shards,
        window_tokens=group.window_tokens,
    )
