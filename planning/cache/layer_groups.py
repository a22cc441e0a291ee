"""LayerGroup: layers of a KV cache that share a page table, as they see the same window of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from ...errors import a_type, is_whole, shown
from ..unset_fields import UnsetFieldsModel, explain_validation

__all__ = [
    "GEOMETRY",
    "CacheKind",
    "LayerGroup",
    "Layers",
    "ReadsLayer",
    "checked_layers",
    "checked_reads",
    "groups_problem",
    "layer_groups",
    "layer_numbers",
    "reads_problem",
]

_LIMIT = 2**30

_Size = Annotated[int, Field(strict=True, ge=1, le=_LIMIT)]
_Number = Annotated[int, Field(strict=True, ge=0, lt=_LIMIT)]


CacheKind = Literal["kv", "latent"]
GEOMETRY = ("kind", "kv_heads", "head_dim", "value_dim", "dtype")
"""The fields of a cache that its groups of layers may have of their own."""


class LayerGroup(UnsetFieldsModel):
    """Layers with their own pages and page table.

    layers: their number, assigned in the order of the groups; or a list of layer numbers, from 0. window_tokens: the maximum
    number of tokens that a query sees, including itself, so that older pages can be freed; None: all. pages: pages of this
    group over all devices, unless the cache declares bytes_per_device. kind, kv_heads, head_dim, value_dim, dtype: of these
    layers; the cache's, if they aren't given.
    """

    model_config = ConfigDict(title="cache.layers")

    layers: Annotated[
        _Size | tuple[_Number, ...],
        Field(description="Number of layers, in the order of the groups; or a list of layer numbers."),
    ]
    window_tokens: Annotated[
        _Size | None, Field(description="Maximum number of tokens that a query sees, including itself; null: all.")
    ] = None
    pages: Annotated[
        _Size | None, Field(description="Pages of this group, over all devices; or use bytes_per_device.")
    ] = None
    kind: Annotated[CacheKind | None, Field(description="What these layers store; null: the cache's kind.")] = None
    kv_heads: Annotated[_Size | None, Field(description="KV heads of these layers; null: the cache's.")] = None
    head_dim: Annotated[_Size | None, Field(description="Head dimension of these layers; null: the cache's.")] = None
    value_dim: Annotated[_Size | None, Field(description="That of their values; null: the cache's.")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Field(description="Dtype of these layers; null: the cache's.")
    ] = None

    @property
    def geometry(self) -> dict[str, Any]:
        """The fields of a cache that the group has of its own."""
        return {name: value for name in GEOMETRY if (value := getattr(self, name)) is not None}

    @field_validator("layers", mode="before")
    @classmethod
    def _how_many_or_which(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if value and all(is_whole(n, 0, _LIMIT) for n in value) and len(set(value)) == len(value):
                return tuple(value)
        elif is_whole(value, 1, _LIMIT):
            return value
        raise ValueError(
            f"layers={shown(value)}; wanted a number of layers, at least 1, or a list of distinct layer numbers"
        )


Layers = _Size | tuple[LayerGroup, ...]
ReadsLayer = tuple[tuple[_Number, _Number], ...]
"""Pairs of a layer without pages and the layer whose keys and values it reads."""


def checked_reads(value: Any) -> Any:
    """Check `reads_layer`: pairs, or a mapping of them, sorted by layer. Errors: ValueError."""
    pairs = (
        list(value.items() if isinstance(value, Mapping) else value)
        if isinstance(value, Mapping | list | tuple)
        else [()]
    )
    # Names in a JSON object are strings.
    named = isinstance(value, Mapping)
    pairs = [(int(a), b) if named and isinstance(a, str) and a.isdecimal() else (a, b) for a, b in _two(pairs)]
    if not pairs or not all(is_whole(n, 0, _LIMIT) for pair in pairs for n in pair):
        raise ValueError(
            f"reads_layer={shown(value)}; wanted the layer that each layer without pages reads, such as {{15: 13, 16: 14}}, or "
            "[[15, 13], [16, 14]]"
        )
    return tuple(sorted(pairs))


def _two(pairs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs; something that no pair is for another form."""
    right = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    return [(pair[0], pair[1]) for pair in pairs] if right else []


