"""Masks as jax pytrees: static leaves are structure, the arrays of dynamic leaves are the tree's leaves.

Unflattening neither validates nor normalises, because jax also passes None, object() and specs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any, cast

import jax

from ..pytree_export import exported
from .algebra import And, Mask, Not, Or, raw
from .block_sparse import ChosenBlocks
from .dynamic import Dense, Lengths, Positions, SegmentIds
from .serial import LEAVES, mask_from_dict
from .slots import DynamicMask, Slot

__all__ = ["register_static"]


def _register_static(cls: type[Mask]) -> None:
    jax.tree_util.register_pytree_node(cls, lambda mask: ((), mask), lambda mask, _: mask)


def _register_node(cls: type[Mask]) -> None:
    def flatten(mask: Mask) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.SequenceKey(i), child) for i, child in enumerate(mask.children())], None

    def unflatten(_: None, children: Iterable[Any]) -> Mask:
        parts = tuple(children)
        return raw(cls, mask=parts[0]) if cls is Not else raw(cls, masks=parts)

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten, lambda mask: (mask.children(), None))


def _register_dynamic(cls: type[DynamicMask]) -> None:
    array_fields = [field for field, _, _ in cls.parts]
    fixed = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.name not in array_fields]

    def static(mask: DynamicMask) -> tuple[Hashable, ...]:
        return tuple(getattr(mask, name) for name in fixed)

    def flatten(mask: DynamicMask) -> tuple[list[tuple[Any, Any]], tuple[Hashable, ...]]:
        keys = [jax.tree_util.GetAttrKey(field) for field in array_fields]
        return list(zip(keys, mask.arrays(), strict=True)), static(mask)

    def unflatten(aux: tuple[Hashable, ...], arrays: Iterable[Any]) -> DynamicMask:
        return raw(cls, **dict(zip((*array_fields, *fixed), (*arrays, *aux), strict=True)))

    def bare(mask: DynamicMask) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
        return mask.arrays(), static(mask)

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten, bare)


def _slot_from_fields(fields: dict[str, Any]) -> Slot:
    return Slot(**{**fields, "broadcast": tuple(fields["broadcast"])})


def register_static(cls: type[Mask]) -> None:
    """Make a kind of static leaf a pytree without leaves, which jax.export writes as JSON."""
    _register_static(cls)
    exported(lambda mask: mask.to_dict(), mask_from_dict)(cls)


for _static in LEAVES.values():
    register_static(_static)
_register_static(Slot)
exported(dataclasses.asdict, _slot_from_fields)(Slot)
for _combined in (And, Or, Not):
    _register_node(_combined)
    exported(lambda _: None, lambda _: None)(_combined)
for _dynamic in (SegmentIds, Lengths, Positions, Dense, ChosenBlocks):
    _register_dynamic(_dynamic)
    exported()(_dynamic)
