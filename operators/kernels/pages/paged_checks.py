"""Checks shapes and dtypes of a paged call's arrays. Values are left to the caller; most of them are traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import InputError, InputTypeError, is_whole, shown
from ....page_layouts import LAYOUTS
from .page_layout import page_shape
from .paged_step import PagedOperands

__all__ = ["check_numbers", "check_operands", "check_spans", "check_tree", "int32", "options_of", "refuse_gradient"]

_QUERIES = ("float16", "bfloat16", "float32")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def check_operands(operands: PagedOperands, layout: str) -> None:
    """Raise InputError or InputTypeError for the first thing that doesn't fit."""
    query, key, value = operands.query, operands.key_pages, operands.value_pages
    _rank("query", query, 3, "[tokens, heads, dim]")
    _check_pages(query, key, value, operands.rope_pages, layout)
    heads, kv_heads = query.shape[1], page_shape(layout, key, value, query.shape[2]).kv_heads
    if heads % kv_heads:
        raise InputError(
            f"{heads} query heads on {kv_heads} kv heads; wanted a multiple: head h reads kv head h // group."
        )
    if str(query.dtype) not in _QUERIES:
        raise InputTypeError(f"query is {query.dtype}; wanted one of {', '.join(_QUERIES)}: cast it.")
    _check_batch(operands)
    if operands.rope_pages is not None:
        _check_rope(operands.rope_pages, key, layout)
    if (chosen := operands.selected) is not None and (chosen.ndim != 2 or len(chosen) != len(query)):
        raise InputError(
            f"selected has the shape {chosen.shape}; wanted [tokens, n] of {len(query)} tokens: positions in their sequences."
        )
    if (at := operands.q_positions) is not None and at.shape != (len(query),):
        raise InputError(f"q_positions has the shape {at.shape}; wanted [tokens] = ({len(query)},).")
    if operands.sinks is not None and operands.sinks.shape != (heads,):
        raise InputError(
            f"sinks has the shape {operands.sinks.shape}; wanted [heads] = ({heads},): merge several with logsumexp."
        )
    for name, pages, scale in (("key", key, operands.key_scale), ("value", value, operands.value_scale)):
        _check_scale(name, key if pages is None else pages, scale, layout, kv_heads)


def check_tree(operands: PagedOperands, tree: Any) -> None:
    """Refuse a tree of drafts of another shape or dtype."""
    if tree is None:
        return
    sequences = len(operands.kv_lens)
    shape = tuple(tree.shape)
    if len(shape) != 3 or shape[0] != sequences or shape[1] != shape[2] or not shape[1]:
        raise InputError(
            f"draft_tree has the shape {shape}; wanted [{sequences}, drafts, drafts]: a matrix per sequence."
        )
    if tree.dtype != bool:
        raise InputTypeError(f"draft_tree is {tree.dtype}; wanted bool: which drafts each draft sees.")


def check_spans(operands: PagedOperands, spans: Any, prefix: Any) -> None:
    """Refuse spans of tokens and lengths of prefixes of other shapes; dtypes are checked by `int32`."""
    tokens, sequences = len(operands.query), len(operands.kv_lens)
    if spans is not None and tuple(spans.shape) != (tokens, 2):
        raise InputError(f"spans has the shape {tuple(spans.shape)}; wanted [tokens, 2] = ({tokens}, 2).")
    if prefix is not None and tuple(prefix.shape) != (sequences,):
        raise InputError(f"prefix_lengths has the shape {tuple(prefix.shape)}; wanted [sequences] = ({sequences},).")


def _check_pages(
    query: jax.Array, key: jax.Array, value: jax.Array | None, rope: jax.Array | None, layout: str
) -> None:
    """Shapes and dtypes of the arrays of pages."""
    form = LAYOUTS[layout]
    if form.one_array:
        _rank("key_pages", key, len(form.dims), form.form)
        if value is not None:
            raise InputError(f"value_pages was given with pages of layout {layout!r}, which hold both; wanted None.")
    elif value is None:
        raise InputError(f"value_pages is None, but pages of layout {layout!r} hold only keys; pass value_pages.")
    else:
        _rank("key_pages", key, 4, form.form)
        _rank("value_pages", value, 4, form.form.replace("dim]", "value_dim]"))
        if value.shape[:3] != key.shape[:3]:
            raise InputError(
                f"value_pages has the shape {value.shape} and key_pages {key.shape}; wanted the same pages, page size and "
                "kv_heads: keys and values of a token are at the same place."
            )
    dim = page_shape(layout, key, value, query.shape[2]).dim
    stored = key.shape[-1] + (0 if rope is None else rope.shape[-1])
    if dim != query.shape[2] or dim > stored:
        raise InputError(f"query has dim {query.shape[2]} and key_pages {key.shape[-1]}; wanted one dim for both.")
    for name, pages in (("key_pages", key), ("value_pages", value)):
        if pages is not None and str(pages.dtype) not in (*_QUERIES, *_QUANTISED):
            dtypes = ", ".join((*_QUERIES, *_QUANTISED))
            raise InputTypeError(
                f"{name} is {pages.dtype}; wanted one of {dtypes}: allocate the cache in one of these."
            )


