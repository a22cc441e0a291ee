"""One token of each row over slots of states on TPUs: a state is read and written once, in place.

A step of the grid works on some heads of a row. The slots that it reads and writes are indices of its blocks, and the array of
slots is both operand and result. A row that reads or writes nothing has the block of a row before it, or of the first one after
it, so that nothing is moved for it.

States whose value_dim doesn't fill the lanes of a register, but whose dim does, are kept with their dims exchanged by the
compiler; so the kernel takes them. Numbers by row of a state come as columns, those by column as lines.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....compat import varying_as
from ...kernels.varying import vary, varying
from .over_rows import Rows
from .tpu_sizes import STEP, step_heads, turns

__all__ = ["step_tpu"]

_FRESH, _WRITES, _KEEPS, _UNKNOWN = 1, 2, 4, 8  # what a row does
_OWN, _LAST, _FIRST = 0, 1, 2  # which heads' block: its own, or one that stays where it is


def step_tpu(
    arrays: tuple[jax.Array, ...], slots: jax.Array, rows: Rows, *, scale: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(outputs [rows, heads, value_dim] in the query's dtype, the slots after it).

    arrays, of the token of each row, zeros for a row without: query, key [rows, key_heads, dim]; value [rows, heads, value_dim];
    log_decay [rows, heads, dim or 1]; for the delta rule beta [rows, heads]. slots [slots, heads, dim, value_dim]."""
    query, key, value, log_decay, *beta = arrays
    (count, heads, value_dim), dim, turned = value.shape, key.shape[2], turns(key.shape[2], value.shape[2])
    group, step = heads // key.shape[1], step_heads(heads, dim, value_dim, slots.dtype.itemsize, bool(beta))
    blocks = heads // step
    shape = (value_dim, dim) if turned else (dim, value_dim)
    slots = jnp.swapaxes(slots, 2, 3) if turned else slots
    kept = jnp.broadcast_to(jnp.exp(log_decay.astype(jnp.float32)), (count, heads, dim))
    strength = [jnp.broadcast_to(x.astype(jnp.float32)[..., None], value.shape) for x in beta]
    of_keys = [*(jnp.repeat(x.astype(jnp.float32), group, 1) for x in (key, query)), kept]
    of_values = [value.astype(jnp.float32), *strength]
    by_row, by_column = (of_values, of_keys) if turned else (of_keys, of_values)
    columns = jnp.stack(by_row, 1).reshape(count, len(by_row), blocks, step, shape[0]).transpose(0, 2, 1, 4, 3)
    lines = jnp.stack(by_column, 1).reshape(count, len(by_column), blocks, step, shape[1]).swapaxes(1, 2)
    moves = _moves(rows, slots.shape[0])
    operands = [*moves, columns, lines, slots]
    axes = varying(operands)
    operands = [vary(x, axes) for x in operands]

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda r, h, *_: (r, h, *[0] * len(shape)))

    def of_slot(of: int) -> pl.BlockSpec:
        def index(r: Any, h: Any, *refs: Any) -> tuple[Any, ...]:
            slot, which = refs[2 * of][r], refs[2 * of + 1][r]
            other = jnp.where(which == _LAST, np.int32(blocks - 1), np.int32(0))
            return slot, jnp.where(which == _OWN, h, other), 0, 0

        return pl.BlockSpec((1, step, *shape), index)

    out = (value_dim, step) if turned else (step, value_dim)
    numbers = count * heads * dim * value_dim
    outputs, after = pl.pallas_call(
        functools.partial(_kernel, heads=step, scale=scale, delta=bool(beta), turned=turned),
        out_shape=[
            varying_as(operands[-1], (count, blocks, *out), jnp.float32),
            varying_as(operands[-1], slots.shape, slots.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(moves),
            grid=(count, blocks),
            in_specs=[of_row(*columns.shape[2:]), of_row(*lines.shape[2:]), of_slot(0)],
            out_specs=[of_row(*out), of_slot(1)],
        ),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.ARBITRARY, pltpu.ARBITRARY)),
        cost_estimate=pl.CostEstimate(
            flops=(8 if beta else 6) * numbers,
            transcendentals=0,
            bytes_accessed=2 * numbers * slots.dtype.itemsize + 4 * (math.prod(columns.shape) + math.prod(lines.shape)),
        ),
        interpret=interpret,
        name=STEP,
    )(*operands)
    outputs = jnp.swapaxes(outputs, 2, 3) if turned else outputs
    after = jnp.swapaxes(after, 2, 3) if turned else after
    return outputs.reshape(count, heads, value_dim).astype(query.dtype), after


