"""The kernel for sequences with one row each: all heads of a row against its pages, a block of them at a time.

Heads are the rows of a product. A kv head's keys are multiplied with the whole registers that hold its query heads, and
the results of other heads are dropped when the logits are assembled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...precision import tile_product
from .geometry import LANES, Geometry, Options, rows_per_word, sublanes
from .pages import Pages, walk
from .run import call, counts
from .selected import rows_of_items
from .softmax import (
    Columns,
    Sums,
    add,
    begin,
    divided,
    finish,
    in_lanes,
    lane_chunks,
    live_keys,
    seen_keys,
    spread,
    weigh,
)
from .work_items import FIELDS, WorkItem
from .writes import Writer, write_scratch

__all__ = ["decode", "windows"]


def windows(geometry: Geometry) -> list[tuple[slice, list[tuple[int, int]]]]:
    """Whole registers of query heads: (rows, [(kv head, its first row among them)])."""
    tile = sublanes(geometry.compute_dtype)
    head_windows: list[tuple[slice, list[tuple[int, int]]]] = []
    for low in range(0, geometry.heads, tile):
        high = min(low + tile, geometry.heads)
        kv_heads = range(low // geometry.group, (high - 1) // geometry.group + 1)
        if len(kv_heads) == 1 and head_windows and [j for j, _ in head_windows[-1][1]] == list(kv_heads):
            head_windows[-1] = (
                slice(head_windows[-1][0].start, high),
                head_windows[-1][1],
            )  # of one kv head: one product
        else:
            head_windows.append((slice(low, high), [(j, j * geometry.group - low) for j in kv_heads]))
    return head_windows


def kernel(refs: dict[str, Any], geometry: Geometry, options: Options) -> None:
    number, count = pl.program_id(0), refs["count"][0]
    writer = Writer(geometry, refs, number) if options.writes else None
    pages, columns = Pages(geometry, options, refs, writer), Columns.of(geometry, options)
    column = lambda i: None if i is None else refs["columns"][i]  # noqa: E731

    @pl.when(number < count)
    def _run_item() -> None:
        item = WorkItem.read(refs["words"], number)
        query = refs["query"][...].astype(geometry.compute_dtype)
        sums = begin(geometry.heads, geometry.summed_dim, column(columns.sinks))

        visit = _all_at_once if by_product(geometry) else _head_by_head
        step = lambda *at: visit(geometry, options, pages, columns, refs, item, query, *at)  # noqa: E731
        sums = walk(pages, refs["words"], number, count, step, sums)
        output, lse = finish(sums, column(columns.value_scale))
        refs["output"][...] = output.astype(refs["output"].dtype)
        refs["lse"][...] = in_lanes(lse)
        if writer is not None:
            pl.when(number + 1 == count)(writer.finish)


def by_product(geometry: Geometry) -> bool:
    """Whether all kv heads of a page form one matrix, with other heads' products dropped afterwards.

    Where a page's tokens come first a head's keys aren't contiguous, and gathering them takes longer than that.
    """
    if not geometry.tokens_first or 3 in (geometry.key_scale, geometry.value_scale):
        return False
    return not geometry.alternating or (geometry.in_words("key") and rows_per_word(geometry.key_dtype) > 1)


def _all_at_once(
    geometry: Geometry,
    options: Options,
    pages: Pages,
    columns: Columns,
    refs: dict[str, Any],
    item: WorkItem,
    query: jax.Array,
    slot: Any,
    first: Any,
    word: Any,
    sums: Sums,
) -> Sums:
    kv_heads = geometry.kv_heads
    order = pages.flat_order()
    if pages.chosen is None:
        place, there = live_keys(geometry, options, first, word, item.keys, kv_heads, order, pages.shard)
    else:
        place, there = pages.chosen.keys(options.pages_per_block, first, item.end, kv_heads, order)
    raw = tile_product(query, pages.flat(False, slot), 1, 1)
    head = order - divided(order, kv_heads) * kv_heads
    head = jnp.where(seen_keys(options, there, place, item.position), head, -1)
    own_head = head == divided(lax.broadcasted_iota(jnp.int32, raw.shape, 0), geometry.group)
    scale = None if columns.key_scale is None else spread(refs["columns"][columns.key_scale], raw.shape[1])
    p, peak, total, shrink = add(sums, jnp.where(own_head, weigh(options, raw, scale), -jnp.inf))
    product = lambda: tile_product(p.astype(geometry.compute_dtype), pages.flat(True, slot), 1, 0)  # noqa: E731
    step = pages.of_chosen(product, slot, first)
    return Sums(peak, total, sums.weighted * spread(shrink, step.shape[1]) + step)


def _head_by_head(
    geometry: Geometry,
    options: Options,
    pages: Pages,
    columns: Columns,
    refs: dict[str, Any],
    item: WorkItem,
    query: jax.Array,
    slot: Any,
    first: Any,
    word: Any,
    sums: Sums,
) -> Sums:
    if pages.chosen is None:
        place, there = live_keys(geometry, options, first, word, item.keys, shard=pages.shard)
    else:
        place, there = pages.chosen.keys(options.pages_per_block, first, item.end)
    seen = seen_keys(options, there, place, item.position)
    by_token = pages.token_scales(slot, there, first)

    def logits(rows: slice, head: int) -> jax.Array:
        scale = by_token.get("key_scale")
        scale = of_rows(rows) if scale is None else scale[head : head + 1]
        return pages.products(query[rows], keys[head], slot, head, scale)

    def of_rows(rows: slice) -> jax.Array | None:
        """Scales by head, if they aren't those of all of a key's numbers."""
        if columns.key_scale is None or geometry.rope_dtype is None:
            return None
        return spread(refs["columns"][columns.key_scale][rows], keys[0].shape[0])

    def weighted(rows: slice, head: int, values: list[jax.Array]) -> jax.Array:
        part, scale = p[rows], by_token.get("value_scale")
        if scale is not None:
            part = part * scale[head : head + 1]
        return tile_product(part.astype(geometry.compute_dtype), values[head], 1, 0)

    keys = [pages.key(slot, j) for j in range(geometry.kv_heads)]
    raw = _by_head(geometry, logits)
    every = columns.key_scale is not None and geometry.rope_dtype is None
    scale = None if not every else spread(refs["columns"][columns.key_scale], raw.shape[1])
    p, peak, total, shrink = add(sums, jnp.where(seen, weigh(options, raw, scale), -jnp.inf))

    def product() -> jax.Array:
        values = [pages.value(slot, j) for j in range(geometry.kv_heads)]
        return _by_head(geometry, lambda rows, head: weighted(rows, head, values))

    step = pages.of_chosen(product, slot, first)
    return Sums(peak, total, sums.weighted * spread(shrink, step.shape[1]) + step)


def _by_head(geometry: Geometry, of_head: Any) -> jax.Array:
    """of_head(rows, kv head), each for the rows of its own query heads: [heads, ...]."""
    head_outputs = []
    for rows, kv_heads in windows(geometry):
        whole = of_head(rows, kv_heads[0][0])
        for head, start in kv_heads[1:]:
            row = lax.broadcasted_iota(jnp.int32, whole.shape, 0)
            whole = jnp.where(row >= start, of_head(rows, head), whole)
        head_outputs.append(whole)
    return head_outputs[0] if len(head_outputs) == 1 else jnp.concatenate(head_outputs, axis=0)


def decode(
    geometry: Geometry, options: Options, arrays: dict[str, jax.Array], words: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(output [tokens, heads, summed dim], lse [tokens, heads], the pages after); only the work items' rows are written.

    arrays: shard, if pages are in turn on several devices; table, flat, or `chosen` where tokens name their keys; query;
    key_pages and others that are fetched; columns. If the kernel writes, key_row and others with the tokens' own numbers; else
    the pages after are {}.
    """
    heads, lse_rows = geometry.heads, lane_chunks(geometry.heads)
    row = lambda number, words, *_: (words[number * FIELDS + 1], 0, 0)  # noqa: E731
    scalars = {"words": words, "count": counts(arrays, count)} | (
        {} if geometry.selected else {"table": arrays["table"]}
    )
    inputs: dict[str, tuple[jax.Array, pl.BlockSpec]] = {
        "query": (arrays["query"], pl.BlockSpec((None, heads, geometry.query_dim), row)),
    }
    if geometry.selected:
        inputs |= rows_of_items(arrays["chosen"])
    anywhere = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    where = [f"{name}_pages" for name in geometry.streams()]
    source = {name: f"{name}_before" if options.writes else name for name in where}
    inputs |= {source[name]: (arrays[name], anywhere) for name in where}
    if options.writes:
        for name in geometry.streams():
            row_array = arrays[f"{name}_row"]
            whole = lambda number, words, *_, rank=row_array.ndim: (words[number * FIELDS + 1], *[0] * (rank - 1))  # noqa: E731
            inputs[f"{name}_row"] = row_array, pl.BlockSpec((None, *row_array.shape[1:]), whole)
    if "columns" in arrays:
        shape = arrays["columns"].shape
        inputs["columns"] = arrays["columns"], pl.BlockSpec(shape, lambda *_: (0, 0, 0))
    outputs: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "output": ((geometry.tokens, heads, geometry.summed_dim), geometry.dtype),
        "lse": ((geometry.tokens, lse_rows, LANES), np.dtype(np.float32)),
    }
    specs = [pl.BlockSpec((None, *shape[1:]), row) for shape, _ in outputs.values()]
    scratch, same = {}, {}
    if options.writes:
        outputs |= {name: (arrays[name].shape, arrays[name].dtype) for name in where}
        specs += [anywhere] * len(where)
        scratch, same = write_scratch(geometry), {source[name]: name for name in where}
    name = "attnops_paged_selected" if geometry.selected else "attnops_paged_decode"
    results = call(name, kernel, geometry, options, scalars, inputs, outputs, specs, scratch, count, same)
    lse = results["lse"].reshape(geometry.tokens, lse_rows * LANES)[:, :heads]
    return results["output"], lse, {name: results[name] for name in same.values()}
