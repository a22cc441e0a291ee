"""The last tokens of each row over slots of states on TPUs: a state is read once, and written where it is kept, in place.

A step of the grid works on some heads of a token: it divides queries and keys by their norms and computes the gates, updates the
states, and reads the outputs off them. The tokens of a row come one after the other, with the states in VMEM. The slots that a
step reads and writes are indices of its blocks, and the array of slots is both operand and result. A token that writes nothing
has the block of one before it, or of the first one after it, so that nothing is moved for it; so does a row that reads nothing.

States whose value_dim doesn't fill the lanes of a register, but whose dim does, are kept with their dims exchanged by the
compiler; so the kernel takes them. What multiplies the rows of a state is turned into columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....compat import varying_as
from ...kernels.varying import vary, varying
from .decays import Kept, kept_of
from .gates import Gates, normalised, step_of, strength_of
from .over_rows import Rows
from .tpu_call import part_of
from .tpu_sizes import STEP, step_heads, turns

__all__ = ["step_tpu"]

_FRESH, _WRITES, _KEEPS, _UNKNOWN, _LIVE, _STARTS = 1, 2, 4, 8, 16, 32  # what a token does
_OWN, _LAST, _FIRST = 0, 1, 2  # which heads' block: its own, or one that stays where it is


class _Tokens(NamedTuple):
    """What a step of the grid is given besides states, None if there is none; arrays, their blocks' specs, or refs. query, key
    [keys, dim]; value [heads, value_dim]; decay, bias [1, heads] or [heads, dim]; rate [1, heads] or [heads, 1]; beta [1,
    heads]."""

    query: Any
    key: Any
    value: Any
    decay: Any
    beta: Any
    rate: Any
    bias: Any


def step_tpu(
    arrays: tuple[jax.Array, ...],
    slots: jax.Array,
    rows: Rows,
    *,
    rate: jax.Array | None,
    bias: jax.Array | None,
    gates: Gates,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(outputs [rows, tokens, heads, value_dim] in float32, anything for tokens that a row doesn't have; the slots after it).

    arrays, of the last tokens of each row, zeros for those that it doesn't have: query, key [rows, tokens, key_heads, dim]; value
    [rows, tokens, heads, value_dim]; decay [rows, tokens, heads] or [rows, tokens, heads, dim]; for the delta rule beta [rows,
    tokens, heads]. slots [slots, heads, dim, value_dim]. rows: of at most so many tokens, with as many columns of slots to write.
    rate, bias, gates: see gates.py."""
    count, size, heads, value_dim = arrays[2].shape
    key_heads, dim = arrays[1].shape[2:]
    group, turned, delta = heads // key_heads, turns(dim, value_dim), len(arrays) == 5
    step = step_heads(heads, group, dim, value_dim, slots.dtype.itemsize, delta, size)
    blocks, keys, shared = heads // step, max(step // group, 1), max(group // step, 1)
    tokens = _blocked(tuple(x.reshape(count * size, *x.shape[2:]) for x in arrays), rate, bias, blocks, keys)
    moves = _moves(rows, slots.shape[0])
    slots = jnp.swapaxes(slots, 2, 3) if turned else slots

    def of_token(x: jax.Array, share: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda r, h, n, *_: (r * size + n, part_of(h, share), 0, 0))

    def of_heads(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda r, h, n, *_: (h, 0, 0))

    def of_slot(of: int) -> pl.BlockSpec:
        def index(r: Any, h: Any, n: Any, *refs: Any) -> tuple[Any, ...]:
            at = r * size + n
            slot, which = refs[2 * of][at], refs[2 * of + 1][at]
            other = jnp.where(which == _LAST, np.int32(blocks - 1), np.int32(0))
            return slot, jnp.where(which == _OWN, h, other), 0, 0

        return pl.BlockSpec((1, step, *slots.shape[2:]), index)

    specs = [
        of_token(tokens.query, shared),
        of_token(tokens.key, shared),
        of_token(tokens.value),
        of_token(tokens.decay),
    ]
    specs += [] if tokens.beta is None else [of_token(tokens.beta)]
    specs += [of_heads(x) for x in tokens[5:] if x is not None]
    given = [x for x in tokens if x is not None]
    operands = [*moves, *given, slots]
    axes = varying(operands)
    operands = [vary(x, axes) for x in operands]
    numbers = count * heads * dim * value_dim
    states = (pltpu.VMEM((step, *slots.shape[2:]), jnp.float32),) if size > 1 else ()
    outputs, after = pl.pallas_call(
        functools.partial(
            _kernel,
            has=tuple(x is not None for x in tokens),
            tokens=size,
            heads=step,
            gates=gates,
            scale=scale,
            turned=turned,
        ),
        out_shape=[
            varying_as(operands[-1], (count * size, blocks, step, value_dim), jnp.float32),
            varying_as(operands[-1], slots.shape, slots.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(moves),
            grid=(count, blocks, size),
            in_specs=[*specs, of_slot(0)],
            out_specs=[
                pl.BlockSpec((1, 1, step, value_dim), lambda r, h, n, *_: (r * size + n, h, 0, 0)),
                of_slot(1),
            ],
            scratch_shapes=states,
        ),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.ARBITRARY,) * 3),
        cost_estimate=pl.CostEstimate(
            flops=(8 if delta else 6) * size * numbers,
            transcendentals=2 * math.prod(tokens.decay.shape),
            bytes_accessed=(1 + size) * numbers * slots.dtype.itemsize + sum(x.size * x.dtype.itemsize for x in given),
        ),
        interpret=interpret,
        name=STEP,
    )(*operands)
    return outputs.reshape(count, size, heads, value_dim), jnp.swapaxes(after, 2, 3) if turned else after