class _Moves(NamedTuple):
    """int32 [rows] each: the slot that a row reads and which of its blocks, the same of what it writes, and what it does."""

    read: jax.Array
    read_block: jax.Array
    write: jax.Array
    write_block: jax.Array
    does: jax.Array


def _moves(rows: Rows, slots: int) -> _Moves:
    write = rows.write[:, 0]
    live, known = rows.lengths > 0, (rows.read >= 0) & (rows.read < slots)
    reads, writes = live & ~rows.fresh & known, live & (write >= 0) & (write < slots)
    first = jnp.arange(len(write)) == 0
    # If no row writes, the first writes what it reads.
    keeps = first & ~jnp.any(writes)
    forced = first & (keeps | ~jnp.any(reads))
    read, read_block = _filled(jnp.where(reads, rows.read, 0), reads | forced)
    write, write_block = _filled(jnp.where(keeps, read, write), writes | keeps)
    unknown = live & ~rows.fresh & ~known
    does = jnp.where(reads, 0, _FRESH) + jnp.where(writes, _WRITES, 0)
    does += jnp.where(keeps, _KEEPS, 0) + jnp.where(unknown, _UNKNOWN, 0)
    return _Moves(read, read_block, write, write_block, does.astype(jnp.int32))


def _filled(slot: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the slot of each row, its own or that of another, and which of its blocks)."""
    count = len(own)
    places = jnp.arange(count, dtype=jnp.int32)
    last = lax.cummax(jnp.where(own, places, np.int32(-1)))
    following = lax.cummin(jnp.where(own, places, np.int32(count - 1)), reverse=True)
    source = jnp.where(last >= 0, last, following)
    block = jnp.where(own, _OWN, jnp.where(last >= 0, _LAST, _FIRST))
    return slot[source].astype(jnp.int32), block.astype(jnp.int32)


def _kernel(
    read: Any, read_block: Any, write: Any, write_block: Any, does_ref: Any, columns: Any, lines: Any, slots: Any,
    output: Any, after: Any, *, heads: int, scale: float, delta: bool, turned: bool,
) -> None:  # fmt: skip
    del read, read_block, write, write_block
    does = does_ref[pl.program_id(0)]
    none = jnp.where(does & _UNKNOWN != 0, np.float32(np.nan), np.float32(0))
    over = 1 if turned else 0  # the axis of keys
    for n in range(heads):
        by_row = [columns[0, 0, at, :, n : n + 1] for at in range(columns.shape[2])]
        by_column = [lines[0, 0, at, n : n + 1, :] for at in range(lines.shape[2])]
        (key, query, kept), (value, *beta) = (by_column, by_row) if turned else (by_row, by_column)
        state = slots[0, n].astype(jnp.float32)
        state = jnp.where(does & _FRESH != 0, jnp.full(state.shape, none), state)
        decayed = kept * state
        update = beta[0] * (value - jnp.sum(key * decayed, over, keepdims=True)) if delta else value
        new = decayed + key * update
        found = np.float32(scale) * jnp.sum(query * new, over, keepdims=True)
        if turned:
            output[0, 0, :, n : n + 1] = found
        else:
            output[0, 0, n : n + 1, :] = found

        @pl.when(does & _WRITES != 0)
        def _(new: jax.Array = new, n: int = n) -> None:
            after[0, n] = new.astype(after.dtype)

    @pl.when(does & _KEEPS != 0)
    def _() -> None:
        after[...] = slots[...]
