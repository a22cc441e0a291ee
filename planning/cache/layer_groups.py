"""LayerGroup: layers of a KV cache that share a page table, as they see the same window of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ...errors import is_whole, shown
from ..unset_fields import UnsetFieldsModel, models_of
from .kept_states import KeptState, checked_states, states_problem

__all__ = [
    "GEOMETRY",
    "CacheKind",
    "LayerGroup",
    "Layers",
    "ReadsLayer",
    "checked_layers",
    "checked_numbers",
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
_OF_PAGES = ("window_tokens", "pages", "kv_heads", "head_dim", "value_dim", "dtype")
_OF_STATES = ("states", "drafts", "snapshots", "slots")


class LayerGroup(UnsetFieldsModel):
    """Layers with their own pages and page table, or, of kind 'state', with states in slots of their own.

    layers: their number, assigned in the order of the groups; or a list of layer numbers, from 0. window_tokens: the maximum
    number of tokens that a query sees, including itself, so that older pages can be freed; None: all. pages: pages of this
    group over all devices, unless the cache declares bytes_per_device. kind, kv_heads, head_dim, value_dim, dtype: of these
    layers; the cache's, if they aren't given.

    Of kind 'state': states, the arrays that each layer keeps of a sequence, one of each in every slot; drafts, for how many of a
    sequence's last tokens the state before each is kept too, so that they can be rejected; snapshots, at every how many pages
    of a prefix a state may be kept for other sequences; slots, over all devices.
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
    kind: Annotated[
        CacheKind | Literal["state"] | None, Field(description="What these layers store; null: the cache's kind.")
    ] = None
    kv_heads: Annotated[_Size | None, Field(description="KV heads of these layers; null: the cache's.")] = None
    head_dim: Annotated[_Size | None, Field(description="Head dimension of these layers; null: the cache's.")] = None
    value_dim: Annotated[_Size | None, Field(description="That of their values; null: the cache's.")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Field(description="Dtype of these layers; null: the cache's.")
    ] = None
    states: Annotated[
        tuple[KeptState, ...] | None,
        BeforeValidator(lambda value: None if value is None else checked_states(value)),
        Field(description="Of kind 'state': the arrays that each layer keeps of a sequence."),
    ] = None
    drafts: Annotated[
        _Number | None,
        Field(description="Last tokens of a sequence that can be rejected: a state is kept before each; null: none."),
    ] = None
    snapshots: Annotated[
        _Size | None,
        Field(description="A prefix's state may be kept for other sequences at every so many pages; null: never."),
    ] = None
    slots: Annotated[
        _Size | None,
        Field(description="Slots over all devices; null: as max_sequences, drafts and snapshots of max_length need."),
    ] = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        for name in _OF_PAGES if self.of_states else _OF_STATES:
            if getattr(self, name) is not None:
                wanted = "a group of another kind" if self.of_states else "kind 'state'"
                raise ValueError(f"{name} in a group of kind {shown(self.kind)}; wanted {wanted}, or no {name}")
        if self.of_states and (problem := states_problem(self.states or ())):
            raise ValueError("states is missing" if self.states is None else problem)
        return self

    @property
    def of_states(self) -> bool:
        """Whether these layers keep states, not pages."""
        return self.kind == "state"

    @property
    def geometry(self) -> dict[str, Any]:
        """The fields of a cache that the group has of its own; none for one of states."""
        return (
            {} if self.of_states else {name: value for name in GEOMETRY if (value := getattr(self, name)) is not None}
        )

    @property
    def slots_per_sequence(self) -> int:
        """Slots that a sequence needs: of its state, and of the state before each token that can be rejected."""
        return 1 + (self.drafts or 0)

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


def checked_numbers(value: Any, name: str) -> Any:
    """Check a list of layers' numbers, which come sorted. Errors: ValueError."""
    right = isinstance(value, list | tuple) and value and all(is_whole(n, 0, _LIMIT) for n in value)
    if not right or len(set(value)) < len(value):
        raise ValueError(f"{name}={shown(value)}; wanted a list of distinct layer numbers, from 0")
    return tuple(sorted(value))


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
    with_pages = [
        (number, layers) for number, layers in enumerate(layer_numbers(groups)) if not groups[number].of_states
    ]
    group_of = {layer: number for number, layers in with_pages for layer in layers}
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
    return models_of(value, LayerGroup, "layers", '{"layers": 5}')


def groups_problem(groups: Sequence[LayerGroup], stateless: Sequence[int] = ()) -> str:
    """What is wrong with the groups of a cache; '' if each layer is in one of pages, in one of states, in one of each, or is
    declared to keep nothing."""
    if not groups:
        return "layers is an empty list; wanted at least one group"
    counted = {isinstance(group.layers, int) for group in groups}
    if len(counted) > 1:
        return "layers: some groups have a number of layers and some a list; wanted the same for all"
    if stateless and True in counted:
        return "stateless_layers beside a number of layers; wanted groups with lists of layers"
    every: set[int] = set()
    for of_states in (False, True):
        numbers = [
            number
            for group, layers in zip(groups, layer_numbers(groups), strict=True)
            if group.of_states == of_states
            for number in layers
        ]
        if twice := [number for number in numbers if numbers.count(number) > 1]:
            where = "two groups of kind 'state'" if of_states else "two groups"
            return f"layers: layer {twice[0]} is in {where}; wanted each layer in one"
        every.update(numbers)
    if both := sorted(every & set(stateless)):
        return f"stateless_layers: layer {both[0]} is in a group; wanted layers that keep nothing"
    every.update(stateless)
    if missing := set(range(max(every))) - every:
        hint = "; layers that keep nothing are stateless_layers" if any(group.of_states for group in groups) else ""
        return f"layers: layer {min(missing)} of 0 to {max(every)} is in no group{hint}"
    return ""


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
    windows: Sequence[int | None],
    geometry: Sequence[Mapping[str, Any]] | None = None,
    numbers: Sequence[int] | None = None,
) -> tuple[LayerGroup, ...]:
    """Group a model's layers by window, and by geometry where that differs. windows: the window_tokens of each layer, or None if
    it sees all tokens; geometry: the fields of a group that each layer has of its own; numbers: those of the layers, if some
    layers of the model aren't among them.

    Groups are in the order of their first layers. Errors: ConfigError for an invalid window.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, window in enumerate(windows):
        own = {} if geometry is None else geometry[place]
        alike.setdefault((window, *own.items()), []).append(place if numbers is None else numbers[place])
    return tuple(
        LayerGroup(layers=tuple(found), **({} if window is None else {"window_tokens": window}), **dict(own))
        for (window, *own), found in alike.items()
    )
