"""CacheNumbers: a planned KV cache in numbers and arrays, whole or of one group of its layers."""

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
    """An array of the cache or of a batch over it: where it lies, how many there are (one a layer), bytes of one on a device.

    The bytes count what a device pads, which the fitted spec's own don't. `group` is that of its layers, where there are several.
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
        """The name, with the group where there are several."""
        return self.name if self.group is None else f"{self.name}[{self.group}]"


@dataclass(frozen=True)
class CacheNumbers:
    """What a CachePlan is made of. `refused` has every reason against the cache; () where it can be made.

    `pages` are those of the whole cache, `shards` the parts in which `pages_axis` splits them and the batch, `sequence_shards`
    the devices of each that the pages of one sequence are dealt to in turn, `kv_repeat` how often a kv head is stored.
    `scalar_limit` and `memory_limit` are bytes of a device, None where they aren't known.

    Of a cache whose layers are in several groups, `parts` are the plans of the groups, each that of a cache of its own, and
    `pages` are those of all; `group` of such a part is (its number, how many there are).
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
        """An array by its name, None where the cache has none of that name. Errors: InputError where each group has one."""
        self.one_group(f"plan[{name!r}]")
        return next((array for array in self.arrays if array.name == name), None)

    @property
    def groups(self) -> tuple[Self, ...]:
        """The plan of each group of layers; itself where there is one."""
        return self.parts or (self,)

    def one_group(self, what: str) -> Self:
        """Itself. Errors: InputError for the plan of several groups, where `what` is of one."""
        if self.parts:
            raise InputError(
                f"{what} is of one group of layers, and the cache has {len(self.parts)}; wanted plan.groups[n]: "
                "cache.group_of(layer) says which."
            )
        return self

    @property
    def pages_array(self) -> CacheArray:
        """The first array of pages: of keys, or of both keys and values."""
        one = self.groups[0]
        return one.get("key_pages") or one["kv_pages"]

    @property
    def idle_axes(self) -> tuple[MeshAxis, ...]:
        """Mesh axes over which the devices all hold the same pages."""
        pages = self.pages_array.fitted
        used = {*pages.axes(0), *pages.axes(self.heads_at)}
        return tuple(a for a in self.mesh if a.size > 1 and a.kind != "manual" and a.name not in used)

    @property
    def heads_at(self) -> int:
        """The dimension of the heads in an array of pages."""
        return self.cache.heads_at

    @property
    def stored_heads(self) -> int:
        """KV heads of the whole cache's arrays, repeats counted."""
        return self.cache.kv_heads * self.kv_repeat

    @property
    def local_pages(self) -> int:
        """Pages of a shard, on all of its sequence shards. Page ids count from 0 in each; this number itself is the id of
        padding."""
        return self.one_group("local_pages").pages // self.shards

    @property
    def table_width(self) -> int:
        """Pages of a row of the page table: those of the longest sequence, as many on each sequence shard."""
        return -(-self.cache.table_width // self.sequence_shards) * self.sequence_shards

    @property
    def local_sequences(self) -> int:
        """Rows of a shard's batch."""
        return self.cache.max_sequences // self.shards

    @property
    def token_bytes(self) -> int | None:
        """Bytes a device of a step's keys and values, as many as max_tokens allows, in a layer; None where it isn't declared."""
        if self.cache.max_tokens is None:
            return None
        heads = self.pages_array.fitted
        split = math.prod(axis.size for axis in self.mesh if axis.name in heads.axes(self.heads_at))
        own = self.cache.kv_heads // (
            split if self.kv_repeat == 1 else 1
        )  # repeated heads come as declared, all of them
        each = own * (self.cache.head_dim + self.cache.value_size) * (4 if self.cache.dtype == "float32" else 2)
        return self.cache.max_tokens // self.shards * each

    @property
    def most_pages(self) -> int:
        """Pages that one sequence has at most: those of max_length tokens, or of a window and a step."""
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
        """Tokens that fit into all pages; with a window more, as long sequences give pages back."""
        return min(
            max(
                part.pages * part.cache.page_size,
                part.sequences * part.cache.max_length * (part.window_tokens is not None),
            )
            for part in self.groups
        )

    @property
    def window_tokens(self) -> int | None:
        """Of the one group: tokens that a query sees at most."""
        return self.cache.window_tokens

    @property
    def most_lost(self) -> int:
        """Tokens' places that last pages leave empty at most, while all sequences are there."""
        return self.cache.max_sequences * (self.cache.page_size - 1)

    @property
    def page_table_bytes(self) -> int:
        """Of a device's page table, as scalar memory holds it; each group of layers has one."""
        return 4 * self.local_sequences * self.table_width // self.sequence_shards

    def bytes_of(self, *names: str) -> int:
        """Bytes a device of the arrays of these names, or of all."""
        return sum(array.copies * array.device_bytes for array in self.arrays if not names or array.name in names)

    @property
    def bytes_per_device(self) -> int:
        """Of pages, scales and one batch's arrays."""
        return self.bytes_of()
