"""A step over pages that another library owns, in attnops' terms: what was passed, and what follows from its shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, InputTypeError, shown
from ..operators.call.arrays import shaped
from ..operators.paged_cache import RaggedBatch
from ..page_layouts import LAYOUTS
from ..planning.cache.cache_checks import axis_names
from ..planning.cache.kv_cache import KVCache
from ..sharding import axes_of, current_mesh

__all__ = ["ForeignBatch", "ForeignStep", "Prepared", "batch_of", "prepare", "scaled_query", "with_more_heads"]

_FLOATS = ("float32", "bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
_LANES = 128


class ForeignBatch(NamedTuple):
    """Which tokens and pages belong to which sequence; the table is [rows, width], with any ids behind a sequence's pages."""

    kv_lens: Any
    page_table: Any
    cu_q_lens: Any
    num_seqs: Any


class ForeignStep(NamedTuple):
    """A call in attnops' terms. query [tokens, heads, dim]; key and value [tokens, kv_heads, dim], None if the pages have them.

    pages: keys and values in one array of layout interleaved or packed. rows, width: of the page table, which `batch` makes; its
    `arrays` may be shapes if only a plan is wanted. Scales multiply what is stored. remarks: for the plan.
    """

    query: Any
    key: Any
    value: Any
    pages: Any
    layout: str
    rows: int
    width: int
    arrays: tuple[Any, ...]
    batch: Callable[[], ForeignBatch]
    softmax_scale: float
    causal: bool = True
    sliding_window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    sinks: Any = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    out_dtype: Any = None
    kv_heads: int | None = None
    remarks: tuple[str, ...] = ()


class Prepared(NamedTuple):
    """What is static in a step. `padding`: kv heads that the array has beyond the declared ones."""

    cache: KVCache
    dtype: Any
    returned: Any
    padding: int
    options: dict[str, Any]
    remarks: tuple[str, ...]

    def query_padding(self, heads: int) -> int:
        """Query heads to add to `heads`, those that read the padding among the kv heads."""
        return heads // (self.cache.kv_heads - self.padding) * self.padding


def prepare(step: ForeignStep, kv_head_axis: str | tuple[str, ...] | None, max_length: int | None) -> Prepared:
    """Everything static, from shapes and dtypes. Errors: InputError, InputTypeError."""
    query, pages = shaped("the queries", step.query), shaped("the pages", step.pages)
    if len(query.shape) != 3:
        raise InputError(f"the queries have shape {query.shape}; wanted [tokens, heads, head_dim].")
    if query.dtype.name not in _FLOATS:
        raise InputTypeError(f"the queries are {query.dtype}; wanted one of {', '.join(_FLOATS)}.")
    returned = query.dtype if step.out_dtype is None else jnp.dtype(step.out_dtype)
    if not jnp.issubdtype(returned, jnp.floating):
        raise InputTypeError(
            f"out_dtype={shown(returned.name)}; wanted floating point, or None for the queries' dtype."
        )
    # A wider output is computed from wider queries; a narrower one is rounded once more at the end.
    wider = returned.name in _FLOATS and returned.itemsize > query.dtype.itemsize
    dtype = returned if wider else query.dtype
    heads = _kv_heads(step, pages.shape)
    stored = LAYOUTS[step.layout].sizes(pages, None, query.shape[2], None).kv_heads
    quantised = pages.dtype.name in _QUANTISED
    if not quantised and pages.dtype.name not in _FLOATS:
        raise InputTypeError(f"the pages are {pages.dtype}; wanted one of {', '.join((*_FLOATS, *_QUANTISED))}.")
    page = pages.shape[1]
    length = page * min(step.width, pages.shape[0])
    length = length if max_length is None else min(length, max_length)
    manual = {axis.name for axis in axes_of(current_mesh()) if axis.kind == "manual"}
    cache = _cache(
        kv_heads=stored,
        head_dim=query.shape[2],
        dtype=dtype.name if quantised else pages.dtype.name,
        quantised=pages.dtype.name if quantised else None,
        page_size=page,
        pages=pages.shape[0],
        max_sequences=step.rows,
        max_length=length,
        layout=step.layout,
        # Inside the caller's shard_map the arrays hold a device's own heads.
        kv_head_axis=tuple(name for name in axis_names(kv_head_axis) if name not in manual) or None,
    )
    scale, remarks = step.softmax_scale, list(step.remarks)
    if step.q_scale is not None:
        scale *= step.q_scale
        remarks.append(
            f"q_scale={step.q_scale:g}: queries are divided by it and rounded to {pages.dtype}, and the products multiplied "
            f"by it; they are computed in {dtype}"
        )
    if step.k_scale is not None and not quantised:
        scale *= step.k_scale
    if dtype != query.dtype:
        remarks.append(f"out_dtype={returned.name}: the queries are cast to it, as the output has their dtype")
    elif returned != dtype:
        remarks.append(f"out_dtype={returned.name}: the output is computed in {dtype} and cast")
    if stored != heads:
        remarks.append(
            f"{heads} kv head{'s' if heads > 1 else ''} in an array with room for {stored}: the others are attended to as "
            "well, and left out of the output"
        )
    options = {
        "causal": step.causal,
        "sliding_window": step.sliding_window,
        "softmax_scale": scale,
        "logits_soft_cap": step.soft_cap,
    } | ({"update": "none"} if step.key is None else {})
    return Prepared(cache, dtype, returned, stored - heads, options, tuple(remarks))