def reads_problem(reads: ReadsLayer, groups: Sequence[LayerGroup]) -> str:
    """What is wrong with the layers that read another's keys; '' for nothing."""
    group_of = {layer: number for number, layers in enumerate(layer_numbers(groups)) for layer in layers}
    own = set(group_of) - {layer for layer, _ in reads}
    for number, (layer, source) in enumerate(reads):
        if layer not in group_of:
            return f"reads_layer: layer {layer}; wanted 0 to {len(group_of) - 1}, the cache's layers"
        if number and reads[number - 1][0] == layer:
            return f"reads_layer: layer {layer} is given twice"
        if source >= layer or source not in own:
            return f"reads_layer: layer {layer} reads layer {source}; wanted an earlier layer with keys of its own"
        if group_of[layer] != group_of[source]:
            return (
                f"reads_layer: layer {layer} reads layer {source}, but they are in groups {group_of[layer]} and "
                f"{group_of[source]}; wanted one group, whose pages both read"
            )
    return ""


def checked_layers(value: Any) -> Any:
    """Check `layers`: an integer, or groups, which become LayerGroups. Errors: ValueError that names the group."""
    if not isinstance(value, list | tuple):
        if is_whole(value, 1, _LIMIT):
            return value
        raise ValueError(
            f"layers={shown(value)}; wanted an integer greater than or equal to 1, or a list of groups: "
            '[{"layers": 5, "window_tokens": 1024}, {"layers": 1}]'
        )
    groups = []
    for number, group in enumerate(value):
        if not isinstance(group, LayerGroup | dict):
            raise ValueError(f'layers[{number}] is {a_type(group)}; wanted an object such as {{"layers": 5}}')
        try:
            groups.append(LayerGroup.model_validate(group))
        except ValidationError as error:
            raise ValueError(f"layers[{number}]: {explain_validation(error, LayerGroup)}") from None
    return tuple(groups)


def groups_problem(groups: Sequence[LayerGroup]) -> str:
    """What is wrong with the groups of a cache; '' if each layer is in exactly one."""
    if not groups:
        return "layers is an empty list; wanted at least one group"
    if len({isinstance(group.layers, int) for group in groups}) > 1:
        return "layers: some groups have a number of layers and some a list; wanted the same for all"
    numbers = [number for group in layer_numbers(groups) for number in group]
    if sorted(numbers) == list(range(len(numbers))):
        return ""
    twice = [number for number in numbers if numbers.count(number) > 1]
    if twice:
        return f"layers: layer {twice[0]} is in two groups; wanted each layer in one"
    missing = min(set(range(max(numbers))) - set(numbers))
    return f"layers: layer {missing} of 0 to {max(numbers)} is in no group"


def layer_numbers(groups: Sequence[LayerGroup]) -> tuple[Sequence[int], ...]:
    """The layers of each group."""
    numbers: list[Sequence[int]] = []
    start = 0
    for group in groups:
        if isinstance(group.layers, int):
            numbers.append(range(start, start + group.layers))
            start += group.layers
        else:
            numbers.append(group.layers)
    return tuple(numbers)


def layer_groups(
    windows: Sequence[int | None], geometry: Sequence[Mapping[str, Any]] | None = None
) -> tuple[LayerGroup, ...]:
    """Group a model's layers by window, and by geometry where that differs. windows: the window_tokens of each layer, or None if
    it sees all tokens; geometry: the fields of a group that each layer has of its own.

    Groups are in the order of their first layers. Errors: ConfigError for an invalid window.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, window in enumerate(windows):
        own = {} if geometry is None else geometry[number]
        alike.setdefault((window, *own.items()), []).append(number)
    return tuple(
        LayerGroup(layers=tuple(numbers), **({} if window is None else {"window_tokens": window}), **dict(own))
        for (window, *own), numbers in alike.items()
    )
