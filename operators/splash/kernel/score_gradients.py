"""The gradients of a score's arrays, in a pass of their own: a compiled program has it only if one of them is used.

A step adds what it knows of a row, of all keys or of all diagonals to sums that stay in VMEM: nothing is as large as [q, kv].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....scores.steps import Diagonal, Product, Steps
from ...kernels.local_mask import LocalMask
from ...kernels.precision import tile_product
from ...kernels.primitives import put, shifted
from ...kernels.scores import Share, without_padded_rows
from .grid import KernelGrid, Output
from .schedule import FIRST, LAST
from .score_tile import SIDE, SUBLANES, SubTileScores, capture_name, diagonal_room, first_diagonal
from .splash_blocks import PassBlocks
from .subtiles import SubTile, pipelined, rows_of, subtiles_of
from .tile import Logits, Tile, transpose
from .weigh import weigh

__all__ = ["add_capture_gradients", "capture_gradients", "capture_kernel", "sums_fit"]

_MOST_SUMS = 1 << 23  # bytes of the sums of one array for all keys or diagonals, of which VMEM holds two


def sums_fit(steps: Steps, captures: tuple[jax.Array, ...], length: int) -> bool:
    """Whether this pass can sum them. length: queries and keys together.

    A table's entries would have to be compared with every index, on the vector unit; and what has rows and keys is no sum.
    """
    forms = zip(captures, steps.forms, strict=True)
    if any(form == "table" or (form == "aligned" and 1 not in x.shape[2:]) for x, form in forms):
        return False
    return SUBLANES * 4 * length <= _MOST_SUMS


def capture_blocks(q_len: int, kv_len: int, wide: bool) -> PassBlocks:
    """The sizes of this pass: the larger a tile, the fewer diagonals of squares for each square. wide: rows over 256 bytes."""
    block_q, block_kv = (min(512 if wide else 1024, -(-n // SIDE) * SIDE) for n in (q_len, kv_len))
    return PassBlocks(block_q, block_kv, *(512 if n % 512 == 0 else n for n in (block_q, block_kv)))


def _kind(steps: Steps, number: int, shape: tuple[int, ...]) -> str:
    form = steps.forms[number]
    if form != "aligned":
        return form
    return "rows" if shape[3] == 1 else "keys"


def add_capture_gradients(grid: KernelGrid, steps: Steps, mask: LocalMask) -> None:
    """Add the outputs [batch, heads, ..]: [1, q] of rows, [8, n] of keys and of diagonals, [q, n] of columns."""
    q_padded, diagonals = diagonal_room(grid, mask)
    heads = grid.batch, grid.heads.q_heads
    for number, shape in enumerate(grid.capture_shapes):
        name, kind = _gradient_name(number), _kind(steps, number, shape)
        if kind == "rows":
            grid.outputs[name] = Output((*heads, 1, q_padded), jnp.float32, grid.row_block())
            grid.scratch[_sum_name(number)] = pltpu.VMEM((grid.block_q, SIDE), jnp.float32)
        elif kind == "columns":
            whole = (*heads, q_padded, shape[3])
            grid.outputs[name] = Output(whole, jnp.float32, grid.query_block(shape[3], "head_dim_minor"))
        else:
            whole = (*heads, SUBLANES, diagonals if kind == "diagonal" else diagonals - q_padded)
            grid.outputs[name] = Output(whole, jnp.float32, grid.head_block(whole))


def _gradient_name(number: int) -> str:
    return f"d_{capture_name(number)}"


def _sum_name(number: int) -> str:
    return f"{capture_name(number)}_sum"


def capture_kernel(
    refs: dict[str, Any], *, grid: KernelGrid, logits: Logits, compute: tuple[int, int], layouts: tuple[str, str, str]
) -> None:
    """One step of the pass, for one head, in sub-tiles of `compute` queries and keys. Tiles are [queries, keys]."""
    tile = Tile(grid, logits, refs, transposed=False)
    q_time, k_time, v_time = (1 if layout == "seq_minor" else 0 for layout in layouts)
    steps = logits.static_args.score
    assert steps is not None
    kinds = [_kind(steps, number, shape) for number, shape in enumerate(grid.capture_shapes)]

    def clear(of: tuple[str, ...]) -> None:
        for number, kind in enumerate(kinds):
            if kind in of:
                ref = refs[_sum_name(number) if kind == "rows" else _gradient_name(number)]
                ref[...] = jnp.zeros_like(ref)

    pl.when(pl.program_id(3) == 0)(functools.partial(clear, ("keys", "diagonal")))
    pl.when(tile.has_flag(FIRST))(functools.partial(clear, ("rows", "columns")))

    def run_variant(number: int) -> None:
        variant = tile.enter(number)
        tile.zero_hidden(variant, {"key": k_time, "value": v_time})
        dropout = tile.dropout_keys()

        def multiply(subtile: SubTile) -> tuple[jax.Array, Any, jax.Array]:
            """(logits, their pull, gradients of the weights)."""
            query = rows_of(refs["query"], (subtile.number,), subtile.queries, q_time)
            key, value = tile.clean("key", subtile, k_time), tile.clean("value", subtile, v_time)
            d_out = rows_of(refs["d_output"], (subtile.number,), subtile.queries, 0)
            x, pull = weigh(tile, tile_product(query, key, 1 - q_time, 1 - k_time), subtile)
            return x, pull, tile_product(d_out, value, 1, 1 - v_time)

        def accumulate(subtile: SubTile, products: tuple[jax.Array, Any, jax.Array]) -> None:
            x, pull, d_p = products
            lse, delta = (transpose(refs[name][subtile.number, :, subtile.queries]) for name in ("lse", "delta"))
            d_p = tile.dropped(d_p, tile.keep(dropout[subtile.number], subtile))
            p = logits.exp(without_padded_rows(steps, x, lse) - lse)
            for share in pull(p * (d_p - delta))[1]:
                _add(tile, subtile, kinds, share)

        pipelined(subtiles_of(grid, *compute, variant), 1, multiply, accumulate)

    for number in range(1, len(grid.schedule.variants) + 1):
        pl.when(tile.variant == number)(functools.partial(run_variant, number))

    @pl.when(tile.has_flag(LAST))
    def _end() -> None:
        for number, kind in enumerate(kinds):
            if kind == "rows":
                refs[_gradient_name(number)][0] = transpose(refs[_sum_name(number)][...].sum(1, keepdims=True))


def _add(tile: Tile, subtile: SubTile, kinds: list[str], share: Share) -> None:
    """Add a share [queries, keys] to its array's sums."""
    step, read, part = share
    number = step.reads[read]
    kind, out = kinds[number], tile.refs[_gradient_name(number)]
    if kind == "rows":
        lanes = [part[:, n : n + SIDE] for n in range(0, part.shape[1], SIDE)]
        tile.refs[_sum_name(number)][subtile.queries] += functools.reduce(jnp.add, lanes)
    elif kind == "keys":
        first = pl.multiple_of(tile.step.kv_block * tile.grid.block_kv + subtile.keys.start, SIDE)
        out[0, :, pl.ds(first, part.shape[1])] += _folded(part)
    elif kind == "columns":
        assert isinstance(step, Product)
        chosen = SubTileScores(tile, subtile).chosen(step, out.shape[2])
        out[0, subtile.queries] += tile_product(part, chosen, 1, 1)
    else:
        assert isinstance(step, Diagonal)
        _add_diagonals(tile, subtile, out, part)


