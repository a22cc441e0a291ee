"""Attention of a ragged batch over pages by the TPU kernels: one for decoding rows, one for chunks."""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from .....errors import InputError, InputTypeError, shown
from ...varying import alike
from ..paged import places, with_spans
from ..paged_checks import check_numbers, check_operands, check_spans, check_tree, int32, options_of, refuse_gradient
from ..paged_mask import NO_KEY, packed_tree
from ..paged_step import PagedOperands, PagedOptions, PagedStatic, batch_of
from .chunks import attend_chunks
from .decode import decode
from .geometry import LANES, Geometry, Layout, Options, rows_per_word
from .limits import chosen_sizes, reasons_against
from .memory import several_rows
from .selected import by_pieces, chosen_items
from .softmax import Columns
from .work_items import chunk_items, decode_items

__all__ = ["PageArrays", "paged_attention_tpu"]


class PageArrays(NamedTuple):
    """The arrays of a layer's pages, or what they store for each token: [tokens, kv_heads, row], in layouts with one array all of
    it in `key`, as a page has it. Scales are those by token, [tokens, kv_heads]; others are None."""

    key: jax.Array
    value: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    rope: jax.Array | None = None


def paged_attention_tpu(
    query: Float[Array, "tokens heads dim"],
    key_pages: Shaped[Array, "pages a b c"] | Shaped[Array, "pages page a b c"],
    value_pages: Shaped[Array, "pages a b value_dim"] | None,
    *,
    cu_q_lens: Int[Array, " sequences_and_one"],
    kv_lens: Int[Array, " sequences"],
    page_table: Int[Array, "sequences width"],
    num_seqs: Int[Array, ...] | int,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    key_scale: Float[Array, ...] | float | None = None,
    value_scale: Float[Array, ...] | float | None = None,
    rope_pages: Float[Array, "pages kv_heads page rope_dim"] | None = None,
    max_q_len: int | None = None,
    layout: Layout = "split",
    value_dim: int | None = None,
    pages_per_block: int | None = None,
    queries_per_block: int | None = None,
    buffers: int | None = None,
    vmem_limit_bytes: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
    rows: PageArrays | None = None,
    draft_tree: Bool[Array, "sequences drafts drafts"] | None = None,
    spans: Int[Array, "tokens 2"] | None = None,
    prefix_lengths: Int[Array, " sequences"] | None = None,
    selected: Int[Array, "tokens n"] | None = None,
    page_stride: int = 1,
    page_shard: Int[Array, ""] | int = 0,
) -> tuple[Array, Array, PageArrays | None]:
    """Return (output [tokens, heads, value_dim] in the query's dtype, lse float32 [tokens, heads], the pages if `rows` were
    written, else None).

    Semantics of `paged_attention`. layout: "split", pages [pages, page, kv_heads, dim] as there; "heads", [pages,
    kv_heads, page, dim]; "joined", key_pages [pages, kv_heads, page, dim + value_dim] and value_pages None; "latent", key_pages
    [pages, kv_heads, page, dim], whose first `value_dim` numbers are the values and whose scale is theirs too; the others may be
    rope_pages, without a scale; "interleaved", key_pages [pages, page, 2 kv_heads, dim], the key and the value of each head in
    turn; "packed", the same as [pages, page, 2 kv_heads / pack, pack, dim], the rows that share a 32-bit word apart. Rows may be
    padded at their end, with any finite values: key_pages to more than the query's dim, values to more than `value_dim` (None:
    the whole row is value, if it isn't in turn with a key). Per-token scales are laid out like the pages, without the last
    dimension: [pages, page, kv_heads] where tokens come first. Sizes of blocks: None for the result of `chosen_sizes` with
    `vmem_limit_bytes`. interpret: Pallas' interpreter, on any platform.

    rows: for a sequence with one row, the kernel writes its key and value into their page while it attends; the returned arrays
    take over the memory of the pages and of per-token scales. What longer sequences write must be in the pages already. A row
    whose position has no page in the table, or one with an id out of range, is dropped.

    page_stride, page_shard: as there; not beside `rows`. selected: as there; pieces of pages that hold such a key are fetched: of
    8 tokens where a page has a head's tokens one after another, or scales by token, else single ones. A key that comes twice
    counts once.

    Errors: InputError or InputTypeError.
    """
    sizes = {
        "max_q_len": max_q_len,
        "pages_per_block": pages_per_block,
        "queries_per_block": queries_per_block,
        "buffers": buffers,
        "chunk_size": chunk_size,
        "page_stride": page_stride,
    }
    check_numbers(softmax_scale, logits_soft_cap, sizes | {"vmem_limit_bytes": vmem_limit_bytes})
    query, key_pages = jnp.asarray(query), jnp.asarray(key_pages)
    value_pages = None if value_pages is None else jnp.asarray(value_pages)
    lengths = (
        int32("cu_q_lens", cu_q_lens),
        int32("kv_lens", kv_lens),
        int32("page_table", page_table),
        int32("num_seqs", num_seqs),
    )
    sinks, key_scale, value_scale = (None if x is None else jnp.asarray(x) for x in (sinks, key_scale, value_scale))
    if layout == "latent":
        value_scale = key_scale
    rope_pages = None if rope_pages is None else jnp.asarray(rope_pages)
    as_split = _as_split(layout, value_dim, query, key_pages, value_pages, key_scale, value_scale, rope_pages)

    def operands_of(key: Any, value: Any, key_scale: Any, value_scale: Any) -> PagedOperands:
        return PagedOperands(query, key, value, *lengths, sinks, key_scale, value_scale)

    def rope_fields() -> dict[str, Any]:
        return (
            {} if rope_pages is None else {"rope_row": rope_pages.shape[-1], "rope_dtype": np.dtype(rope_pages.dtype)}
        )

    chosen = None if selected is None else int32("selected", selected)
    check_operands(operands_of(*as_split)._replace(selected=chosen), "split")
    check_tree(operands_of(*as_split), draft_tree)
    check_spans(operands_of(*as_split), spans, prefix_lengths)
    value_row = key_pages.shape[-1] if value_pages is None else value_pages.shape[-1]
    geometry = replace(_geometry(layout, operands_of(*as_split)), key_row=key_pages.shape[-1], value_row=value_row)
    geometry = replace(geometry, **rope_fields())
    if chosen is not None:
        geometry = replace(geometry, selected=chosen.shape[1])
    shard = int32("page_shard", page_shard) if page_stride > 1 else None
    operands = operands_of(key_pages, value_pages, key_scale, value_scale)
    operands = operands._replace(rope_pages=rope_pages, selected=chosen, shard=shard)
    options = Options(
        **options_of(softmax_scale, causal, sliding_window, logits_soft_cap, max_q_len, chunk_size),
        sinks=sinks is not None,
        pages_per_block=pages_per_block or 0,
        queries_per_block=queries_per_block or 0,
        buffers=buffers or 0,
        vmem_limit_bytes=vmem_limit_bytes,
        interpret=interpret,
        writes=rows is not None,
        drafts=0 if draft_tree is None else draft_tree.shape[-1],
        spans=spans is not None or prefix_lengths is not None,
        stride=page_stride,
    )
    beside = {"spans": options.spans, "selected": selected is not None, "page_stride": page_stride > 1}
    if options.writes and (names := [name for name, there in beside.items() if there]):
        raise InputError(
            f"rows are given beside {' and '.join(names)}, where the kernel doesn't write them; write them before."
        )
    if rows is not None:
        _check_rows(geometry, rows)
    options = chosen_sizes(geometry, options)
    if reasons := reasons_against(geometry, options):
        raise InputError("; ".join(f"{message}; {hint}" for _, message, hint in reasons))
    # With jax_enable_x64 a Python number among the indices would be 64-bit, which Mosaic lacks.
    with jax.enable_x64(False):
        operands = operands._replace(num_seqs=operands.num_seqs.reshape(()))
        if draft_tree is not None:
            batch = batch_of(operands)
            tree = packed_tree(options, jnp.asarray(draft_tree), batch.kv_lens - batch.q_lens)
            operands = operands._replace(draft_tree=tree)
        operands = with_spans(operands, spans, prefix_lengths)
        if chosen is not None:
            return _attend_selected(geometry, options, operands)
        return _attend(geometry, options, operands, rows)