def _check_rope(rope: jax.Array, key: jax.Array, layout: str) -> None:
    """Shapes and dtype of the rotary keys beside latents."""
    if not LAYOUTS[layout].values_in_keys:
        raise InputError(
            f"rope_pages was given with pages of layout {layout!r}; wanted None, as only latents have them."
        )
    if rope.ndim != 4 or rope.shape[:3] != key.shape[:3]:
        raise InputError(
            f"rope_pages has the shape {rope.shape} and key_pages {key.shape}; wanted the same pages and page size."
        )
    if str(rope.dtype) not in _QUERIES:
        raise InputTypeError(f"rope_pages is {rope.dtype}; wanted one of {', '.join(_QUERIES)}, as they have no scale.")


def check_numbers(softmax_scale: object, soft_cap: object, sizes: Mapping[str, object]) -> None:
    """Check options that are Python numbers; `sizes`: None or whole numbers from 1 on, by name."""
    for name, x in (("softmax_scale", softmax_scale), ("logits_soft_cap", soft_cap)):
        if isinstance(x, bool) or not isinstance(x, int | float | None):
            raise InputTypeError(f"{name}={shown(x)}; wanted a Python number: it is part of what is compiled.")
    if softmax_scale is None:
        raise InputTypeError("softmax_scale=None; wanted a Python number, such as dim ** -0.5.")
    if isinstance(soft_cap, int | float) and not soft_cap > 0:
        raise InputError(f"logits_soft_cap={shown(soft_cap)}; wanted a number above 0, or None for no cap.")
    for name, size in sizes.items():
        if size is not None and not is_whole(size, 1):
            raise InputError(f"{name}={shown(size)}; wanted a whole number from 1 on, or None.")


def refuse_gradient(*_: object) -> NoReturn:
    """The derivative of paged attention. Errors: InputError."""
    raise InputError(
        "paged attention was differentiated; wanted a call outside jax.grad: serving has no gradient. "
        "Train with the operation vanilla or splash, or put jax.lax.stop_gradient around the arguments."
    )


def int32(name: str, x: Any) -> jax.Array:
    """An array of lengths or ids as int32."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise InputTypeError(f"{name} is {dtype}; wanted int32: lengths and ids are whole numbers.")
    return jnp.asarray(x).astype(np.int32)


def options_of(
    softmax_scale: float,
    causal: bool,
    sliding_window: tuple[int | None, int | None] | None,
    soft_cap: float | None,
    max_q_len: int | None,
    chunk_size: int | None = None,
) -> dict[str, Any]:
    """The fields of PagedOptions."""
    left, right = _window(sliding_window)
    cap = None if soft_cap is None else float(soft_cap)
    seen = {"causal": bool(causal), "left": left, "right": right, "chunk": chunk_size}
    return seen | {"scale": float(softmax_scale), "soft_cap": cap, "max_q_len": max_q_len}


def _window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    ends = tuple(window) if isinstance(window, tuple | list) else ()
    if len(ends) != 2 or not all(n is None or is_whole(n, 0) for n in ends):
        raise InputError(
            f"sliding_window={shown(window)}; wanted (left, right), distances of 0 or more, None for no limit: "
            "the last n keys are (n - 1, 0)."
        )
    return ends[0], ends[1]


def _rank(name: str, x: jax.Array, rank: int, expected: str) -> None:
    shape = x.shape
    if len(shape) != rank or 0 in shape:
        raise InputError(f"{name} has the shape {shape}; wanted {expected}, each at least 1.")


def _check_batch(operands: PagedOperands) -> None:
    (sequences,) = _one(operands.kv_lens.shape, "kv_lens")
    table, cu_q_lens = operands.page_table.shape, operands.cu_q_lens.shape
    if cu_q_lens != (sequences + 1,):
        raise InputError(f"cu_q_lens has the shape {cu_q_lens}; wanted ({sequences + 1},), one more than kv_lens has.")
    if len(table) != 2 or table[0] != sequences or not table[1]:
        raise InputError(f"page_table has the shape {table}; wanted [{sequences}, width], a row for each of kv_lens.")

    if operands.num_seqs.size != 1:
        raise InputError(f"num_seqs has the shape {operands.num_seqs.shape}; wanted one number, () or (1,).")


def _one(shape: tuple[int, ...], name: str) -> tuple[int]:
    if len(shape) != 1 or not shape[0]:
        raise InputError(f"{name} has the shape {shape}; wanted [sequences], at least one.")
    return (shape[0],)


def _check_scale(name: str, pages: jax.Array, scale: jax.Array | None, layout: str, kv_heads: int) -> None:
    quantised = str(pages.dtype) in _QUANTISED
    if scale is None:
        if pages.dtype == jnp.int8:
            raise InputError(
                f"{name}_pages is int8, but {name}_scale is missing; wanted a number, [kv_heads] or one per token."
            )
        return
    if not quantised:
        raise InputError(f"{name}_scale was given for {name}_pages of {pages.dtype}; wanted none, or quantised pages.")
    per_key = (
        (pages.shape[0], kv_heads, pages.shape[2]) if LAYOUTS[layout].heads_first else (*pages.shape[:2], kv_heads)
    )
    if scale.shape not in ((), (kv_heads,), per_key):
        raise InputError(f"{name}_scale has the shape {scale.shape}; wanted (), {(kv_heads,)} or {per_key}.")
