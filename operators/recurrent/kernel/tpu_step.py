"""The last tokens of each row over slots of states on TPUs: a state is read once, and written where it is kept, in place.

A step of the grid works on some heads of a token: it divides queries and keys by their norms and computes the gates, updates the
states, and reads the outputs off them. Before it works on the first heads, it convolves all heads of the token with those in its
window. The tokens of a row come one after the other, with the states in VMEM. The slots that a step reads and writes are indices
of its blocks, and the array of slots is both operand and result. A token that writes nothing has the block of one before it, or
of the first one after it, so that nothing is moved for it; so does a row that reads nothing.

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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....compat import varying_as
from ...kernels.varying import vary, varying
from .decays import Kept, kept_of
from .gates import ROLES, Gates, Ungated, normalised, step_of, strength_of
from .over_rows import Rows
from .rows_on_kernels import Slots
from .tpu_call import part_of
from .tpu_sizes import STEP, StepSizes, Window, step_heads, turns
from .tpu_step_conv import Convolved, of_block, scratch_of
from .tpu_step_conv import started as start_windows
from .tpu_step_moves import FRESH, KEEPS, LAST, LIVE, OWN, STARTS, UNKNOWN, WRITES, moves_of

__all__ = ["step_tpu"]


class _Tokens(NamedTuple):
    """What a step of the grid is given besides slots, None if there is none; arrays, their blocks' specs, refs, or values. query,
    key [keys, dim]; value [heads, value_dim], of which those that are convolved have all heads of a token; decay, bias [1, heads]
    or [heads, dim]; rate [1, heads] or [heads, 1]; beta, skip [1, heads]."""

    query: Any
    key: Any
    value: Any
    decay: Any
    beta: Any
    rate: Any
    bias: Any
    skip: Any


_KEYS = ROLES[:2]  # which have heads of keys
_OF_HEADS = ("rate", "bias", "skip")  # the same for every token


class _Static(NamedTuple):
    """What is static of a step. tree: the structure of what it is given. tokens: of a row; blocks: of heads, each of so many;
    shared: how many of them have the same key heads."""

    tree: Any
    tokens: int
    blocks: int
    heads: int
    shared: int
    gates: Gates
    scale: float
    activation: str | None
    turned: bool


def step_tpu(
    arrays: tuple[jax.Array, ...],
    slots: Slots,
    rows: Rows,
    *,
    given: Ungated,
    gates: Gates,
    activation: str | None = None,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, Slots]:
    """(outputs [rows, tokens, heads, value_dim] in float32, anything for tokens that a row doesn't have; the slots after it).

    arrays, of the last tokens of each row, zeros for those that it doesn't have: query, key [rows, tokens, key_heads, dim]; value
    [rows, tokens, heads, value_dim]; decay [rows, tokens, heads] or [rows, tokens, heads, dim]; for the delta rule beta [rows,
    tokens, heads]. slots: states [slots, heads, dim, value_dim], and windows of convolutions. rows: of at most so many tokens,
    with as many columns of slots to write. given: what it has besides tokens and slots. gates: see gates.py; activation: of the
    convolutions."""
    count, size, heads, value_dim = arrays[2].shape
    key_heads, dim = arrays[1].shape[2:]
    state, *windows = slots
    group, turned, delta = heads // key_heads, turns(dim, value_dim), len(arrays) == 5
    of_windows = tuple(Window.of(x) for x in windows)
    step = step_heads(heads, group, StepSizes(dim, value_dim, state.dtype.itemsize, delta, size, of_windows))
    blocks, keys, shared = heads // step, max(step // group, 1), max(group // step, 1)
    tokens = _blocked(tuple(x.reshape(count * size, *x.shape[2:]) for x in arrays), given, blocks, keys)
    convolutions = jax.tree.map(_floats, tuple(None if x is None else (x.weight, x.bias) for x in given.convolved))
    moves = moves_of(rows, state.shape[0])
    state = jnp.swapaxes(state, 2, 3) if turned else state

    def of_token(x: jax.Array, share: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda r, h, n, *_: (r * size + n, part_of(h, share), 0, 0))

    def of_heads(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda r, h, n, *_: (h, 0, 0))

    def at_first(r: Any, h: Any, n: Any) -> Any:
        """The place of a token in all rows at the first block of heads, then that of its row's last, where nothing moves."""
        alone = blocks == 1 or size == 1
        return r * size + n if alone else r * size + jnp.where(h == 0, n, np.int32(size - 1))

    def of_all_heads(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda r, h, n, *_: (at_first(r, h, n), 0, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    def of_slot(of: int) -> pl.BlockSpec:
        def index(r: Any, h: Any, n: Any, *refs: Any) -> tuple[Any, ...]:
            at = r * size + n
            slot, which = refs[2 * of][at], refs[2 * of + 1][at]
            other = jnp.where(which == LAST, np.int32(blocks - 1), np.int32(0))
            return slot, jnp.where(which == OWN, h, other), 0, 0

        return pl.BlockSpec((1, step, *state.shape[2:]), index)

    def of_window(x: jax.Array, of: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda r, h, n, *refs: (refs[2 * of][at_first(r, h, n)], 0, 0, 0))

    def spec(name: str, x: Any) -> Any:
        if x is None:
            return None
        if name in _OF_HEADS:
            return of_heads(x)
        return of_all_heads(x) if x.ndim == 3 else of_token(x, shared if name in _KEYS else 1)

    specs = _Tokens(*map(spec, _Tokens._fields, tokens)), jax.tree.map(whole, convolutions)
    flat, tree = jax.tree.flatten((tokens, convolutions))
    operands = [*moves, *flat, state, *windows]
    axes = varying(operands)
    operands = [vary(x, axes) for x in operands]
    held = operands[len(moves) + len(flat) :]
    numbers = count * heads * dim * value_dim
    # The states between tokens of a row, then what each convolution has.
    scratch = [pltpu.VMEM((step, *state.shape[2:]), jnp.float32)] if size > 1 else []
    for part, one in zip((keys, keys, step), convolutions, strict=True):
        scratch += [] if one is None else scratch_of(one[0], part, tokens=size, blocks=blocks)
    outputs, after, *windows = pl.pallas_call(
        functools.partial(_kernel, static=_Static(tree, size, blocks, step, shared, gates, scale, activation, turned)),
        out_shape=[
            varying_as(operands[-1], (count * size, blocks, step, value_dim), jnp.float32),
            *(varying_as(operands[-1], x.shape, x.dtype) for x in held),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(moves),
            grid=(count, blocks, size),
            in_specs=[*jax.tree.leaves(specs), of_slot(0), *(of_window(x, 0) for x in windows)],
            out_specs=[
                pl.BlockSpec((1, 1, step, value_dim), lambda r, h, n, *_: (r * size + n, h, 0, 0)),
                of_slot(1),
                *(of_window(x, 1) for x in windows),
            ],
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(moves) + len(flat) + n: 1 + n for n in range(len(held))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.ARBITRARY,) * 3),
        cost_estimate=pl.CostEstimate(
            flops=(8 if delta else 6) * size * numbers,
            transcendentals=2 * math.prod(tokens.decay.shape),
            bytes_accessed=(1 + size) * (numbers * state.dtype.itemsize + count * sum(x.nbytes for x in of_windows))
            + sum(x.size * x.dtype.itemsize for x in flat),
        ),
        interpret=interpret,
        name=STEP,
    )(*operands)
    after = jnp.swapaxes(after, 2, 3) if turned else after
    return outputs.reshape(count, size, heads, value_dim), (after, *windows)


def _floats(x: jax.Array) -> jax.Array:
    """An array in a dtype that the kernel takes."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def _blocked(arrays: tuple[jax.Array, ...], given: Ungated, blocks: int, keys: int) -> _Tokens:
    """The arrays by blocks of heads, whose last two dims are whole; what is convolved with all heads."""
    query, key, value, decay, *beta = map(_floats, arrays)
    count, by_channel = len(value), decay.ndim == 3

    def by_head(x: jax.Array, outer: tuple[int, ...]) -> jax.Array:
        return x.reshape(*outer, blocks, 1, -1)

    def of_role(x: jax.Array, role: int, heads: int) -> jax.Array:
        return x if given.convolved[role] is not None else x.reshape(count, -1, heads, x.shape[2])

    rate, bias, skip = (None if x is None else x.astype(jnp.float32) for x in (given.rate, given.bias, given.skip))
    return _Tokens(
        of_role(query, 0, keys),
        of_role(key, 1, keys),
        of_role(value, 2, value.shape[1] // blocks),
        decay.reshape(count, blocks, -1, decay.shape[2]) if by_channel else by_head(decay, (count,)),
        by_head(beta[0], (count,)) if beta else None,
        None if rate is None else rate.reshape(blocks, -1, 1) if by_channel else by_head(rate, ()),
        None if bias is None else bias.reshape(blocks, -1, bias.shape[1]) if by_channel else by_head(bias, ()),
        None if skip is None else by_head(skip, ()),
    )


def _kernel(
    read: Any, read_block: Any, write: Any, write_block: Any, does_ref: Any, *refs: Any, static: _Static
) -> None:
    del read, read_block, write, write_block
    block, n = pl.program_id(1), pl.program_id(2)
    does, several = does_ref[pl.program_id(0) * static.tokens + n], static.tokens > 1
    given, left = refs[: static.tree.num_leaves], iter(refs[static.tree.num_leaves :])
    of_token, convolutions = jax.tree.unflatten(static.tree, given)
    count = sum(one is not None for one in convolutions)
    slots, *windows = (next(left) for _ in range(1 + count))
    output, after, *windows_after = (next(left) for _ in range(2 + count))
    states: Any = next(left) if several else None
    both = zip(windows, windows_after, strict=True)
    convolved = {
        role: Convolved.of(one, getattr(of_token, role), *next(both), left, tokens=static.tokens, blocks=static.blocks)
        for role, one in zip(ROLES, convolutions, strict=True)
        if one is not None
    }
    none = jnp.where(does & UNKNOWN != 0, np.float32(np.nan), np.float32(0))

    def started(n: int) -> Any:
        """The state of a head before the row's first token."""
        state = slots[0, n].astype(jnp.float32)
        return jnp.where(does & FRESH != 0, jnp.full(state.shape, none), state)

    def written(n: int, state: Any) -> None:
        @pl.when(does & WRITES != 0)
        def _() -> None:
            after[0, n] = state.astype(after.dtype)

    def value(name: str, ref: Any) -> Any:
        """What this block of heads has of the token."""
        return None if ref is None else ref[0] if name in _OF_HEADS else ref[0, 0]

    def work(before: Callable[[int], Any], passed: Callable[[int, Any], None]) -> None:
        shares = {role: static.shared if role in _KEYS else 1 for role in ROLES}
        found = of_block(convolved, shares, block, n, does, static.activation)
        given = {name: value(name, x) for name, x in of_token._asdict().items() if name not in found}
        _token(_Tokens(**given, **found), output, before, passed, static)

    if not several:
        work(started, written)
    else:
        start_windows(convolved, block, does)

        @pl.when(does & STARTS != 0)
        def _() -> None:
            for n in range(static.heads):
                states[n] = started(n)

        def passed(n: int, state: Any) -> None:
            states[n] = state
            written(n, state)

        pl.when(does & LIVE != 0)(lambda: work(lambda n: states[n], passed))

    @pl.when(does & KEEPS != 0)
    def _() -> None:
        after[...] = slots[...]
        for one in convolved.values():
            one.after[...] = one.window[...]


def _token(
    tokens: _Tokens, output: Any, before: Callable[[int], Any], passed: Callable[[int, Any], None], static: _Static
) -> None:
    """One token, as values. before: the state of a head before it; passed: takes that after it."""
    gates, heads, turned = static.gates, static.heads, static.turned
    query, key = tokens[:2]
    if gates.normalise_eps is None:
        query, key = (x.astype(jnp.float32) for x in (query, key))
    else:
        query, key = (normalised(x, gates.normalise_eps) for x in (query, key))
    step = step_of(gates, tokens.decay, tokens.bias)
    kept = kept_of(step if tokens.rate is None else tokens.rate * step)
    value = tokens.value.astype(jnp.float32)
    strength = None if tokens.beta is None else strength_of(gates, tokens.beta)
    shared, by_channel = heads // len(key), tokens.decay.shape == (heads, key.shape[1])
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
        read = np.float32(static.scale) * jnp.sum(one_query * new, over, keepdims=True)
        outputs.append(read if tokens.skip is None else read + column(tokens.skip, n) * one_value)
        passed(n, new)
    found = jnp.concatenate(outputs, 1 if turned else 0)
    output[0, 0] = found.T if turned else found
