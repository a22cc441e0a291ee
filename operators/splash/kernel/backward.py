"""The backward passes: gradients of query, key and value from the weights, which are recomputed from the lse.

Tiles are held as [keys, query rows]: lse and delta then lie along the lanes, as they are stored, and three of the five products
need no transposed operand. The fused backward pass computes all three gradients in the forward pass's order; the sums for the
keys of a kv head stay in VMEM meanwhile. If those of all keys don't fit, the keys are split into parts with one pass each, and
the query's gradient is passed from one to the next. Unfused, one pass by kv block computes the gradients of key and value, and
one by query block that of the query.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...kernels.precision import tile_product
from ...kernels.scores import without_padded_rows
from .grid import Input, KernelGrid, Output
from .key_sums import KeySums
from .schedule import FIRST, LAST
from .subtiles import SubTile, pipelined, rows_of, subtiles_of
from .tile import Logits, Tile
from .weigh import weigh

__all__ = ["add_key_gradients", "add_query_gradient", "backward_kernel"]


def add_query_gradient(
    grid: KernelGrid, q_padded: int, dim: int, dtype: Any, transposed: bool, before: jax.Array | None = None
) -> None:
    """Add d_query [batch, heads, q, dim] and its sum, maybe transposed, which starts with `before`: the result of a
    pass over earlier keys.
    """
    shape = (grid.batch, grid.heads.q_heads, q_padded, dim)
    spec = grid.query_block(dim, "head_dim_minor")
    grid.outputs["d_query"] = Output(shape, dtype, spec)
    if before is not None:
        grid.inputs["d_query_before"] = Input(before, spec, "q")
        if before.dtype == dtype:  # each block is read once, before it is written
            grid.aliased["d_query_before"] = "d_query"
    sums = (dim, grid.block_q) if transposed else (grid.block_q, dim)
    grid.scratch["q_sum"] = pltpu.VMEM((len(grid.heads.in_tile), *sums), jnp.float32)


def add_key_gradients(grid: KernelGrid, kv_padded: int, dims: Mapping[str, int], dtype: Any, transposed: bool) -> None:
    """Add d_key [batch, kv heads, kv, dim], d_value and their sums, maybe transposed, for one block of keys at a time. dims: as
    in `add_key_sums`."""
    for name, width in dims.items():
        shape = (grid.batch, grid.heads.kv_heads, kv_padded, width)
        grid.outputs[f"d_{name}"] = Output(shape, dtype, grid.key_block(width, "head_dim_minor"))
        sums = (width, grid.block_kv) if transposed else (grid.block_kv, width)
        grid.scratch[f"{name}_sum"] = pltpu.VMEM((grid.heads.kv_tile, *sums), jnp.float32)


def backward_kernel(
    refs: dict[str, Any],
    *,
    grid: KernelGrid,
    logits: Logits,
    compute: tuple[int, int],
    pipeline_depth: int,
    layouts: tuple[str, str, str],
    stationary_weights: bool,
    first_block: int,
    query_scale: float,
    in_keys: bool = False,
) -> None:
    """One step of a backward pass; the sums that it is given determine which gradients it computes.

    compute: the queries and keys of a sub-tile. pipeline_depth: how many sub-tiles the products of queries and keys, and of
    values and the output's gradient, run ahead of what uses them. first_block: the first kv block of the sums of the keys, if
    they cover many. query_scale: the remaining factor of the query's gradient, 1 if another pass continues with it.
    stationary_weights: gradients are computed and summed transposed. The matrix unit then holds the weights, which fill it, and
    the other factor, whose few columns would fill only a part, streams past. in_keys: values are a part of their keys, and so are
    their sums; the logits' gradients then have their scale at once, which the values' don't have.
    """
    tile = Tile(grid, logits, refs, transposed=True)
    heads = grid.heads.in_tile
    q_time, k_time, v_time = (1 if layout == "seq_minor" else 0 for layout in layouts)
    of_query, of_keys = "q_sum" in refs, "key_sum" in refs
    fused = of_query and of_keys
    first, last = _ends(tile, grid, fused)
    all_keys = KeySums(refs, grid, stationary_weights, first_block * grid.block_kv) if fused else None

    def clear(*names: str) -> None:
        for name in names:
            refs[name][...] = jnp.zeros_like(refs[name])

    def stored_or_rows(x: jax.Array) -> jax.Array:
        """Convert a sum between its stored form and rows."""
        return x.T if stationary_weights else x

    # A kv head's guards are nested in those of a query block: this shows the static clock what is done once per head.
    @pl.when(tile.has_flag(FIRST) if of_query else first)
    def _start() -> None:
        if "d_query_before" in refs:
            for number in range(len(heads)):
                refs["q_sum"][number] = stored_or_rows(refs["d_query_before"][number])
        elif of_query:
            clear("q_sum")
        if all_keys is not None:
            pl.when(first)(all_keys.clear)
        elif of_keys:
            clear("key_sum", *(() if in_keys else ("value_sum",)))

    def run_variant(number: int) -> None:
        variant = tile.enter(number)
        tile.zero_hidden(variant, {"key": k_time, "value": v_time})
        dropout = tile.dropout_keys()
        factors: dict[Any, tuple[Any, int]] = {}

        def multiply(subtile: SubTile) -> tuple[jax.Array, Any, jax.Array]:
            """(logits, their pull, gradients of the weights)."""
            key, value = key_and_value(subtile)
            products = tile_product(key, query_of(subtile), 1 - k_time, 1 - q_time)
            d_out = rows_of(refs["d_output"], (subtile.number,), subtile.queries, 0)
            return *weigh(tile, products, subtile), tile_product(value, d_out, 1 - v_time, 1)

        def accumulate(subtile: SubTile, products: tuple[jax.Array, Any, jax.Array]) -> None:
            (x, pull, d_p), kv_head = products, subtile.head[0]
            query, d_out = query_of(subtile), rows_of(refs["d_output"], (subtile.number,), subtile.queries, 0)
            lse = refs["lse"][subtile.number, :, subtile.queries]
            p = logits.exp(without_padded_rows(logits.static_args.score, x, lse) - lse)
            keep = tile.keep(dropout[subtile.number], subtile)
            d_p = tile.dropped(d_p, keep)
            d_x = p * (d_p - refs["delta"][subtile.number, :, subtile.queries])
            d_x = pull(d_x)[0]
            d_x = (d_x * logits.scale if in_keys else d_x).astype(query.dtype)
            if of_keys:
                start, size = subtile.keys.start, subtile.shape[1]
                rows = pl.ds(start, size)
                if fused:
                    block = tile.step.kv_block - first_block
                    rows = pl.ds(pl.multiple_of(block * grid.block_kv + start, size), size)
                p = tile.dropped(p, keep).astype(d_out.dtype)
                add("value_sum", kv_head, rows, p, 1, factor("d_output", (subtile.number,), subtile.queries, 0))
                add("key_sum", kv_head, rows, d_x, 1, factor("query", (subtile.number,), subtile.queries, q_time))
            if of_query:
                add("q_sum", subtile.number, subtile.queries, d_x, 0, key_factor(subtile))

        def key_factor(subtile: SubTile) -> tuple[Any, int]:
            """`factor` of a sub-tile's keys."""
            at = "key", subtile.head[:1], subtile.keys.start
            if at not in factors:
                factors[at] = as_factor(tile.clean("key", subtile, k_time), k_time)
            return factors[at]

        def factor(name: str, head: tuple[int, ...], rows: slice, seq_minor: int) -> tuple[Any, int]:
            """(rows of a tensor, their axis); transposed once per visit if the products require it."""
            at = name, head, rows.start
            if at not in factors:
                factors[at] = as_factor(rows_of(refs[name], head, rows, seq_minor), seq_minor)
            return factors[at]

        def as_factor(x: Any, seq_minor: int) -> tuple[Any, int]:
            turns = stationary_weights and not seq_minor
            return (x.T, 1) if turns else (x, seq_minor)

        pipelined(subtiles_of(grid, *compute, variant), pipeline_depth, multiply, accumulate)

    def query_of(subtile: SubTile) -> Any:
        return rows_of(refs["query"], (subtile.number,), subtile.queries, q_time)

    def key_and_value(subtile: SubTile) -> tuple[Any, Any]:
        return tile.clean("key", subtile, k_time), tile.clean("value", subtile, v_time)

    def add(name: str, head: int, rows: Any, weights: jax.Array, axis: int, factor: tuple[Any, int]) -> None:
        """Add the product of the weights with a factor, over this axis of the weights, to some rows of a sum."""
        if stationary_weights:
            refs[name][head, :, rows] += tile_product(factor[0], weights, factor[1], axis)
        else:
            refs[name][head, rows, :] += tile_product(weights, factor[0], axis, factor[1])

    for number in range(1, len(grid.schedule.variants) + 1):
        pl.when(tile.variant == number)(functools.partial(run_variant, number))

    def query_done() -> None:
        for number in range(len(heads)):
            factor = 1.0 if in_keys else query_scale
            refs["d_query"][number] = (stored_or_rows(refs["q_sum"][number]) * factor).astype(refs["d_query"].dtype)

    def keys_done() -> None:
        scales = {"key": 1.0} if in_keys else {"key": logits.scale, "value": 1.0}
        if all_keys is not None:
            all_keys.leave(tile.step.batch, tile.step.kv_tile, scales)
            return
        for name, scale in scales.items():
            sums, out = refs[f"{name}_sum"], refs[f"d_{name}"]
            for head in range(out.shape[0]):
                out[head] = (stored_or_rows(sums[head]) * scale).astype(out.dtype)

    # A list made on the device may end in entries without flags; there the last query block is written twice.
    @pl.when((tile.has_flag(LAST) | last) if of_query else last)
    def _end() -> None:
        if of_query:
            query_done()
        if fused:
            pl.when(last)(keys_done)
        elif of_keys:
            keys_done()


def _ends(tile: Tile, grid: KernelGrid, fused: bool) -> tuple[Any, Any]:
    """(first, last) step that adds to the sums of the keys: of a kv head if fused, else of a kv block."""
    of_group = grid.heads.group // grid.heads.group_tile
    group_tile = tile.step.group_tile
    if not fused:
        return tile.has_flag(FIRST) & (group_tile == 0), tile.has_flag(LAST) & (group_tile == of_group - 1)
    entry, count = pl.program_id(3), pl.num_programs(3)  # the fused pass goes by query block
    return (entry == 0) & (group_tile == 0), (entry == count - 1) & (group_tile == of_group - 1)


def row_numbers(x: jax.Array, fill: float, q_padded: int) -> jax.Array:
    """[batch, heads, q] as [batch, heads, 1, padded q]."""
    short = q_padded - x.shape[-1]
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * 2 + [(0, short, 0)])[..., None, :]
