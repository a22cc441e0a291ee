"""CacheNumbers: the numbers and arrays of a planned KV cache, or of one group of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from ...errors import InputError
from ...sharding import FittedSpec, MeshAxis
from ..capability import Reason
from .cache_fields import CacheFields
from .window_pages import pages_of_one, sequences_on

__all__ = ["CacheArray", "CacheNumbers"]


class CacheArray(NamedTuple):
    """An array of the cache or of a batch: its spec, the number of copies (one per layer), and bytes of one copy per device.

    The bytes include the device's padding, which those of the fitted spec don't. `group`: its group of layers, if there are
    several.
    """

    fitted: FittedSpec
    dtype: str
    copies: int
    device_bytes: int
    group: int | None = None

    @property
    def name(self) -> str:
        return self.fitted.tensor

    @property
    def label(self) -> str:
        """The name, with the group if there are several."""
        return self.name if self.group is None else f"{self.name}[{self.group}]"


@dataclass(frozen=True)
class CacheNumbers:
    """The data of a CachePlan. `refused` has every reason against the cache; () if it can be created.

    pages: pages of the whole cache. shards: the number of parts into which `pages_axis` splits pages and batch.
    sequence_shards: the devices of each shard over which the pages of one sequence are distributed round-robin. kv_repeat: how
    many times each kv head is stored. scalar_limit, memory_limit: bytes per device, None if unknown.

    If the cache has several groups of layers, `parts` are the plans of the groups, each for a separate cache, and `pages` are
    those of all groups; `group` of a part is (its number, the number of groups).
    """

    cache: CacheFields
    mesh: tuple[MeshAxis, ...]
    platform: str
    device_kind: str
    pages: int
    shards: int
    sequence_shards: int
    kv_repeat: int
    arrays: tuple[CacheArray, ...]
    scalar_limit: int | None
    memory_limit: int | None
    refused: tuple[Reason, ...]
    notes: tuple[str, ...]
    parts: tuple[Self, ...] = ()
    group: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> CacheArray:
        array = self.get(name)
        if array is None:
            raise KeyError(name)
        return array

    def get(self, name: str) -> CacheArray | None:
        """An array by name, or None if there is none. Errors: InputError if each group has its own."""
        self.one_group(f"plan[{name!r}]")
        return next((array for array in self.arrays if array.name == name), None)

    @property
    def groups(self) -> tuple[Self, ...]:
        """The plan of each group of layers; the plan itself if there is one group."""
        return self.parts or (self,)

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
        group = self.groups[0]
        return group.get("key_pages") or group["kv_pages"]

    @property
    def idle_axes(self) -> tuple[MeshAxis, ...]:
        """The mesh axes along which all devices hold the same pages."""
        pages = self.pages_array.fitted
        used = {*pages.axes(0), *pages.axes(self.heads_at)}
        return tuple(a for a in self.mesh if a.size > 1 and a.kind != "manual" and a.name not in used)

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
    def local_sequences(self) -> int:
        """Rows of the batch per shard."""
        return self.cache.max_sequences // self.shards

    @property
    def token_bytes(self) -> int | None:
        """Bytes per device and layer of a step's keys and values for max_tokens tokens; None if that isn't declared."""
        if self.cache.max_tokens is None:
            return None
        if self.parts:  # layers run one after another
            return max(size for part in self.parts if (size := part.token_bytes) is not None)
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
        return min(
            sequences_on(part.local_pages, part.cache, part.shards, part.sequence_shards) * part.shards
            for part in self.groups
        )

    @property
    def tokens(self) -> int:
        """Tokens that fit in all pages. With a window that is more, as long sequences free pages."""
        return min(
            max(
                part.pages * part.cache.page_size,
                part.sequences * part.cache.max_length * (part.window_tokens is not None),
            )
            for part in self.groups
        )

    @property
    def window_tokens(self) -> int | None:
        """The maximum number of tokens that a query of the one group sees."""
        return self.cache.window_tokens

    @property
    def most_lost(self) -> int:
        """The maximum number of empty token slots in last pages when the cache has all sequences."""
        return self.cache.max_sequences * (self.cache.page_size - 1)

    @property
    def page_table_bytes(self) -> int:
        """Bytes per device of a page table in scalar memory. Each group of layers has one."""
        return 4 * self.local_sequences * self.table_width // self.sequence_shards

    def bytes_of(self, *names: str) -> int:
        """Bytes per device of the arrays with these names, or of all."""
        return sum(array.copies * array.device_bytes for array in self.arrays if not names or array.name in names)

    @property
    def bytes_per_device(self) -> int:
        """Bytes per device of pages, scales and one batch's arrays."""
        return self.bytes_of()
