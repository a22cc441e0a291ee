"""CacheNumbers: the numbers and arrays of a planned KV cache, or of one group of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from ...errors import InputError
from ...sharding import MeshAxis
from ...sharding.mesh import unused_axes
from .cache_arrays import CacheArray, CacheArrays
from .state_plan import StatePlan
from .window_pages import pages_of_one, sequences_on

__all__ = ["CacheNumbers"]

_PAGES = ("key_pages", "value_pages", "kv_pages", "rope_pages", "key_scale", "value_scale")


@dataclass(frozen=True, kw_only=True)
class CacheNumbers(CacheArrays):
    """The data of a CachePlan.

    pages: pages of the whole cache. sequence_shards: the devices of each shard over which the pages of one sequence are
    distributed round-robin. kv_repeat: how many times each kv head is stored. scalar_limit, memory_limit: bytes per device, None
    if unknown.

    If the cache has several groups of layers, or layers with states, `parts` are the plans of the groups, each for a separate
    cache, and `pages` are those of all groups.
    """

    keeps: ClassVar[Literal["pages", "states"]] = "pages"

    pages: int
    sequence_shards: int
    kv_repeat: int
    scalar_limit: int | None
    memory_limit: int | None
    parts: tuple[CacheArrays, ...] = ()

    def get(self, name: str) -> CacheArray | None:
        """An array by name, or None if there is none. Errors: InputError if each group has its own."""
        self.one_group(f"plan[{name!r}]")
        return super().get(name)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The plan of each group of layers, a StatePlan for one of states; the plan itself if there is one group."""
        return self.parts or (self,)

    @property
    def page_groups(self) -> tuple[Self, ...]:
        """The plans of the groups with pages."""
        return tuple(part for part in self.groups if part.keeps == "pages")

    @property
    def state_groups(self) -> tuple[StatePlan, ...]:
        """The plans of the groups with states."""
        return tuple(part for part in self.groups if part.keeps == "states")

    def one_group(self, what: str) -> Self:
        """Return self. Errors: InputError for a plan of several groups, as `what` needs one."""
        if self.parts:
            raise InputError(
                f"{what} needs one group of layers, but the cache has {len(self.parts)}; use plan.groups[n]: "
                "cache.group_of(layer) gives n."
            )
        return self

    @property
    def pages_array(self) -> CacheArray:
        """The first array of pages: of keys, or of both keys and values."""
        group = self.page_groups[0]
        return group.get("key_pages") or group["kv_pages"]

    @property
    def idle_axes(self) -> tuple[MeshAxis, ...]:
        """The mesh axes along which all devices hold the same pages."""
        pages = self.pages_array.fitted
        used = {*pages.axes(0), *pages.axes(self.heads_at)}
        return unused_axes(self.mesh, used)

    @property
    def heads_at(self) -> int:
        """The dimension of the heads in an array of pages."""
        return self.cache.heads_at

    @property
    def stored_heads(self) -> int:
        """KV heads in the whole cache's arrays, including repeats."""
        return self.cache.kv_heads * self.kv_repeat

    @property
    def local_pages(self) -> int:
        """Pages per shard, on all of its sequence shards. Page ids count from 0 in each shard; this number is the id of
        padding."""
        return self.one_group("local_pages").pages // self.shards

    @property
    def table_width(self) -> int:
        """Pages per row of the page table: those of the longest sequence, with the same number on each sequence shard."""
        return -(-self.cache.table_width // self.sequence_shards) * self.sequence_shards

    @property
    def token_bytes(self) -> int | None:
        """Bytes per device and layer of a step's keys and values for max_tokens tokens; None if that isn't declared."""
        if self.cache.max_tokens is None:
            return None
        if self.parts:  # layers run one after another
            return max((size for part in self.page_groups if (size := part.token_bytes) is not None), default=None)
        heads = self.pages_array.fitted
        split = math.prod(axis.size for axis in self.mesh if axis.name in heads.axes(self.heads_at))
        local_heads = self.cache.kv_heads // (
            split if self.kv_repeat == 1 else 1
        )  # heads that are repeated arrive unrepeated and whole
        bytes_each = local_heads * self.cache.written_size * (4 if self.cache.dtype == "float32" else 2)
        return self.cache.max_tokens // self.shards * bytes_each

    @property
    def most_pages(self) -> int:
        """The maximum number of pages of one sequence: those of max_length tokens, or of a window and a step."""
        return pages_of_one(self.one_group("most_pages").cache, self.shards, self.sequence_shards)

    @property
    def sequences(self) -> int:
        """Sequences of max_length that fit."""
        by_pages = (
            sequences_on(part.local_pages, part.cache, part.shards, part.sequence_shards) * part.shards
            for part in self.page_groups
        )
        return min((*by_pages, *(part.sequences for part in self.state_groups)))

    @property
    def tokens(self) -> int:
        """Tokens that fit in all pages. With a window that is more, as long sequences free pages; states hold any number."""
        if not self.page_groups:
            return self.sequences * self.cache.max_length
        return min(
            max(
                part.pages * part.cache.page_size,
                part.sequences * part.cache.max_length * (part.window_tokens is not None),
            )
            for part in self.page_groups
        )

    @property
    def sequence_bytes(self) -> int:
        """Bytes per device of one sequence's states, whatever its length."""
        return sum(part.sequence_bytes for part in self.state_groups)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per device that one more token of a sequence takes in pages, while no window is passed."""
        return sum(
            part.bytes_of(*_PAGES) / (part.local_pages * part.cache.page_size)
            for part in self.page_groups
            if part.pages
        )

    def page_bytes(self, tokens: int) -> float:
        """Bytes per device of the pages of one sequence of so many tokens."""
        total = 0.0
        for part in self.page_groups:
            pages = min(-(-tokens // part.cache.page_size), part.most_pages)
            total += pages * part.bytes_of(*_PAGES) / part.local_pages if part.pages else 0
        return total

    @property
    def larger_from(self) -> int | None:
        """The length from which a sequence's pages take more bytes than its states; None if there is none up to max_length."""
        size, pages = self.cache.page_size, -(-self.cache.max_length // self.cache.page_size)
        if not self.page_groups or self.page_bytes(self.cache.max_length) <= self.sequence_bytes:
            return None
        low, high = 0, pages  # pages so many are enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.page_bytes(middle * size) > self.sequence_bytes else (middle, high)
        return low * size + 1

    @property
    def window_tokens(self) -> int | None:
        """The maximum number of tokens that a query of the one group sees."""
        return self.cache.window_tokens

    @property
    def most_lost(self) -> int:
        """The maximum number of empty token slots in last pages when the cache has all sequences."""
        return self.cache.max_sequences * (self.cache.page_size - 1) if self.cache.has_pages else 0

    @property
    def page_table_bytes(self) -> int:
        """Bytes per device of a page table in scalar memory. Each group of layers has one."""
        return 4 * self.local_sequences * self.table_width // self.sequence_shards if self.cache.has_pages else 0
