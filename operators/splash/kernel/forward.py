"""The forward pass: online softmax over the live tiles of each query block.

int8 and fp8 keys and values are converted to the query's dtype here, exactly. A key's scale is applied to its
logits, a value's to the value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...kernels.precision import tile_product
from .grid import KernelGrid, Output
from .schedule import FIRST, LAST
from .subtiles import SubTile, pipelined, rows_of, subtiles_of
from .tile import Logits, Tile, columns
from .weigh import weigh

__all__ = ["forward_kernel", "forward_outputs", "forward_scratch"]

_LANES, _SUBLANES = 128, 16  # per register of bfloat16
# The peak of a row without visible keys: finite, so that the exponential of -inf minus it is 0 and not NaN.
_NOTHING = float(jnp.finfo(jnp.float32).min)


def forward_outputs(
    grid: KernelGrid, q_padded: int, value_dim: int, dtype: Any, normalised: bool, tokens_first: bool
) -> None:
    """Add the output and the lse [batch, heads, 1, q].

    The output is [batch, heads, q, value dim], or, tokens_first, [batch, q, heads * value dim].
    Without `normalised` the output is the weighted sum in float32, and "divisor", in the lse's layout, is what to divide it by.
    """
    shape = (grid.batch, grid.heads.q_heads)
    if tokens_first:
        sizes: tuple[int, ...] = (grid.batch, q_padded, grid.heads.q_heads * value_dim)
        out = grid.token_block(value_dim)
    else:
        sizes, out = (*shape, q_padded, value_dim), grid.query_block(value_dim, "head_dim_minor")
    grid.outputs["output"] = Output(sizes, dtype if normalised else jnp.float32, out)
    for name in ("lse",) if normalised else ("lse", "divisor"):
        grid.outputs[name] = Output((*shape, 1, q_padded), jnp.float32, grid.row_block())


@dataclass(frozen=True)
class RowNumbers:
    """Layout of one number per query row in a tile: repeated over 128 lanes, or, transposed, in a lane and over 8 sublanes."""

    transposed: bool

    def shape(self, rows: int) -> tuple[int, int]:
        """The shape of this many rows' numbers."""
        return (8, rows) if self.transposed else (rows, _LANES)

    def at(self, rows: slice) -> tuple[slice, slice]:
        """The index of some rows' numbers."""
        return (slice(None), rows) if self.transposed else (rows, slice(None))

    def beside(self, numbers: jax.Array, width: int) -> jax.Array:
        """For arithmetic with this many keys, or values, of each row."""
        if self.transposed:
            return numbers[:1]
        if width <= _LANES:
            return numbers[:, :width]
        return jnp.tile(numbers, (1, -(-width // _LANES)))[:, :width]

    def lane(self, numbers: jax.Array) -> jax.Array:
        """[1, rows]."""
        return numbers[:1] if self.transposed else numbers.T[:1]


def forward_scratch(grid: KernelGrid, value_dim: int, transposed: bool) -> None:
    """Add each row's peak and sum, and the weighted sum of values: [rows, value dim], or transposed."""
    heads, numbers = len(grid.heads.in_tile), RowNumbers(transposed).shape(grid.block_q)
    for name in ("peak", "total"):
        grid.scratch[name] = pltpu.VMEM((heads, *numbers), jnp.float32)
    sums = (value_dim, grid.block_q) if transposed else (grid.block_q, value_dim)
    grid.scratch["sum"] = pltpu.VMEM((heads, *sums), jnp.float32)


def forward_kernel(
    refs: dict[str, Any],
    *,
    grid: KernelGrid,
    logits: Logits,
    compute: tuple[int, int],
    compute_in: int,
    transposed: bool,
    pipeline_depth: int,
    layouts: tuple[str, str, str],
    normalised: bool,
    sum_by_product: bool,
    tokens_first: bool,
) -> None:
    """One step, in sub-tiles of `compute` queries and keys; `compute_in` of their keys go through the exponential at a time.

    transposed: tiles are held as [keys, queries]. pipeline_depth: how many sub-tiles the products with the keys run ahead of the
    exponentials. sum_by_product: the product with the values also sums the weights of a row, by additional ones.
    tokens_first: see forward_outputs.
    """
    tile, numbers = Tile(grid, logits, refs, transposed=transposed), RowNumbers(transposed)
    peak, total, weighted = refs["peak"], refs["total"], refs["sum"]
    heads = grid.heads.in_tile
    q_time, k_time, v_time = (1 if layout == "seq_minor" else 0 for layout in layouts)
    of_keys = 0 if transposed else 1  # the axis along which a tile has its keys
    value_dim = weighted.shape[1 if transposed else 2]

    @pl.when(tile.has_flag(FIRST))
    def _start() -> None:
        weighted[...] = jnp.zeros_like(weighted)
        if "sinks" not in refs:
            peak[...] = jnp.full_like(peak, _NOTHING)
            total[...] = jnp.zeros_like(total)
            return
        for number, head in enumerate(heads):  # a sink is a key without a value
            sink = jnp.maximum(refs["sinks"][tile.head(head)] * logits.exp_factor, _NOTHING)
            peak[number] = jnp.full(peak.shape[1:], sink, jnp.float32)
            total[number] = jnp.full(total.shape[1:], jnp.where(sink > _NOTHING, 1.0, 0.0), jnp.float32)

    def run_variant(number: int) -> None:
        variant = tile.enter(number)
        tile.zero_hidden(variant, {"value": v_time})
        dropout = tile.dropout_keys()
        values: dict[Any, jax.Array] = {}
        peaks: dict[Any, jax.Array] = {}

        def multiply(subtile: SubTile) -> tuple[jax.Array, jax.Array, jax.Array]:
            """(logits, the rows' peaks before them and with them)."""
            query = rows_of(refs["query"], (subtile.number,), subtile.queries, q_time)
            key = rows_of(refs["key"], subtile.head[:1], subtile.keys, k_time).astype(query.dtype)
            factors = (key, query, 1 - k_time, 1 - q_time) if transposed else (query, key, 1 - q_time, 1 - k_time)
            x, _ = weigh(tile, tile_product(*factors), subtile)
            at = subtile.number, subtile.queries.start
            # For a sub-tile in flight, whose sums aren't computed yet.
            old_peak = peaks[at] if at in peaks else peak[(subtile.number, *numbers.at(subtile.queries))]
            new_peak = peaks[at] = jnp.maximum(old_peak, x.max(axis=of_keys, keepdims=True))
            return x, old_peak, new_peak

        def accumulate(subtile: SubTile, products: tuple[jax.Array, jax.Array, jax.Array]) -> None:
            x, old_peak, new_peak = products
            shrink = logits.exp(old_peak - new_peak)
            step = row_sum = None
            for part in subtile.parts(compute_in):
                first = part.keys.start - subtile.keys.start
                of_part = lax.slice_in_dim(x, first, first + compute_in, axis=of_keys)
                p = logits.exp(of_part - numbers.beside(new_peak, compute_in))
                if not sum_by_product:
                    of_part = p.sum(axis=of_keys, keepdims=True)
                    row_sum = of_part if row_sum is None else row_sum + of_part
                p = tile.dropped(p, tile.keep(dropout[subtile.number], part))
                value = value_of(part)
                p = p.astype(value.dtype)
                product = tile_product(value, p, 1, 0) if transposed else tile_product(p, value, 1, v_time)
                step = product if step is None else step + product
            assert step is not None
            at = (subtile.number, *numbers.at(subtile.queries))
            sums = (subtile.number, slice(None), subtile.queries) if transposed else (subtile.number, subtile.queries)
            if row_sum is None:
                row_sum = step[value_dim : value_dim + 8] if transposed else step[:, value_dim:]
                step = step[:value_dim] if transposed else step[:, :value_dim]
            peak[at] = new_peak
            total[at] = total[at] * shrink + row_sum
            weighted[sums] = weighted[sums] * numbers.beside(shrink, value_dim) + step

        def value_of(subtile: SubTile) -> jax.Array:
            """Values in the product's form: unchanged, or transposed [value dim, keys]; computed once per visit."""
            at = subtile.head[0], subtile.keys.start
            if at not in values:
                values[at] = _prepared(tile, subtile, v_time, transposed, sum_by_product)
            return values[at]

        pipelined(subtiles_of(grid, *compute, variant), pipeline_depth, multiply, accumulate)

    for number in range(1, len(grid.schedule.variants) + 1):
        pl.when(tile.variant == number)(functools.partial(run_variant, number))

    @pl.when(tile.has_flag(LAST))
    def _end() -> None:
        for number in range(len(heads)):
            row_total = total[number]
            empty = row_total == 0
            safe = jnp.where(empty, 1.0, row_total)
            out = weighted[number]
            if normalised:
                out = out / numbers.beside(safe, value_dim)
            else:
                refs["divisor"][number] = numbers.lane(safe)
            at = (slice(None), slice(number * value_dim, (number + 1) * value_dim)) if tokens_first else number
            refs["output"][at] = (out.T if transposed else out).astype(refs["output"].dtype)
            log = jnp.log2(safe) if logits.base2 else jnp.log(safe)
            lse = jnp.where(empty, -jnp.inf, (peak[number] + log) * (1 / logits.exp_factor))
            refs["lse"][number] = numbers.lane(lse)


def _prepared(tile: Tile, subtile: SubTile, v_time: int, transposed: bool, with_ones: bool) -> jax.Array:
    """A sub-tile's values in the product's form: in the query's dtype, with their scales, transposed, and with ones appended."""
    refs, dtype = tile.refs, tile.refs["query"].dtype
    value = tile.clean("value", subtile, v_time)
    value = value.astype(jnp.float32 if "value_scale" in refs else dtype)
    if transposed and not v_time:
        value, v_time = value.T, 1
    if "value_scale" in refs:
        # Not on the weights: there are more of them, and their sum may come from the same product.
        scale = tile.value_scale(subtile)
        if not v_time:
            scale = columns(scale, value.shape[-1])
        value = (value * scale).astype(dtype)
    if with_ones:
        keys = subtile.shape[1]
        rows = _SUBLANES if transposed else _LANES
        value = jnp.concatenate(
            [value, jnp.ones((rows, keys) if v_time else (keys, rows), value.dtype)], axis=1 - v_time
        )
    return value
