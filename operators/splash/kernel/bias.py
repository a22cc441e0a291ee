"""The gradient of the bias, in a pass of its own: a compiled program has it only if the gradient is used."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ...kernels.precision import tile_product
from ...kernels.scores import without_padded_rows
from .grid import KernelGrid
from .schedule import FIRST, LAST, VARIANT, kv_block_of, q_block_of
from .subtiles import SubTile, rows_of, subtiles_of
from .tile import Logits, Tile, transpose
from .weigh import weigh

__all__ = ["bias_block", "bias_kernel", "bias_order", "visited_bias"]

_BLOCK = 512  # queries and keys of a tile of this pass: blocks of the bias and of its gradient are in float32


def bias_order(shape: tuple[int, ...], rows: int, tables: int) -> tuple[str, ...] | None:
    """The grid's dimensions, those last over which a bias [batch, heads, q, kv] is summed; None if this pass can't sum it.

    rows, tables: schedules for batch rows and for parts of the heads. A block of the gradient is summed in consecutive
    steps, so what is summed over has to visit the same tiles. A bias for all queries or keys alike is not for this pass.
    """
    batch, heads, q_len, kv_len = shape
    if q_len == 1 or kv_len == 1 or (batch == 1 and rows > 1) or (heads == 1 and tables > 1):
        return None
    summed = [*(["batch"] if batch == 1 else []), *(["kv_tile", "group_tile"] if heads == 1 else [])]
    return (*(name for name in ("batch", "kv_tile", "group_tile") if name not in summed), "entry", *summed)


def bias_kernel(
    refs: dict[str, Any], *, grid: KernelGrid, logits: Logits, compute: tuple[int, int], layouts: tuple[str, str, str]
) -> None:
    """One step of the pass, in sub-tiles of `compute` queries and keys. Tiles are [queries, keys], as the bias is stored."""
    tile = Tile(grid, logits, refs, transposed=False)
    q_time, k_time, v_time = (1 if layout == "seq_minor" else 0 for layout in layouts)
    gradient = refs["d_bias"]

    # Not where a list that is shorter than the others stays at its last tile.
    @pl.when(grid.begins_sum() & tile.has_flag(FIRST | LAST | VARIANT))
    def _start() -> None:
        gradient[...] = jnp.zeros_like(gradient)

    def run_variant(number: int) -> None:
        variant = tile.enter(number)
        tile.zero_hidden(variant, {"key": k_time, "value": v_time})
        dropout = tile.dropout_keys()

        def add(subtile: SubTile) -> None:
            query = rows_of(refs["query"], (subtile.number,), subtile.queries, q_time)
            key, value = tile.clean("key", subtile, k_time), tile.clean("value", subtile, v_time)
            d_out = rows_of(refs["d_output"], (subtile.number,), subtile.queries, 0)
            lse, delta = (transpose(refs[name][subtile.number, :, subtile.queries]) for name in ("lse", "delta"))
            x, _ = weigh(tile, tile_product(query, key, 1 - q_time, 1 - k_time), subtile)
            d_p = tile_product(d_out, value, 1, 1 - v_time)
            d_p = tile.dropped(d_p, tile.keep(dropout[subtile.number], subtile))
            head = tuple(i if n > 1 else 0 for i, n in zip(subtile.head, gradient.shape[:2], strict=True))
            p = logits.exp(without_padded_rows(logits.static_args.score, x, lse) - lse)
            gradient[(*head, subtile.queries, subtile.keys)] += p * (d_p - delta)

        for subtile in subtiles_of(grid, *compute, variant):
            add(subtile)

    for number in range(1, len(grid.schedule.variants) + 1):
        pl.when(tile.variant == number)(functools.partial(run_variant, number))


def visited_bias(gradient: jax.Array, grid: KernelGrid) -> jax.Array:
    """A gradient [batch, kv heads, group, q, kv] with 0 in the blocks that no step has written. Lists are the host's."""
    schedule = grid.schedule
    words = np.asarray(schedule.words).reshape(schedule.tables, -1)
    blocks = gradient.shape[3] // grid.block_q, gradient.shape[4] // grid.block_kv
    visited = np.zeros((schedule.tables, *blocks), bool)
    visited[np.arange(schedule.tables)[:, None], q_block_of(words), kv_block_of(words)] = True
    if visited.all():
        return gradient
    by_block = gradient.reshape(*gradient.shape[:3], blocks[0], grid.block_q, blocks[1], grid.block_kv)
    if schedule.tables > 1:
        visited = np.repeat(visited, grid.heads.kv_heads // schedule.tables, axis=0)
    return jnp.where(visited[:, None, :, None, :, None], by_block, 0).reshape(gradient.shape)


def bias_block(length: int) -> int:
    """The block of this pass for so many queries or keys."""
    return min(_BLOCK, math.ceil(length / 128) * 128)
