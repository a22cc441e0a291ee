"""Policy: what to do when things don't fit. A field of it is written here, and nowhere else."""

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
    """What to do when things don't fit. Errors: ConfigError for a value that is not one of its field's type.

    These are arguments of OperationMetadata too, which takes its fields from here: a new one needs its line, and its reader.
    """

    # fmt: off
    fallback: Literal["warn", "error", "allow"] = _declared(
        "warn", "'warn' (run forward_native and say so once), 'error', or 'allow' (run it, without a word).")
    kv_heads: Literal["replicate", "error"] = _declared(
        "replicate", "'replicate' or 'error' when the mesh splits query heads further than there are kv heads.")
    strict: bool = _declared(
        False, "Refuse every spec that doesn't fit as declared, and a mesh axis over which devices only do the same work.")
    tuning: Literal["heuristic", "tune", "error", "off"] = _declared(
        "heuristic", "Where no tuned sizes are kept: 'heuristic', 'tune' (search them now, and keep them) or 'error'; 'off' "
        "looks for none.")
    sequence_parallel: Literal["auto", "gather", "ring", "ulysses", "ulysses_ring"] = _declared(
        "auto", "How queries see all keys where the sequence is split over devices: 'gather' brings the keys together on each "
        "device, 'ring' sends them around, 'ulysses' splits heads instead of the sequence meanwhile, 'ulysses_ring' does both, "
        "over two axes. 'auto' gathers, but leaves a cache where it lies, and merges outputs, where that sends less.")
    ring_order: Literal["contiguous", "zigzag"] | None = _declared(
        None, "'contiguous' or 'zigzag', in which every device has a piece from the begin and one from the end; None lets the "
        "plan choose.")
    scan_ring_attention: bool | None = _declared(
        None, "Whether a ring's steps are one loop or compiled one by one; None lets attnops choose.")
    # fmt: on

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, np.bool_):
                value = bool(value)
                object.__setattr__(self, name, value)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                *others, last = map(repr, choices)
                wanted = (
                    f"{' or '.join(others)}, or {last}" if None in choices else f"one of {', '.join([*others, last])}"
                )
                raise ConfigError(f"{name}={shown(value)}; wanted {wanted}.")


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a field's type."""
    if annotation in (bool, types.NoneType):
        return (True, False) if annotation is bool else (None,)
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))


def with_fields(cls: type) -> str:
    """The docstring of a dataclass, and what its fields declare of themselves."""
    return "\n".join([cls.__doc__ or "", *(f"    {f.name}: {f.metadata['doc']}" for f in fields(cls))])


Policy.__doc__ = with_fields(Policy)
CHOICES = {name: _choices(annotation) for name, annotation in typing.get_type_hints(Policy).items()}
"""The values that each field may have."""
