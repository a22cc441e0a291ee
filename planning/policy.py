"""Policy: what to do when things don't fit. Its fields are defined only here."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError, shown

__all__ = ["CHOICES", "Policy", "with_fields"]


def _declared(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Policy:
    """What to do when things don't fit. Errors: ConfigError for a value that its field doesn't allow.

    OperationMetadata has these arguments too, and takes their definitions from here.
    """

    # fmt: off
    fallback: Literal["warn", "error", "allow"] = _declared(
        "warn", "If a platform's own implementation refuses: 'warn' (run forward_native and warn once), 'error', or 'allow' (run "
        "it without a warning).")
    kv_heads: Literal["replicate", "error"] = _declared(
        "replicate", "If the mesh splits query heads further than there are kv heads: 'replicate' them, or 'error'.")
    strict: bool = _declared(
        False, "Refuse specs that don't fit as declared, and mesh axes over which devices only repeat work.")
    tuning: Literal["heuristic", "tune", "error", "off"] = _declared(
        "heuristic", "If no tuned sizes are stored: 'heuristic', 'tune' (search now, and store the result) or 'error'. 'off' "
        "ignores tuned sizes.")
    sequence_parallel: Literal["auto", "gather", "ring", "ulysses", "ulysses_ring", "state"] = _declared(
        "auto", "How queries see all keys if the sequence is split over devices: 'gather' gathers the keys on each device, "
        "'ring' sends them around a ring, 'ulysses' splits heads instead of the sequence, 'ulysses_ring' does both, over two "
        "axes. 'state' is for recurrences: each device sends what its tokens do to a state. 'auto' gathers, but leaves a cache "
        "split and merges outputs, or passes states on, if that sends less.")
    ring_order: Literal["contiguous", "zigzag"] | None = _declared(
        None, "'contiguous' or 'zigzag', in which every device has one piece from the start and one from the end. None: the "
        "plan chooses.")
    scan_ring_attention: bool | None = _declared(
        None, "Whether a ring's steps are one loop (True) or compiled one by one (False). None: attnops chooses.")
    # fmt: on

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, np.bool_):
                value = bool(value)
                object.__setattr__(self, name, value)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                *others, last = map(repr, choices)
                expected = (
                    f"{' or '.join(others)}, or {last}" if None in choices else f"one of {', '.join([*others, last])}"
                )
                raise ConfigError(f"{name}={shown(value)}; wanted {expected}.")


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values that a field's type allows."""
    if annotation in (bool, types.NoneType):
        return (True, False) if annotation is bool else (None,)
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))


def with_fields(cls: type) -> str:
    """The docstring of a dataclass, extended by the documentation of its fields."""
    return "\n".join([cls.__doc__ or "", *(f"    {f.name}: {f.metadata['doc']}" for f in fields(cls))])


Policy.__doc__ = with_fields(Policy)
CHOICES = {name: _choices(annotation) for name, annotation in typing.get_type_hints(Policy).items()}
"""The values that each field may have."""