def _check_rows(geometry: Geometry, rows: PageArrays) -> None:
    """Refuse rows that aren't what the pages hold for a token."""
    for name, x in rows._asdict().items():
        stream = geometry.streams().get(name)
        expected = None
        if stream is not None:
            own = (geometry.kv_heads,) if name.endswith("scale") else geometry.row_block(name)
            expected = (geometry.tokens, *own), np.dtype(stream[1])
        actual = None if x is None else (x.shape, np.dtype(x.dtype))
        if actual != expected:
            raise InputError(
                f"rows.{name} is {actual}; wanted {expected}, what the pages hold for each token of the query."
            )


def _as_split(
    layout: Layout, value_dim: int | None, query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any, rope: Any
) -> tuple[Any, Any, Any, Any]:
    """Shapes and dtypes that pages and scales would have in the layout "split" without padding, for checks."""
    if layout not in get_args(Layout):
        raise InputError(f"layout={shown(layout)}; wanted one of {', '.join(get_args(Layout))}.")
    if (layout not in ("split", "heads")) != (value is None):
        raise InputError(
            f"layout={shown(layout)} with value_pages {'missing' if value is None else 'given'}; wanted them separate from "
            "key_pages in 'split' and 'heads', and in one array with them, value_pages=None, in other layouts."
        )
    whole = query.shape[-1] if query.ndim else 0
    dim = whole if rope is None else value_dim or 0
    if rope is not None:
        _check_rope(layout, rope, key, whole - dim)
    if layout in ("interleaved", "packed"):
        return *_alternating(layout, key, dim, value_dim or dim), key_scale, value_scale
    joined = value is None and layout != "latent"
    if key.ndim != 4 or key.shape[3] < dim + joined * (value_dim or 1):
        expected = "dim + value_dim" if joined else "dim"
        raise InputError(
            f"key_pages has the shape {key.shape}; wanted four dimensions, the last of them at least {expected}, with the "
            f"query's dim of {dim}."
        )
    if value is not None and value_dim is not None and (value.ndim != 4 or value.shape[3] < value_dim):
        raise InputError(f"value_pages has the shape {value.shape}; wanted rows of at least value_dim={value_dim}.")

    def as_split(x: Any, width: int | None = None) -> Any:
        if x is None or x.ndim < 3:
            return x
        shape = x.shape if layout == "split" else (x.shape[0], x.shape[2], x.shape[1], *x.shape[3:])
        return jax.ShapeDtypeStruct(shape if width is None else (*shape[:3], width), x.dtype)

    if value is None:
        value, value_dim = key, value_dim or (dim if layout == "latent" else key.shape[3] - dim)
    return as_split(key, whole), as_split(value, value_dim), as_split(key_scale), as_split(value_scale)