def _add_diagonals(tile: Tile, subtile: SubTile, out: Any, part: jax.Array) -> None:
    """Add each row's elements where their diagonals are, except for a shift by the row's place in its register.

    Squares of one diagonal of squares are added first. Row r of 8 in a register is left 7 - r too far to the left.
    """
    sums: dict[int, jax.Array] = {}
    for query in range(0, part.shape[0], SIDE):
        for key in range(0, part.shape[1], SIDE):
            square, offset = part[query : query + SIDE, key : key + SIDE], key - query
            sums[offset] = sums[offset] + square if offset in sums else square
    base = tile.local_keys_ahead() + (subtile.keys.start - subtile.queries.start + tile.padded_queries - SIDE)
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, SIDE), 1)
    for offset, square in sums.items():
        here = after = jnp.zeros((SUBLANES, SIDE), jnp.float32)
        for row in range(0, SIDE, SUBLANES):
            by = SIDE - SUBLANES - row
            rows = square[row : row + SUBLANES]
            rows = pltpu.roll(rows, by, 1) if by else rows
            here, after = here + jnp.where(lane >= by, rows, 0.0), after + jnp.where(lane < by, rows, 0.0)
        first = pl.multiple_of(base + offset, SIDE)
        out[0, :, pl.ds(first, 2 * SIDE)] += jnp.concatenate([here, after], axis=1)


def _folded(x: jax.Array) -> jax.Array:
    """[8, n]: the sum of every eighth row of [rows, n], which costs no shuffling within registers."""
    return x.reshape(x.shape[0] // SUBLANES, SUBLANES, x.shape[1]).sum(0)


def capture_gradients(
    outputs: dict[str, jax.Array], grid: KernelGrid, steps: Steps, captures: tuple[jax.Array, ...], mask: LocalMask
) -> tuple[jax.Array, ...]:
    """The gradients of the arrays, from the outputs of the pass."""
    rows = {read: step.rows for step in steps.steps if isinstance(step, Diagonal) for read in step.reads}
    q_padded, diagonals = diagonal_room(grid, mask)
    gradients = []
    for number, capture in enumerate(captures):
        x, kind = outputs[_gradient_name(number)], _kind(steps, number, capture.shape)
        if kind == "diagonal":
            room = jnp.zeros((*x.shape[:2], capture.shape[2] + q_padded + diagonals), jnp.float32)
            first = shifted(first_diagonal(mask, rows[number], q_padded), q_padded)
            x = put(room, _shifted_rows(x), (0, 0, first))[..., q_padded : q_padded + capture.shape[2]]
        elif kind == "keys":
            x = x.sum(2)[..., None, : capture.shape[3]]
        elif kind == "rows":
            x = x[:, :, 0, : mask.q_len, None]
        else:
            x = x[:, :, : mask.q_len]
        for axis, size in enumerate(capture.shape):
            x = x.sum(axis, keepdims=True) if size == 1 and x.shape[axis] > 1 else x
        gradients.append(lax.convert_element_type(x, capture.dtype))
    return tuple(gradients)


def _shifted_rows(x: jax.Array) -> jax.Array:
    """[.., n]: the sums over the 8 rows of [.., 8, n], row r shifted by 7 - r."""
    last = SUBLANES - 1
    rows = (jnp.pad(x[:, :, row], [(0, 0)] * 2 + [(last - row, row)]) for row in range(SUBLANES))
    return functools.reduce(jnp.add, rows)[..., : x.shape[3]]