@functools.lru_cache(maxsize=256)
def _cache(quantised: str | None, **fields: Any) -> KVCache:
    stored = {} if quantised is None else {"quantised": {"dtype": quantised, "scale": "tensor"}}
    return KVCache(layers=1, **fields, **stored)


def _kv_heads(step: ForeignStep, shape: tuple[int, ...]) -> int:
    """The kv heads of the call, after checking the shape of its pages against them. Errors: InputError."""
    dim = step.query.shape[2]
    if step.layout == "interleaved":
        if len(shape) != 4 or shape[2] % 2 or shape[3] != dim or 0 in shape:
            raise InputError(f"the pages have shape {shape}; wanted [pages, page_size, 2 * kv_heads, {dim}].")
        heads = shape[2] // 2
    else:
        pack = 4 // jnp.dtype(step.pages.dtype).itemsize
        heads = step.kv_heads if step.kv_heads is not None else math.prod(shape[2:4]) // 2
        expected = (-(-2 * heads // pack), pack, -(-dim // _LANES) * _LANES)
        if len(shape) != 5 or shape[2:] != expected or 0 in shape:
            raise InputError(
                f"the pages have shape {shape}; wanted [pages, page_size, {', '.join(map(str, expected))}] for {heads} kv heads "
                f"of {dim} in {step.pages.dtype}: keys and values alternate, {pack} to a word of 32 bits, in lanes of {_LANES}."
            )
    if step.kv_heads not in (None, heads):
        raise InputError(f"the keys have {step.kv_heads} heads and the pages {heads}; wanted the same number.")
    if step.query.shape[1] % heads:
        raise InputError(f"the queries have {step.query.shape[1]} heads; wanted a multiple of the {heads} kv heads.")
    return heads


def with_more_heads(x: Any, count: int, axis: int = 1) -> Any:
    """An array with zeros for `count` more heads."""
    if not count:
        return x
    x = jnp.asarray(x)
    return jnp.pad(x, [(0, count if dim == axis else 0) for dim in range(x.ndim)])


def scaled_query(step: ForeignStep) -> jax.Array:
    """The query divided by its scale, rounded to the dtype of the pages. Values out of its range become the least or largest."""
    query, dtype = jnp.asarray(step.query), jnp.dtype(step.pages.dtype)
    query = query / jnp.asarray(step.q_scale, query.dtype)
    info: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    limit = min(float(info.max), float(jnp.finfo(query.dtype).max))
    return jnp.clip(query, -limit, limit).astype(dtype)


def batch_of(step: ForeignStep, cache: KVCache) -> RaggedBatch:
    """The batch, with the id of padding behind each sequence's pages, where other libraries have any ids."""
    kv_lens, table, starts, count = step.batch()
    numpy: Any = np if all(isinstance(x, np.ndarray | np.generic) for x in (kv_lens, table)) else jnp
    table = table[:, : cache.table_width]
    page_counts = (kv_lens + (cache.page_size - 1)) // cache.page_size
    used = numpy.arange(table.shape[1], dtype=np.int32)[None] < page_counts[:, None]
    table = numpy.where(used, table, np.int32(cache.pages or 0))
    return RaggedBatch(cast(Any, starts), cast(Any, kv_lens), table, count)
