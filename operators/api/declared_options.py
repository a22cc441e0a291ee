"""The arguments of a call or a step combined with those that its declaration holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ...call_arguments import CALL_OPTIONS
from ...errors import ConfigError, InputError, shown
from ...masks import Dense, Mask
from ...registry.call_declaration import DECLARED_BY, CallDeclaration
from ...registry.declaration import Declaration
from ...registry.step_declaration import STEP_OPTIONS
from ...scores import Score
from ...sharding import canonical_layout, canonical_mode
from ..call.arrays import is_array, shaped

__all__ = ["call_options", "step_options"]

# Ids of the queries stand for both; scales depend on kv_dtype too; an offset may be an option.
_MAY_LACK = ("kv_segment_ids", "key_scale", "value_scale", "query_offset")
_SCALES = ("key_scale", "value_scale")
_HEADS_AND_DIMS = {
    "q_heads": ("query", "h"),
    "kv_heads": ("key", "h"),
    "head_dim": ("query", "d"),
    "value_dim": ("value", "d"),
}


def step_options(declaration: Declaration, query: Any, step: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a step over pages. Errors: ConfigError for another cache than the declared one, or an option that both
    give and that differs; InputError for declared sinks that are missing, and for heads or a dtype other than declared."""
    declared, state = declaration.step, step.get("state")
    cache = step.get("cache") if state is None else state.cache
    if declaration.cache is not None and cache is not None and cache != declaration.cache:
        raise ConfigError(
            "the state's cache isn't the one that the file declares; make the state with init(declaration.cache)."
        )
    if declared is None:
        return step
    if declared.softmax_aux and step.get("softmax_aux") is None:
        raise InputError("step.softmax_aux is declared, but the step has no softmax_aux; pass it, or leave it out.")
    if declared.selected is not None:
        chosen = step.get("selected")
        if chosen is None:
            raise InputError("step.selected is declared, but the step has no selected; pass it, or leave it out.")
        if is_array(chosen) and chosen.shape[1:] != (declared.selected,):
            raise InputError(
                f"selected has shape {tuple(chosen.shape)}; the file declares step.selected={declared.selected}."
            )
    if is_array(query):
        heads, dtype = query.shape[1:2], shaped("query", query).dtype
        if declared.q_heads is not None and heads != (declared.q_heads,):
            raise InputError(
                f"query {tuple(query.shape)} has {heads[0] if heads else 'no'} heads; the file declares step.q_heads="
                f"{declared.q_heads}."
            )
        if declared.dtype is not None and dtype != jnp.dtype(declared.dtype):
            raise InputError(
                f"query is {dtype}; the file declares step.dtype={declared.dtype!r}. Cast it, or leave dtype out."
            )
    return _combined(declared, STEP_OPTIONS, step)


def call_options(declaration: Declaration, query: Any, key: Any, value: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call. Errors: ConfigError for an option that both give and that differs; InputError for declared arrays
    that are missing, and for sizes and dtypes other than the declared ones."""
    declared = declaration.call
    if declared.dims is not None:
        raise ConfigError(f"call.dims={shown(dict(declared.dims))}: for recurrent operations; leave it out.")
    options = _combined(declared, ("score", *CALL_OPTIONS), call)
    required = {
        x: name for x, name in DECLARED_BY.items() if x not in _MAY_LACK and getattr(declared, name) is not None
    }
    if declared.kv_dtype is not None and declared.kv_scales is not None:
        required |= dict.fromkeys(_SCALES, "kv_scales")
    required |= {name: f"operands.{name}" for name in declared.operands or {}}
    for argument, name in required.items():
        if options.get(argument) is None:
            raise InputError(f"call.{name} is declared, but the call has no {argument}; pass it, or leave {name} out.")
    # The operation refuses what isn't an array.
    arrays = {n: x for n, x in (("query", query), ("key", key), ("value", value)) if is_array(x)}
    layout = options.get("layout")
    _check_sizes(declared, arrays, "bthd" if layout is None else canonical_layout(layout))
    _check_dtypes(declared, arrays)
    return options


def _combined(declared: Any, names: Sequence[str], call: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the declared ones; masks intersect."""
    combined = {**call}
    for name in names:
        value, argument = getattr(declared, name), combined.get(name)
        if name == "mask" or not declared.is_set(name) or value is None:
            continue
        if argument is not None and (is_array(argument) or _plain(name, argument) != _plain(name, value)):
            both = (str(x) if isinstance(x, Score) else shown(x) for x in (value, argument))
            raise ConfigError(
                "{}: the declaration says {}, the call says {}; leave one of them out.".format(name, *both)
            )
        combined[name] = value
    if declared.mask is not None:
        argument = combined.get("mask")
        combined["mask"] = declared.mask if argument is None else declared.mask & _as_mask(argument)
    return combined


def _as_mask(mask: Any) -> Mask:
    return mask if isinstance(mask, Mask) else Dense(mask)


def _plain(name: str, value: Any) -> Any:
    """One form for equivalent values: [3, 0] and (3, 0), 3 and (3, 3), 'train' and '__train__'."""
    if name == "mode":
        return value if value in ("mixed", "prefill", "autoregressive", "insert") else canonical_mode(value).strip("_")
    if name == "sliding_window":
        return tuple(value) if isinstance(value, list | tuple) else (value, value)
    return value


def _check_sizes(declared: CallDeclaration, arrays: Mapping[str, Any], layout: str) -> None:
    for field, (name, axis) in _HEADS_AND_DIMS.items():
        size, shape = getattr(declared, field), arrays[name].shape if name in arrays else ()
        if size is not None and len(shape) == len(layout) and shape[layout.index(axis)] != size:
            raise InputError(
                f"{name} {tuple(shape)} has {shape[layout.index(axis)]} in {axis!r} of layout {layout!r}; the file "
                f"declares {field}={size}."
            )


def _check_dtypes(declared: CallDeclaration, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        quantised = declared.kv_dtype is not None and name != "query"
        field = "kv_dtype" if quantised else "dtype"
        dtype = shaped(name, array).dtype
        declared_dtype = getattr(declared, field)
        if declared_dtype is not None and dtype != jnp.dtype(declared_dtype):
            raise InputError(
                f"{name} is {dtype}; the file declares call.{field}={declared_dtype!r}. Cast it, or "
                f"leave {field} out; metadata.runtime_dtype declares the dtype to compute in."
            )
