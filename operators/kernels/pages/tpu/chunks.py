"""The kernel for sequences with several rows: blocks of their rows against the pages that they see.

The query is [heads, rows, dim], each chunk starting at a multiple of a tile's rows, or [rows, heads, dim] where the heads fill
tiles, and is copied in like the pages. A block's last rows may be another chunk's: their results are overwritten by the block
that they belong to.
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
from ..paged_mask import chunk_start
from .geometry import LANES, Geometry, Options
from .pages import Pages, walk, whole_word
from .row_numbers import Lanes, Numbers
from .run import call, counts
from .softmax import Columns, Sums, add, begin, finish, in_lanes, lane_chunks, live_keys, seen_keys, spread, weigh
from .work_items import FIELDS, WorkItem, max_chunk_items, row_alignment

__all__ = ["attend_chunks", "chunk_scratch"]


def chunk_scratch(geometry: Geometry, options: Options) -> dict[str, Any]:
    """Scratch memory besides the pages' buffers."""
    block, rows = options.queries_per_block, geometry.group * options.queries_per_block
    return {
        "query_buffer": pltpu.VMEM((2, *geometry.block_shape(block, geometry.query_dim)), geometry.dtype),
        "output_buffer": pltpu.VMEM(geometry.block_shape(block, geometry.summed_dim), geometry.dtype),
        "peak": pltpu.VMEM((geometry.kv_heads, rows, LANES), jnp.float32),
        "total": pltpu.VMEM((geometry.kv_heads, rows, LANES), jnp.float32),
        "weighted": pltpu.VMEM((geometry.kv_heads, rows, geometry.summed_dim), jnp.float32),
        "query_here": pltpu.SemaphoreType.DMA((2,)),
        "output_gone": pltpu.SemaphoreType.DMA((1,)),
    }


def kernel(refs: dict[str, Any], geometry: Geometry, options: Options) -> None:
    number, count = pl.program_id(0), refs["count"][0]
    pages, columns = Pages(geometry, options, refs), Columns.of(geometry, options)
    block, group = options.queries_per_block, geometry.group
    rows, size = group * block, options.pages_per_block * geometry.page
    rows_shape, query_axis = ((block, group), 0) if geometry.queries_first else ((group, block), 1)
    align = row_alignment(geometry)

    def column(index: int | None, head: Any) -> jax.Array | None:
        """A column for the rows of a kv head, [rows, 128]."""
        if index is None:
            return None
        of_head = refs["columns"][index, pl.ds(head * group, group), :]
        of_head = of_head[None] if geometry.queries_first else of_head[:, None, :]
        return jnp.broadcast_to(of_head, (*rows_shape, LANES)).reshape(rows, LANES)

    def block_of(array: Any, start: Any) -> Any:
        """A block of packed queries or outputs."""
        at = pl.ds(start, block)
        return array.at[at] if geometry.queries_first else array.at[:, at, :]

    def heads_of(head: Any) -> Any:
        """A kv head's query heads in a buffer; the only one's are all of them."""
        return slice(None) if geometry.queries_first else pl.ds(head * group, group)

    def query_copy(number: Any) -> Any:
        start = pl.multiple_of(refs["words"][number * FIELDS + 1], align)
        half = lax.rem(number, np.int32(2))
        return pltpu.make_async_copy(
            block_of(refs["query"], start), refs["query_buffer"].at[half], refs["query_here"].at[half]
        )

    def output_copy(number: Any) -> Any:
        start = pl.multiple_of(refs["words"][number * FIELDS + 1], align)
        return pltpu.make_async_copy(refs["output_buffer"], block_of(refs["output"], start), refs["output_gone"].at[0])

    @pl.when(number < count)
    def _run_item() -> None:
        item = WorkItem.read(refs["words"], number)
        pl.when(number == 0)(lambda: query_copy(number).start())
        pl.when(number + 1 < count)(lambda: query_copy(number + 1).start())
        query_copy(number).wait()
        half_of_query = lax.rem(number, np.int32(2))

        def start_sums(head: Any) -> None:
            sums = begin(rows, geometry.summed_dim, column(columns.sinks, head))
            refs["peak"][head], refs["total"][head], refs["weighted"][head] = sums

        def visit(slot: Any, first: Any, word: Any, carry: None) -> None:
            by_token = {}
            if 3 in (geometry.key_scale, geometry.value_scale):
                _, there = live_keys(geometry, options, first, word, item.keys, shard=pages.shard)
                by_token = pages.token_scales(slot, there, first)

            def of_heads(masked: bool) -> None:
                seen = None
                if masked:
                    place, there = live_keys(geometry, options, first, word, item.keys, shard=pages.shard)
                    row = lax.broadcasted_iota(jnp.int32, (*rows_shape, size), query_axis).reshape(rows, size)
                    wide = lambda x: jnp.broadcast_to(x, (rows, size))  # noqa: E731
                    there = wide(there.astype(jnp.int32)) == 1
                    numbers = Numbers(geometry, options, refs["numbers"], size) if Lanes.of(options) else None
                    row = row if numbers is None else numbers.offset(row)
                    seen = seen_keys(options, there, wide(place), item.position, row)
                    if numbers is not None:
                        seen = there & numbers.seen(seen, wide(place))

                def of_head(head: Any) -> None:
                    query = refs["query_buffer"][half_of_query, heads_of(head)]
                    query = query.reshape(rows, geometry.query_dim).astype(geometry.compute_dtype)
                    scale = column(columns.key_scale, head)
                    scale = None if scale is None else spread(scale, size)
                    if "key_scale" in by_token:
                        scale = row_of(by_token["key_scale"], head)
                    apart = geometry.rope_dtype is not None
                    raw = pages.products(query, pages.key(slot, head), slot, head, scale if apart else None)
                    x = weigh(options, raw, None if apart else scale)
                    x = x if seen is None else jnp.where(seen, x, -jnp.inf)
                    sums = Sums(refs["peak"][head], refs["total"][head], refs["weighted"][head])
                    p, peak, total, shrink = add(sums, x)
                    if "value_scale" in by_token:
                        p = p * row_of(by_token["value_scale"], head)
                    step = tile_product(p.astype(geometry.compute_dtype), pages.value(slot, head), 1, 0)
                    refs["peak"][head], refs["total"][head] = peak, total
                    refs["weighted"][head] = sums.weighted * spread(shrink, geometry.summed_dim) + step

                each_head(geometry, of_head)

            place, last = pages.own.begin(first), pages.own.begin(first + (options.pages_per_block - 1))
            last = last + (geometry.page - 1)
            full = (word == whole_word(options.pages_per_block)) & (last < item.keys) & (item.position >= 0)
            if options.reach is not None:
                full &= last <= item.position + options.reach
            if options.left is not None:
                full &= place >= item.position + options.farthest - options.left
            if options.chunk is not None:  # that of the last row begins last, that of the first ends first
                full &= place >= chunk_start(item.position + np.int32(options.farthest), options.chunk)
                full &= last < chunk_start(item.position, options.chunk) + np.int32(options.chunk)
            if options.drafts:
                full &= last < item.position
            pl.when(full)(lambda: of_heads(False))
            pl.when(jnp.logical_not(full))(lambda: of_heads(True))

        each_head(geometry, start_sums)
        walk(pages, refs["words"], number, count, visit, None)
        pl.when(number > 0)(lambda: output_copy(number - 1).wait())

        def end_sums(head: Any) -> None:
            sums = Sums(refs["peak"][head], refs["total"][head], refs["weighted"][head])
            output, lse = finish(sums, column(columns.value_scale, head))
            output = output.astype(geometry.dtype).reshape(*rows_shape, geometry.summed_dim)
            refs["output_buffer"][heads_of(head)] = output
            refs["lse"][head] = in_lanes(lse)

        each_head(geometry, end_sums)
        output_copy(number).start()
        pl.when(number + 1 == count)(lambda: output_copy(number).wait())


