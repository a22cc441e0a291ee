"""CacheLayers: the layers of a declared KV cache: their groups, and which of them have pages."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ...errors import ConfigError, InputError, shown
from ..unset_fields import UnsetFieldsModel
from .layer_groups import (
    LayerGroup,
    Layers,
    ReadsLayer,
    checked_layers,
    checked_numbers,
    checked_reads,
    layer_numbers,
)

__all__ = ["CacheLayers"]


class CacheLayers(UnsetFieldsModel):
    """The fields of KVCache that are about its layers."""

    layers: Annotated[
        Layers,
        BeforeValidator(checked_layers),
        Field(description="Number of layers; or groups of layers, each with its own window, pages and page table."),
    ]
    reads_layer: Annotated[
        ReadsLayer | None,
        BeforeValidator(lambda value: None if value is None else checked_reads(value)),
        Field(description="Layers without pages, and the earlier layer whose keys and values each reads, in pairs."),
    ] = None

    stateless_layers: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, lt=2**30)], ...] | None,
        BeforeValidator(lambda value: None if value is None else checked_numbers(value, "stateless_layers")),
        Field(description="Layers that keep nothing of a sequence, such as an MLP alone."),
    ] = None

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers; a single group if `layers` is a number."""
        return (LayerGroup(layers=self.layers),) if isinstance(self.layers, int) else self.layers

    @property
    def has_pages(self) -> bool:
        """Whether any layer has pages."""
        return isinstance(self.layers, int) or any(not group.of_states for group in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state."""
        return not isinstance(self.layers, int) and any(group.of_states for group in self.layers)

    @property
    def layer_count(self) -> int:
        """The number of layers: those of all groups, and those that keep nothing."""
        if isinstance(self.layers, int):
            return self.layers
        return len({number for layers in layer_numbers(self.layers) for number in layers}) + len(
            self.stateless_layers or ()
        )

    def group_of(self, layer: int) -> int:
        """The group of pages that a layer is in. Errors: InputError for a layer that the cache doesn't have, and for one without
        pages."""
        return self._group(layer, of_states=False)

    def state_group_of(self, layer: int) -> int:
        """The group of states that a layer is in. Errors: InputError for a layer that the cache doesn't have, and for one without
        a state."""
        return self._group(layer, of_states=True)

    def _group(self, layer: int, *, of_states: bool) -> int:
        numbers = [range(self.layers)] if isinstance(self.layers, int) else layer_numbers(self.layers)
        found = [number for number, layers in enumerate(numbers) if layer in layers]
        if right := [number for number in found if self.groups[number].of_states == of_states]:
            return right[0]
        if found or layer in (self.stateless_layers or ()):
            what, other = ("state", "pages") if of_states else ("pages", "a state")
            keeps = f"it keeps {other}" if found else "it keeps nothing"
            raise InputError(f"layer {shown(layer)} of the cache has no {what}: {keeps}.")
        raise InputError(
            f"layer={shown(layer)}; wanted 0 to {self.layer_count - 1}: the cache has {self.layer_count} layers."
        )

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        """(layer, group) of each element of a cache state's `layers`, in the order of the layers; a layer's pages come before its
        states. Layers that read another's pages have none."""
        numbers = [range(self.layers)] if isinstance(self.layers, int) else layer_numbers(self.layers)
        reading = {layer for layer, _ in self.reads_layer or ()}
        found = [
            (layer, group.of_states, number)
            for number, group in enumerate(self.groups)
            for layer in numbers[number]
            if group.of_states or layer not in reading
        ]
        return tuple((layer, number) for layer, _, number in sorted(found))

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """The layers that have pages, in order; those that read another layer's have none."""
        return tuple(layer for layer, number in self.entries if not self.groups[number].of_states)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state, in order."""
        return tuple(layer for layer, number in self.entries if self.groups[number].of_states)

    def layer_read(self, layer: int) -> int:
        """The layer whose pages a layer reads: itself, or the declared one."""
        return dict(self.reads_layer or ()).get(layer, layer)

    def place_of(self, layer: int) -> int:
        """The place in a cache state's `layers` of the pages that a layer reads. Errors: those of group_of."""
        if self.reads_layer is None and not self.has_states:
            return layer
        return self.entries.index((self.layer_read(layer), self.group_of(layer)))

    def state_place_of(self, layer: int) -> int:
        """The place in a cache state's `layers` of a layer's states. Errors: those of state_group_of."""
        return self.entries.index((layer, self.state_group_of(layer)))

    def places(self, group: int) -> tuple[int, ...]:
        """The places of a group's layers in a cache state's `layers`."""
        return tuple(place for place, (_, number) in enumerate(self.entries) if number == group)

    @property
    def window_tokens(self) -> int | None:
        """The window of a cache with one group: the maximum number of tokens that a query sees. Errors: ConfigError for several
        groups."""
        if isinstance(self.layers, int):
            return None
        if len(self.layers) > 1:
            raise ConfigError(
                f"the cache has {len(self.layers)} groups of layers; use the window_tokens of one of them."
            )
        return self.layers[0].window_tokens