def _alternating(layout: Layout, pages: Any, dim: int, value_dim: int) -> tuple[Any, Any]:
    """Keys and values of pages in which both alternate."""
    pack = rows_per_word(pages.dtype)
    *before, row = pages.shape
    fits = len(before) == 3 and before[2] % 2 == 0
    if layout == "packed":
        fits = len(before) == 4 and before[3] == pack and before[2] * pack % 2 == 0
    if not fits or row < max(dim, value_dim):
        form = "2 kv_heads" if layout == "interleaved" else f"2 kv_heads / {pack}, {pack}"
        raise InputError(
            f"key_pages has the shape {pages.shape} in the layout {layout!r}; wanted [pages, page, {form}, dim] "
            f"for {pages.dtype}, with rows of at least {max(dim, value_dim)}."
        )
    shape = *before[:2], math.prod(before[2:]) // 2
    key, value = (jax.ShapeDtypeStruct((*shape, width), pages.dtype) for width in (dim, value_dim))
    return key, value


def _check_rope(layout: Layout, rope: Any, key: Any, dim: int) -> None:
    if layout != "latent" or rope.ndim != 4 or rope.shape[:3] != key.shape[:3] or not 0 < dim <= rope.shape[3]:
        raise InputError(
            f"rope_pages has the shape {rope.shape} in the layout {layout!r}; wanted 'latent', and {key.shape[:3]} with rows of "
            f"at least {dim}, what the query has besides value_dim."
        )
    if str(rope.dtype) not in ("bfloat16", "float32"):
        raise InputTypeError(f"rope_pages is {rope.dtype}; wanted bfloat16 or float32.")


