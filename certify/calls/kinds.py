"""Which kind of calls the families of conventions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...registry import OperationRegistry
from ..source import Subject
from .indexers import INDEXER, PAGED_INDEXER
from .kind import Kind
from .latent import LATENT
from .pages import PAGES
from .recurrence import recurrences
from .selected import SELECTED
from .slots import steps_over_slots

__all__ = ["KINDS", "every_kind", "kind_of"]

# Of the families of functions; the others are attnops' own, and follow from an operation's table of operands.
KINDS: dict[str, Kind] = {
    "pages": PAGES, "latent": LATENT, "indexer": INDEXER, "paged_indexer": PAGED_INDEXER, "selected": SELECTED,
}  # fmt: skip
_OF_TABLES: dict[str, Callable[[Any], Kind]] = {"recurrence": recurrences, "slots": steps_over_slots}


def every_kind() -> dict[str, Kind]:
    """Of each family; those of attnops' own tables as the first operation has it, whose features are the same for all."""
    operations: list[Any] = [OperationRegistry.get(name) for name in OperationRegistry.names()]
    own = {
        family: made(next(one for one in operations if one.convention == f"attnops:{family}"))
        for family, made in _OF_TABLES.items()
    }
    return KINDS | own


def kind_of(subject: Subject) -> Kind:
    """The kind of a subject that isn't softmax attention of query, key and value."""
    family = subject.convention.family
    return (
        KINDS[family] if family in KINDS else _OF_TABLES[family](OperationRegistry.get(subject.name.partition(".")[0]))
    )
