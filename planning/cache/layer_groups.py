"""LayerGroup: layers of a KV cache whose pages are given out together, as they see the same window of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator

from ...errors import a_type, shown
from ..given import GivenModel, explain_validation

__all__ = ["LayerGroup", "Layers", "checked_layers", "groups_problem", "layer_groups", "layer_numbers"]

_LIMIT = 2**30

_Size = Annotated[int, Field(strict=True, ge=1, le=_LIMIT)]
_Number = Annotated[int, Field(strict=True, ge=0, lt=_LIMIT)]


class LayerGroup(GivenModel):
    """Layers with pages and a page table of their own.

    layers: how many, the next ones in the order of the groups; or which, by their numbers from 0. window_tokens: a query sees
    so many tokens at most, itself among them, and older pages may be given back; None: all. pages: of this group, over all
    devices, where the cache's bytes_per_device doesn't say.
    """

    model_config = ConfigDict(title="cache.layers")

    layers: Annotated[
        _Size | tuple[_Number, ...], Field(description="How many, the next ones; or which, by their numbers from 0.")
    ]
    window_tokens: Annotated[
        _Size | None, Field(description="Tokens that a query sees at most, itself among them; null: all.")
    ] = None
    pages: Annotated[_Size | None, Field(description="Of this group, over all devices; or bytes_per_device says.")] = (
        None
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _how_many_or_which(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if value and all(_whole(n, 0) for n in value) and len(set(value)) == len(value):
                return tuple(value)
        elif _whole(value, 1):
            return value
        raise ValueError(f"layers={shown(value)}; wanted how many, from 1 on, or a list of different numbers of layers")


Layers = _Size | tuple[LayerGroup, ...]


def checked_layers(value: Any) -> Any:
    """An integer, or groups as LayerGroups. Errors: ValueError, with the group."""
    if not isinstance(value, list | tuple):
        if _whole(value, 1):
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
    """What is wrong with the groups of a cache; '' where each layer is in one of them."""
    if not groups:
        return "layers is an empty list; wanted at least one group"
    if len({isinstance(group.layers, int) for group in groups}) > 1:
        return "layers: some groups say how many and some which; wanted the same of all"
    numbers = [number for group in layer_numbers(groups) for number in group]
    if sorted(numbers) == list(range(len(numbers))):
        return ""
    twice = [number for number in numbers if numbers.count(number) > 1]
    if twice:
        return f"layers: layer {twice[0]} is in two groups; wanted it in one"
    missing = min(set(range(max(numbers))) - set(numbers))
    return f"layers: layer {missing} of 0 to {max(numbers)} is in no group"


def layer_numbers(groups: Sequence[LayerGroup]) -> tuple[Sequence[int], ...]:
    """The layers of each group."""
    found: list[Sequence[int]] = []
    start = 0
    for group in groups:
        if isinstance(group.layers, int):
            found.append(range(start, start + group.layers))
            start += group.layers
        else:
            found.append(group.layers)
    return tuple(found)


def layer_groups(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Groups of a model's layers by their windows: `windows` has the window_tokens of each layer, None where it sees all.

    A group stands where its first layer does. Errors: pydantic's ValidationError for what is no window.
    """
    found: dict[int | None, list[int]] = {}
    for number, window in enumerate(windows):
        found.setdefault(window, []).append(number)
    return tuple(
        LayerGroup(layers=tuple(numbers), **({} if window is None else {"window_tokens": window}))
        for window, numbers in found.items()
    )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LIMIT