def _geometry(layout: Layout, operands: PagedOperands) -> Geometry:
    """The geometry of operands in the layout "split"."""
    tokens, heads, dim = operands.query.shape
    values = operands.value_pages
    assert values is not None
    pages, page, kv_heads, value_dim = values.shape
    sequences, width = operands.page_table.shape
    return Geometry(
        layout=layout,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        key_row=dim,
        value_row=value_dim,
        pages=pages,
        page=page,
        sequences=sequences,
        width=width,
        dtype=np.dtype(operands.query.dtype),
        key_dtype=np.dtype(operands.key_pages.dtype),
        value_dtype=np.dtype(values.dtype),
        key_scale=None if operands.key_scale is None else operands.key_scale.ndim,
        value_scale=None if operands.value_scale is None else operands.value_scale.ndim,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(
    geometry: Geometry, options: Options, operands: PagedOperands, rows: PageArrays | None
) -> tuple[jax.Array, jax.Array, PageArrays | None]:
    operands, rows = alike((operands, rows))
    batch = batch_of(operands)
    seq, row, real = places(operands, batch)
    arrays = _arrays(geometry, options, operands, rows)
    heads_last = lambda has_output, x: has_output.reshape(-1, *[1] * (x.ndim - 1))  # noqa: E731
    pick = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731

    several = several_rows(geometry, options)
    alone, others = batch.q_lens == 1, batch.q_lens > 1
    if operands.spans is not None:  # the kernel for chunks has the spans
        has_span = operands.spans.least != NO_KEY
        alone, others = alone & ~has_span, others | (alone & has_span)
    words, count, listed = decode_items(geometry, options, operands, batch, alone if several else batch.q_lens > 0)
    output, lse, written = decode(geometry, options, arrays, words, count)
    arrays |= written  # the chunks' kernel reads the same memory
    has_output = real & (row == 0) & pick(listed)
    if several:
        chunks = chunk_items(geometry, options, operands, batch, others, seq, row)
        turned = lambda x: x if geometry.queries_first else x.transpose(1, 0, 2)  # noqa: E731
        packed = turned(arrays["query"].at[chunks.source].get(mode="promise_in_bounds"))
        of_chunks = arrays | {"query": packed} | ({} if chunks.numbers is None else {"numbers": chunks.numbers})
        many, many_lse = attend_chunks(geometry, options, of_chunks, chunks.words, chunks.listed)
        many = turned(many).at[chunks.place].get(mode="promise_in_bounds")
        block = options.queries_per_block
        by_row = many_lse.reshape(-1, *geometry.block_shape(block, 1)[:2])
        by_row = by_row if geometry.queries_first else by_row.swapaxes(1, 2)
        many_lse = by_row.at[chunks.item, chunks.row].get(mode="promise_in_bounds")
        output = jnp.where(heads_last(chunks.in_list, output), many, output)
        lse = jnp.where(heads_last(chunks.in_list, lse), many_lse, lse)
        has_output |= chunks.in_list
    attended = real if options.max_q_len is None else real & (row < options.max_q_len)
    stored = _stored(operands)
    whole = {n: arrays[f"{n}_pages"].reshape(stored[n].shape) for n in geometry.streams()}
    after = PageArrays(**whole) if written else None
    return *_with_unseen(geometry, operands, output, lse, has_output, attended), after


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend_selected(
    geometry: Geometry, options: Options, operands: PagedOperands
) -> tuple[jax.Array, jax.Array, PageArrays | None]:
    """Each token is a row of the kernel for single rows, over the pieces of pages that hold its keys."""
    operands = alike(operands)
    batch = batch_of(operands)
    seq, row, real = places(operands, batch)
    rules = {field.name: getattr(options, field.name) for field in fields(PagedOptions)}
    static = PagedStatic(
        **rules, platform="tpu", pages_a_block=1, pairs=1, large_blocks=0, block_q=1, layout=geometry.layout,
        stride=options.stride, value_dim=geometry.value_dim,
    )  # fmt: skip
    walked, sized = by_pieces(geometry, options)
    words, count, listed, rows = chosen_items(walked, static, operands, batch, seq, row, real)
    arrays = _arrays(walked, sized, operands, None) | {"chosen": rows}
    output, lse, _ = decode(walked, sized, arrays, words, count)
    attended = real if options.max_q_len is None else real & (row < options.max_q_len)
    return *_with_unseen(geometry, operands, output, lse, listed, attended), None


def _with_unseen(
    geometry: Geometry,
    operands: PagedOperands,
    output: jax.Array,
    lse: jax.Array,
    has_output: jax.Array,
    attended: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) with 0 and -inf, or the sinks of a row that is attended, where a kernel wrote nothing."""
    output = jnp.where(has_output[:, None, None], output[..., geometry.output_lanes], 0)
    unseen: Any = -jnp.inf
    if operands.sinks is not None:
        unseen = jnp.where(attended[:, None], operands.sinks.astype(np.float32)[None], -jnp.inf)
    return output, jnp.where(has_output[:, None], lse, unseen)


_attend.defjvp(refuse_gradient)
_attend_selected.defjvp(refuse_gradient)


def _arrays(
    geometry: Geometry, options: Options, operands: PagedOperands, rows: PageArrays | None
) -> dict[str, jax.Array]:
    """What the kernels take besides the work items."""
    query = operands.query
    if geometry.rope_dtype is not None:
        parts = query[..., : geometry.value_dim], query[..., geometry.value_dim :]
        widths = geometry.key_lanes[1], geometry.rope_row
        padded = (jnp.pad(x, ((0, 0), (0, 0), (0, n - x.shape[-1]))) for x, n in zip(parts, widths, strict=True))
        query = jnp.concatenate([*padded], -1)
    elif geometry.query_dim > geometry.dim:
        query = jnp.pad(query, ((0, 0), (0, 0), (0, geometry.query_dim - geometry.dim)))
    arrays = {"query": query, "table": operands.page_table.reshape(-1)}
    if options.stride > 1:
        assert operands.shard is not None
        arrays["shard"] = operands.shard
    columns = []
    scales = {"key_scale": operands.key_scale, "value_scale": operands.value_scale}
    for index, x in zip(Columns.of(geometry, options), (operands.sinks, *scales.values()), strict=True):
        if index is None:
            continue
        assert x is not None
        per_head = x if x.shape == (geometry.heads,) and index == 0 and options.sinks else _of_query_heads(geometry, x)
        columns.append(jnp.broadcast_to(per_head.astype(np.float32)[:, None], (geometry.heads, LANES)))
    if columns:
        arrays["columns"] = jnp.stack(columns)
    for name in geometry.streams():
        pages = _stored(operands)[name]
        arrays[f"{name}_pages"] = geometry.viewed(name, pages.astype(np.float32) if name in scales else pages)
    for name in () if rows is None else geometry.streams():
        row = getattr(rows, name)
        if name.endswith("scale"):
            row = row.astype(np.float32)
            wide = row[:, :, None], (*row.shape, LANES)
            row = row[:, None, :] if geometry.tokens_first else jnp.broadcast_to(*wide)
        arrays[f"{name}_row"] = row
    return arrays


def _stored(operands: PagedOperands) -> dict[str, Any]:
    """The arrays of pages by the names of streams."""
    rows = {"key": operands.key_pages, "value": operands.value_pages, "rope": operands.rope_pages}
    return rows | {"key_scale": operands.key_scale, "value_scale": operands.value_scale}


def _of_query_heads(geometry: Geometry, scale: jax.Array) -> jax.Array:
    """A number for all or for each kv head, expanded to query heads."""
    return jnp.repeat(jnp.broadcast_to(scale, (geometry.kv_heads,)), geometry.group)