def _blocked(
    arrays: tuple[jax.Array, ...], rate: jax.Array | None, bias: jax.Array | None, blocks: int, keys: int
) -> _Tokens:
    """The arrays by blocks of heads, whose last two dims are whole."""
    query, key, value, decay, *beta = (x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32) for x in arrays)
    rate, bias = (None if x is None else x.astype(jnp.float32) for x in (rate, bias))
    count, by_channel = len(value), decay.ndim == 3

    def by_head(x: jax.Array, outer: tuple[int, ...]) -> jax.Array:
        return x.reshape(*outer, blocks, 1, -1)

    return _Tokens(
        query.reshape(count, -1, keys, query.shape[2]),
        key.reshape(count, -1, keys, key.shape[2]),
        value.reshape(count, blocks, -1, value.shape[2]),
        decay.reshape(count, blocks, -1, decay.shape[2]) if by_channel else by_head(decay, (count,)),
        by_head(beta[0], (count,)) if beta else None,
        None if rate is None else rate.reshape(blocks, -1, 1) if by_channel else by_head(rate, ()),
        None if bias is None else bias.reshape(blocks, -1, bias.shape[1]) if by_channel else by_head(bias, ()),
    )


class _Moves(NamedTuple):
    """int32 [rows * tokens] each: the slot that a token's row reads and which of its blocks, the same of what the token writes,
    and what it does."""

    read: jax.Array
    read_block: jax.Array
    write: jax.Array
    write_block: jax.Array
    does: jax.Array


def _moves(rows: Rows, slots: int) -> _Moves:
    write = rows.write[:, ::-1]  # column j is of the state without the last j tokens
    size = write.shape[1]
    live, known = rows.lengths > 0, (rows.read >= 0) & (rows.read < slots)
    place = jnp.arange(size, dtype=jnp.int32)[None] + (rows.lengths - np.int32(size))[:, None]
    reads, writes = live & ~rows.fresh & known, (place >= 0) & (write >= 0) & (write < slots)
    first = jnp.arange(len(write)) == 0
    # If no row writes, the first writes what it reads.
    keeps = first & ~jnp.any(writes)
    forced = first & (keeps | ~jnp.any(reads))
    read, read_block = _filled(jnp.where(reads, rows.read, 0)[:, None], (reads | forced)[:, None])
    keeping = keeps[:, None] & (jnp.arange(size) == 0)[None]
    write, write_block = _filled(jnp.where(keeping, read, write), writes | keeping)
    unknown = live & ~rows.fresh & ~known
    of_row = jnp.where(reads, 0, _FRESH) + jnp.where(unknown, _UNKNOWN, 0)
    does = of_row[:, None] + jnp.where(writes, _WRITES, 0) + jnp.where(keeping, _KEEPS, 0)
    does += jnp.where(place >= 0, _LIVE, 0) + jnp.where(place == 0, _STARTS, 0)
    of_tokens = (jnp.broadcast_to(x, write.shape) for x in (read, read_block, write, write_block, does))
    return _Moves(*(x.astype(jnp.int32).reshape(-1) for x in of_tokens))


