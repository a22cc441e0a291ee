"""CacheArrays: what the plan of any group of layers has: its arrays, their bytes, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from ...sharding import FittedSpec, MeshAxis
from ..capability import Reason
from .cache_fields import CacheFields

__all__ = ["CacheArray", "CacheArrays"]


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


@dataclass(frozen=True, kw_only=True)
class CacheArrays:
    """The data that plans of pages and of states have in common. `refused` has every reason against the cache; () if it can be
    created.

    shards: the number of parts into which `pages_axis` splits the arrays and the batch. If the cache has several groups of
    layers, `group` of a part is (its number, the number of groups). keeps: what a layer has of a sequence.
    """

    keeps: ClassVar[Literal["pages", "states"]]

    cache: CacheFields
    mesh: tuple[MeshAxis, ...]
    platform: str
    device_kind: str
    shards: int
    arrays: tuple[CacheArray, ...]
    refused: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    group: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> CacheArray:
        array = self.get(name)
        if array is None:
            raise KeyError(name)
        return array

    def get(self, name: str) -> CacheArray | None:
        """An array by name, or None if there is none."""
        return next((array for array in self.arrays if array.name == name), None)

    @property
    def local_sequences(self) -> int:
        """Rows of the batch per shard."""
        return self.cache.max_sequences // self.shards

    def bytes_of(self, *names: str) -> int:
        """Bytes per device of the arrays with these names, or of all."""
        return sum(array.copies * array.device_bytes for array in self.arrays if not names or array.name in names)

    @property
    def bytes_per_device(self) -> int:
        """Bytes per device of all arrays, those of one batch included."""
        return self.bytes_of()
