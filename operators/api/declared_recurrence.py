"""A call of a declared recurrence: what it passes, combined with and checked against what is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError, InputError, InputTypeError
from ...registry.declaration import Declaration
from ...sharding import OperandTable
from ...sharding.modes import canonical_layout
from ..call.arrays import shaped
from ..call.table_sizes import call_sizes

__all__ = ["declared_call"]

_FIELDS = {"heads": "q_heads", "q_len": "", "batch": "", "history": ""}  # lengths are only for plans


def declared_call(
    declaration: Declaration, table: OperandTable, arrays: Sequence[Any], call: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of the call, its arrays among them. arrays: by position, in the table's order, or by name; the first three are
    None if they weren't passed, and then query, key and value came by name.

    Errors: ConfigError for an option that both give and that differs; InputError for declared arrays that are missing, and for
    sizes and dtypes other than the declared ones; InputTypeError for arrays that are missing or too many.
    """
    declared, rest = declaration.call, dict(call)
    required = [row.name for row in table.required]
    named = ("query", "key", "value") if "query" in required else ()
    rest |= {name: x for name, x in zip(named, arrays, strict=False) if x is not None}
    arrays = list(arrays[len(named) :])
    while arrays and arrays[-1] is None:
        arrays.pop()
    if len(arrays) > len(required) - len(named):
        raise InputTypeError(f"{len(arrays)} arrays by position; wanted {', '.join(required)}, and the others by name.")
    given = dict(zip(required if not named else (), arrays, strict=False))
    if twice := [name for name in given if name in rest]:
        raise InputTypeError(f"{', '.join(twice)}: given by position and by name; leave one of them out.")
    given |= {name: rest.pop(name) for name in required if name in rest}
    if missing := [name for name in required if given.get(name) is None]:
        raise InputTypeError(f"the call has no {', '.join(missing)}; pass arrays.")
    for name in ("mode", "layout"):
        value, argument = getattr(declared, name), rest.get(name)
        if not declared.is_set(name) or value is None:
            continue
        if argument is not None and argument != value:
            raise ConfigError(
                f"{name}: the declaration says {value!r}, the call says {argument!r}; leave one of them out."
            )
        rest[name] = value
    of_ids = ("segment_ids",) if declared.segment_ids is not None else ()
    for name in (*(declared.operands or {}), *of_ids):
        if rest.get(name) is None:
            raise InputError(f"call.{name} is declared, but the call has no {name}; pass it, or leave it out there.")
    every = {row.name: x for row in table if (x := {**given, **rest}.get(row.name)) is not None}
    shapes = {name: shaped(name, x) for name, x in every.items()}
    _check_sizes(declaration, call_sizes(table, shapes, canonical_layout(rest.get("layout") or "bthd")))
    first = table.names[0]
    if declared.dtype is not None and shapes[first].dtype.name != declared.dtype:
        raise InputError(
            f"{first} is {shapes[first].dtype}; the file declares call.dtype={declared.dtype!r}. Cast it, or leave dtype out."
        )
    return given | rest


def _check_sizes(declaration: Declaration, sizes: Mapping[str, int]) -> None:
    call = declaration.call
    for dim, size in sizes.items():
        field = _FIELDS.get(dim, dim)
        wanted = (
            (call.dims or {}).get(dim) if dim in (call.dims or {}) else getattr(call, field, None) if field else None
        )
        if wanted is not None and wanted != size:
            raise InputError(
                f"{dim.replace('_', ' ')} is {size}; the file declares {wanted}. Pass that, or leave it out there."
            )