def _filled(slot: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the slot of each token [rows, tokens], its own or that of another; which of its blocks [rows, 1]). In a row all heads of a
    block go through the tokens before the next block does."""
    (count, size), has = own.shape, jnp.any(own, 1)

    def near(own: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """Along the last axis (the last place that is own, -1 for none; the first one from there on, most for none)."""
        places = jnp.arange(own.shape[-1], dtype=jnp.int32)
        axis = own.ndim - 1
        last = lax.cummax(jnp.where(own, places, np.int32(-1)), axis)
        return last, lax.cummin(jnp.where(own, places, np.int32(most)), axis, reverse=True)

    last, following = near(own, size - 1)
    in_row = jnp.take_along_axis(slot, jnp.where(last >= 0, last, following), 1)
    before, after = near(has, count - 1)
    # The last slot of a row before, or the first of one after.
    other = jnp.where(before >= 0, in_row[before, -1], in_row[after, 0])
    block = jnp.where(has, _OWN, jnp.where(before >= 0, _LAST, _FIRST))
    return jnp.where(has[:, None], in_row, other[:, None]), block[:, None]


def _kernel(
    read: Any, read_block: Any, write: Any, write_block: Any, does_ref: Any, *refs: Any, has: tuple[bool, ...], tokens: int,
    heads: int, gates: Gates, scale: float, turned: bool,
) -> None:  # fmt: skip
    del read, read_block, write, write_block
    does = does_ref[pl.program_id(0) * tokens + pl.program_id(2)]
    *given, slots, output, after = refs[:-1] if tokens > 1 else refs
    left = iter(given)
    of_token = _Tokens(*(next(left) if there else None for there in has))
    none = jnp.where(does & _UNKNOWN != 0, np.float32(np.nan), np.float32(0))

    def started(n: int) -> Any:
        """The state of a head before the row's first token."""
        state = slots[0, n].astype(jnp.float32)
        return jnp.where(does & _FRESH != 0, jnp.full(state.shape, none), state)

    def written(n: int, state: Any) -> None:
        @pl.when(does & _WRITES != 0)
        def _() -> None:
            after[0, n] = state.astype(after.dtype)

    work = functools.partial(_token, of_token, output, heads=heads, gates=gates, scale=scale, turned=turned)
    if tokens == 1:
        work(started, written)
    else:
        states = refs[-1]

        @pl.when(does & _STARTS != 0)
        def _() -> None:
            for n in range(heads):
                states[n] = started(n)

        def passed(n: int, state: Any) -> None:
            states[n] = state
            written(n, state)

        pl.when(does & _LIVE != 0)(lambda: work(lambda n: states[n], passed))

    @pl.when(does & _KEEPS != 0)
    def _() -> None:
        after[...] = slots[...]


def _token(
    refs: _Tokens, output: Any, before: Callable[[int], Any], passed: Callable[[int, Any], None], *, heads: int, gates: Gates,
    scale: float, turned: bool,
) -> None:  # fmt: skip
    """One token. before: the state of a head before it; passed: takes that after it."""
    tokens = _Tokens(*(None if x is None else x[...] for x in refs))
    query, key = (x[0, 0] for x in tokens[:2])
    if gates.normalise_eps is None:
        query, key = (x.astype(jnp.float32) for x in (query, key))
    else:
        query, key = (normalised(x, gates.normalise_eps) for x in (query, key))
    step = step_of(gates, tokens.decay[0, 0], None if tokens.bias is None else tokens.bias[0])
    kept = kept_of(step if tokens.rate is None else tokens.rate[0] * step)
    value = tokens.value[0, 0].astype(jnp.float32)
    strength = None if tokens.beta is None else strength_of(gates, tokens.beta[0, 0])
    shared, by_channel = heads // len(key), tokens.decay.shape[2:] == (heads, key.shape[1])
    if turned:
        value = value.T
    else:
        query, key, kept = query.T, key.T, Kept(*(x.T for x in kept)) if by_channel else kept

    def line(x: Any, n: int) -> Any:
        return x[n : n + 1, :]

    def column(x: Any, n: int) -> Any:
        return x[:, n : n + 1]

    of_keys, of_values = (line, column) if turned else (column, line)
    over = 1 if turned else 0  # the axis of keys
    outputs = []
    for n in range(heads):
        one_key, one_query, one_value = of_keys(key, n // shared), of_keys(query, n // shared), of_values(value, n)
        state = before(n)
        own = Kept(*((of_keys if by_channel else column)(x, n) for x in kept))
        update = column(step, n) * one_value if gates.steps else one_value
        if strength is not None:
            read = jnp.sum(one_key * (own.whole * state), over, keepdims=True)
            update = column(strength, n) * (update - read)
        new = own.of(state, one_key * update)
        outputs.append(np.float32(scale) * jnp.sum(one_query * new, over, keepdims=True))
        passed(n, new)
    found = jnp.concatenate(outputs, 1 if turned else 0)
    output[0, 0] = found.T if turned else found
