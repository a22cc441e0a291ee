"""What the arrays of a paged call must be: shapes and dtypes. Values are the caller's affair; most of them are traced."""

from __future__ import annotations

import jax.numpy as jnp

from ...errors import InputError, InputTypeError, shown
from .paged_step import PagedOperands

__all__ = ["check_operands", "check_window"]

_QUERIES = ("float16", "bfloat16", "float32")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def check_operands(operands: PagedOperands) -> None:
    """Raise InputError or InputTypeError for the first thing that doesn't fit."""
    query, key, value = operands.query, operands.key_pages, operands.value_pages
    _rank("query", query, 3, "[tokens, heads, dim]")
    _rank("key_pages", key, 4, "[pages, page, kv_heads, dim]")
    _rank("value_pages", value, 4, "[pages, page, kv_heads, value_dim]")
    if value.shape[:3] != key.shape[:3]:
        raise InputError(
            f"value_pages has the shape {value.shape} and key_pages {key.shape}; wanted the same pages, page size and "
            "kv_heads: keys and values of a token lie at the same place."
        )
    if key.shape[3] != query.shape[2]:
        raise InputError(f"query has dim {query.shape[2]} and key_pages {key.shape[3]}; wanted one dim for both.")
    heads, kv_heads = query.shape[1], key.shape[2]
    if heads % kv_heads:
        raise InputError(f"{heads} query heads on {kv_heads} kv heads; wanted a multiple: head h reads kv head h // group.")
    if str(query.dtype) not in _QUERIES:
        raise InputTypeError(f"query is {query.dtype}; wanted one of {', '.join(_QUERIES)}: cast it.")
    for name, pages in (("key_pages", key), ("value_pages", value)):
        if str(pages.dtype) not in (*_QUERIES, *_QUANTISED):
            wanted = ", ".join((*_QUERIES, *_QUANTISED))
            raise InputTypeError(f"{name} is {pages.dtype}; wanted one of {wanted}: allocate the cache in one of these.")
    _check_batch(operands)
    if operands.sinks is not None and operands.sinks.shape != (heads,):
        raise InputError(f"sinks has the shape {operands.sinks.shape}; wanted [heads] = ({heads},): join several by logsumexp.")
    _check_scale("key", key, operands.key_scale)
    _check_scale("value", value, operands.value_scale)


def check_window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """Inclusive distances to the left and to the right."""
    if window is None:
        return None, None
    ends = tuple(window) if isinstance(window, tuple | list) else ()
    if len(ends) != 2 or not all(n is None or (isinstance(n, int) and n >= 0) for n in ends):
        raise InputError(
            f"sliding_window={shown(window)}; wanted (left, right), distances of 0 or more, None for no limit: "
            "the last n keys are (n - 1, 0)."
        )
    return ends[0], ends[1]


def _rank(name: str, x: object, rank: int, wanted: str) -> None:
    shape = jnp.shape(x)
    if len(shape) != rank or 0 in shape:
        raise InputError(f"{name} has the shape {shape}; wanted {wanted}, each at least 1.")


def _check_batch(operands: PagedOperands) -> None:
    (sequences,) = _one(operands.kv_lens.shape, "kv_lens")
    table, cu_q_lens = operands.page_table.shape, operands.cu_q_lens.shape
    if cu_q_lens != (sequences + 1,):
        raise InputError(f"cu_q_lens has the shape {cu_q_lens}; wanted ({sequences + 1},), one more than kv_lens has.")
    if len(table) != 2 or table[0] != sequences or not table[1]:
        raise InputError(f"page_table has the shape {table}; wanted [{sequences}, width], a row for each of kv_lens.")


def _one(shape: tuple[int, ...], name: str) -> tuple[int]:
    if len(shape) != 1 or not shape[0]:
        raise InputError(f"{name} has the shape {shape}; wanted [sequences], at least one.")
    return (shape[0],)


def _check_scale(name: str, pages: object, scale: object) -> None:
    shape, quantised = jnp.shape(pages), str(jnp.result_type(pages)) in _QUANTISED
    if scale is None:
        if str(jnp.result_type(pages)) == "int8":
            raise InputError(f"{name}_pages is int8 and {name}_scale is missing; wanted a number, [kv_heads] or one a token.")
        return
    if not quantised:
        raise InputError(f"{name}_scale was given for {name}_pages of {jnp.result_type(pages)}; wanted none, or quantised pages.")
    wanted = ((), shape[2:3], shape[:3])
    if jnp.shape(scale) not in wanted:
        raise InputError(f"{name}_scale has the shape {jnp.shape(scale)}; wanted (), {wanted[1]} or {wanted[2]}.")
