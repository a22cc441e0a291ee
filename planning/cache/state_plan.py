"""StatePlan: the slots of layers that keep states, their memory on each device, and reasons against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..text import bytes_text
from .cache_arrays import CacheArrays
from .layer_groups import LayerGroup

__all__ = ["StatePlan"]


@dataclass(frozen=True, kw_only=True)
class StatePlan(CacheArrays):
    """The plan of a group of layers with states. A slot holds one state of one sequence in every layer of the group.

    slots: those of the whole cache; ids count from 0 in each shard.
    """

    keeps: ClassVar[Literal["pages", "states"]] = "states"

    slots: int

    @property
    def declared(self) -> LayerGroup:
        """The group's declaration."""
        return self.cache.groups[0]

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the arrays that a layer keeps."""
        return tuple(one.label for one in self.declared.states or ())

    @property
    def drafts(self) -> int:
        """How many last tokens of a sequence can be rejected."""
        return self.declared.drafts or 0

    @property
    def slots_per_sequence(self) -> int:
        """Slots of a sequence: of its state, and of the state before each token that can be rejected."""
        return self.declared.slots_per_sequence

    @property
    def snapshot_tokens(self) -> int | None:
        """A prefix's state can be kept at multiples of this number of tokens; None: never."""
        return None if self.declared.snapshots is None else self.declared.snapshots * self.cache.page_size

    @property
    def local_slots(self) -> int:
        """Slots per shard. Slot ids count from 0 in each shard; this number is the id of padding."""
        return self.slots // self.shards

    @property
    def sequences(self) -> int:
        """Sequences that fit, of any length."""
        return self.local_slots // self.slots_per_sequence * self.shards

    @property
    def snapshot_slots(self) -> int:
        """Slots beyond those of max_sequences, for states of prefixes."""
        return max(0, self.slots - self.cache.max_sequences * self.slots_per_sequence)

    @property
    def slot_bytes(self) -> int:
        """Bytes per device of one slot, in all layers of the group."""
        return self.bytes_of(*self.states) // max(1, self.local_slots)

    @property
    def sequence_bytes(self) -> int:
        """Bytes per device of one sequence, whatever its length."""
        return self.slots_per_sequence * self.slot_bytes

    def describe(self) -> str:
        """The slots in one line: how many, of what, and for how many sequences."""
        declared = (
            f"{one.label} {'x'.join(map(str, one.shape))} {one.dtype_in(self.cache.dtype)}"
            for one in self.declared.states or ()
        )
        per_shard = "" if self.shards == 1 else f", {self.local_slots} on each of {self.shards} shards"
        many = f"{self.slots_per_sequence} per sequence" + (
            f" ({self.drafts} draft{'s' * (self.drafts > 1)})" if self.drafts else ""
        )
        kept = (
            ""
            if self.snapshot_tokens is None
            else f", {self.snapshot_slots} for snapshots every {self.snapshot_tokens} tokens"
        )
        return (
            f"{', '.join(declared)}: {self.slots} slots{per_shard}, {many}{kept}: {self.sequences} sequences; "
            f"{bytes_text(self.bytes_of(*self.states))} per device"
        )

    def group_text(self, own_geometry: bool) -> str:
        """The line of one of several groups, after its layers."""
        return f", {self.describe()}"

    def group_dict(self, stored_layers: list[int]) -> dict[str, Any]:
        """The values of one of several groups, besides its layers."""
        return {
            "kind": "state",
            "states": {
                one.label: {"shape": list(one.shape), "dtype": one.dtype_in(self.cache.dtype)}
                for one in self.declared.states or ()
            },
            "drafts": self.drafts,
            "snapshot_tokens": self.snapshot_tokens,
            "slots": self.slots,
            "slots_per_shard": self.local_slots,
            "slots_per_sequence": self.slots_per_sequence,
            "snapshot_slots": self.snapshot_slots,
            "sequences": self.sequences,
            "bytes_of_states": self.bytes_of(*self.states),
            "bytes_per_sequence": self.sequence_bytes,
        }
