"""CacheLayers: the layers of a declared KV cache: their groups, and which of them have pages."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ...errors import ConfigError, InputError, shown
from ..unset_fields import UnsetFieldsModel
from .layer_groups import LayerGroup, Layers, ReadsLayer, checked_layers, checked_reads, layer_numbers

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

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers; a single group if `layers` is a number."""
        return (LayerGroup(layers=self.layers),) if isinstance(self.layers, int) else self.layers

    @property
    def layer_count(self) -> int:
        """The number of layers in all groups."""
        return self.layers if isinstance(self.layers, int) else sum(map(len, layer_numbers(self.layers)))

    def group_of(self, layer: int) -> int:
        """The group that a layer is in. Errors: InputError for a layer that the cache doesn't have."""
        for number, layers in enumerate(
            [range(self.layers)] if isinstance(self.layers, int) else layer_numbers(self.layers)
        ):
            if layer in layers:
                return number
        raise InputError(
            f"layer={shown(layer)}; wanted 0 to {self.layer_count - 1}: the cache has {self.layer_count} layers."
        )

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """The layers that have pages, in order; those that read another layer's have none."""
        without = {layer for layer, _ in self.reads_layer or ()}
        return tuple(layer for layer in range(self.layer_count) if layer not in without)

    def layer_read(self, layer: int) -> int:
        """The layer whose pages a layer reads: itself, or the declared one."""
        return dict(self.reads_layer or ()).get(layer, layer)

    def place_of(self, layer: int) -> int:
        """The place, among the layers that have pages, of the one that a layer reads."""
        return layer if self.reads_layer is None else self.stored_layers.index(self.layer_read(layer))

    def places(self, group: int) -> tuple[int, ...]:
        """The places of a group's layers that have pages, among all those."""
        numbers = range(self.layers) if isinstance(self.layers, int) else layer_numbers(self.layers)[group]
        return tuple(self.place_of(layer) for layer in numbers if self.layer_read(layer) == layer)

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