def each_head(geometry: Geometry, step: Any) -> None:
    """step(kv head) for each: in a loop, unless a page's heads are placed within tiles, where the place must be static."""
    if geometry.tokens_first:
        for head in range(geometry.kv_heads):
            step(head)
    else:
        lax.fori_loop(np.int32(0), np.int32(geometry.kv_heads), lambda head, _: step(head), None)


def row_of(rows: jax.Array, head: Any) -> jax.Array:
    """One row [1, keys] of [kv_heads, keys]."""
    on_head = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == head
    return jnp.where(on_head, rows, 0.0).sum(axis=0, keepdims=True)


def attend_chunks(
    geometry: Geometry, options: Options, arrays: dict[str, jax.Array], words: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(output, packed as the query, lse [work items, kv_heads, rows of a block]); only work items' rows are written.

    arrays: as decode's, the query packed; numbers of the work items' rows, if they need any.
    """
    items, packed = max_chunk_items(geometry, options)
    lse_rows = lane_chunks(geometry.group * options.queries_per_block)
    anywhere = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    scalars = {"words": words, "count": counts(arrays, count), "table": arrays["table"]}
    inputs = {"query": (arrays["query"], anywhere)}
    for name in geometry.streams():
        inputs[f"{name}_pages"] = arrays[f"{name}_pages"], anywhere
    if "numbers" in arrays:
        block = (None, *arrays["numbers"].shape[1:])
        inputs["numbers"] = arrays["numbers"], pl.BlockSpec(block, lambda number, *_: (number, 0, 0))
    if "columns" in arrays:
        inputs["columns"] = arrays["columns"], pl.BlockSpec(arrays["columns"].shape, lambda *_: (0, 0, 0))
    outputs = {
        "output": (geometry.block_shape(packed, geometry.summed_dim), geometry.dtype),
        "lse": ((items, geometry.kv_heads, lse_rows, LANES), np.dtype(np.float32)),
    }
    specs = [anywhere, pl.BlockSpec((None, geometry.kv_heads, lse_rows, LANES), lambda number, *_: (number, 0, 0, 0))]
    scratch = chunk_scratch(geometry, options)
    results = call("attnops_paged_chunks", kernel, geometry, options, scalars, inputs, outputs, specs, scratch, count)
    rows = geometry.group * options.queries_per_block
    return results["output"], results["lse"].reshape(items, geometry.kv_heads, lse_rows * LANES)[..., :rows]
