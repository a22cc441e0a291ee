"""The gradient of linear attention on TPUs: a kernel that goes through the chunks in reverse.

The gradient of the state is carried from chunk to chunk in VMEM. With the names of kernel/linear.py, rows for queries and keys
one below the other, d(X) the gradient of X, and R the gradients of what rows read from the state:

    d(U) = scale A^T d(O) + (K e^(G_end - G)) d(S'),   Y = ((I + P beta)^-1)^T beta d(U),   d(V) = Y,   R = [scale d(O), -Y]
    d(A, P) = R U^T,   d(rows e^G) = R S^T,   d(K e^(G_end - G)) = U d(S')^T,   d(S) = e^(G_end) d(S') + (rows e^G)^T R

The products' own gradients are those of tpu_products.py.
"""

from __future__ import annotations

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
from .tpu_call import Arrays, How, Kept, operands_of, part_of
from .tpu_products import (
    as_column,
    as_row,
    by_channel,
    by_channel_gradients,
    by_head,
    by_head_gradients,
    dot,
    square_of,
    wide_dot,
)
from .tpu_sizes import BACKWARD, Schedule, schedule

__all__ = ["backward"]


def backward(how: How, arrays: Arrays, kept: Kept, d_outputs: jax.Array, d_state: jax.Array) -> Arrays:
    """The gradients of all arrays of a call."""
    sizes = how.sizes
    batch, key_heads, tokens, dim = arrays.query.shape
    heads, value_dim, size = sizes.heads, sizes.value_dim, sizes.chunk
    chunks, plan = tokens // size, schedule(sizes, BACKWARD)
    step, parts, copies = plan
    keys, steps = plan.keys(sizes.group), heads // (step * parts)

    # The grid: batch, steps, chunks from the last, parts of a step.
    def head(h: Any, p: Any) -> Any:
        return h * parts + p

    def tokens_of(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, step, size, width), lambda b, h, c, p: (b, head(h, p), chunks - 1 - c, 0))

    def of_chunk(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, step, 1, *shape), lambda b, h, c, p: (b, head(h, p), chunks - 1 - c, 0, 0))

    def of_heads(at: int, elsewhere: int) -> pl.BlockSpec:
        """Fetched or written at one chunk only."""

        def index(b: Any, h: Any, c: Any, p: Any) -> tuple[Any, ...]:
            part = p if parts == 1 else lax.select(c == at, p, jnp.int32(elsewhere))
            return b, head(h, part), 0, 0

        return pl.BlockSpec((1, step, dim, value_dim), index)

    key_block = pl.BlockSpec((1, keys, size, dim), lambda b, h, c, p: (b, part_of(h, copies), chunks - 1 - c, 0))
    sum_block = pl.BlockSpec((1, keys, size, dim), lambda b, h, c, p: (b, h, chunks - 1 - c, 0))
    gates = 0 if arrays.gates is None else arrays.gates.shape[3]
    shared = tokens_of(dim), of_chunk(gates, size)
    # The delta rule's values are in what is kept.
    given = arrays._replace(value=None if sizes.delta else arrays.value, initial=None)
    inputs = operands_of(given, Arrays(key_block, key_block, tokens_of(value_dim), *shared, None))
    inputs |= operands_of(kept, Kept(of_chunk(dim, value_dim), of_chunk(size, size), tokens_of(value_dim)))
    inputs["d_outputs"] = d_outputs, tokens_of(value_dim)
    inputs["d_state"] = d_state, of_heads(0, parts - 1)
    sums = (batch, key_heads * copies, tokens, dim), arrays.query.dtype if copies == 1 else jnp.float32, sum_block
    results: dict[str, Any] = {"query": sums, "key": sums}
    results["value"] = (batch, heads, tokens, value_dim), arrays.value.dtype, tokens_of(value_dim)
    if arrays.decay is not None:
        results["decay"] = arrays.decay.shape, jnp.float32, shared[0]
    if arrays.gates is not None:
        results["gates"] = arrays.gates.shape, jnp.float32, shared[1]
    results["initial"] = d_state.shape, jnp.float32, of_heads(chunks - 1, 0)
    scratch = [pltpu.VMEM((parts * step, dim, value_dim), jnp.float32)]
    if parts > 1:
        scratch += [pltpu.VMEM((size, dim), jnp.float32)] * 2

    def kernel(*refs: Any) -> None:
        given, made = refs[: len(inputs)], refs[len(inputs) : len(inputs) + len(results)]
        carried, *added = refs[len(inputs) + len(results) :]
        _kernel(dict(zip(inputs, given, strict=True)), dict(zip(results, made, strict=True)), carried, added, how, plan)

    operands = [x for x, _ in inputs.values()]
    axes = varying(operands)
    operands = [vary(x, axes) for x in operands]
    products = size * (5 * dim + 3 * value_dim) + 5 * dim * value_dim
    products += size * (2 * dim + size + value_dim) + 2 * dim * value_dim if sizes.delta else 0
    written = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype, _ in results.values())
    found = pl.pallas_call(
        kernel,
        out_shape=[varying_as(operands[0], shape, dtype) for shape, dtype, _ in results.values()],
        grid=(batch, steps, chunks, parts),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for *_, spec in results.values()],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * heads * tokens * products,
            transcendentals=batch * heads * tokens * size,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in operands) + written,
        ),
        interpret=how.interpret,
        name=BACKWARD,
    )(*operands)
    made = dict(zip(results, found, strict=True))
    if copies > 1:
        for name in ("query", "key"):
            whole = jnp.sum(made[name].reshape(batch, key_heads, copies, tokens, dim), 2)
            made[name] = whole.astype(arrays.query.dtype)
    made["initial"] = None if arrays.initial is None else made["initial"]
    return Arrays(*(made.get(name) for name in Arrays._fields))


def _kernel(
    given: dict[str, Any], made: dict[str, Any], carried: Any, added: list[Any], how: How, plan: Schedule
) -> None:
    sizes, (step, parts, _) = how.sizes, plan
    chunk, part = pl.program_id(2), pl.program_id(3)
    first = part * step

    @pl.when(chunk == 0)
    def start() -> None:
        carried[pl.ds(first, step)] = given["d_state"][0]

    for ref in added:

        @pl.when(part == 0)
        def clear(ref: Any = ref) -> None:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    sums: list[jax.Array] = []
    for head in range(step):
        at = head // sizes.group if step >= sizes.group else 0
        gates = (
            [given["gates"][0, head, 0, n : n + 1] for n in range(given["gates"].shape[3])] if "gates" in given else []
        )
        chunk_of = _Chunk(
            given["query"][0, at],
            given["key"][0, at],
            given["decay"][0, head] if sizes.by_channel else gates[0],
            gates[-1] if sizes.delta else None,
            given["unseen" if sizes.delta else "value"][0, head],
            given["inverse"][0, head, 0] if sizes.delta else None,
            given["states"][0, head, 0],
        )
        found = _gradients(chunk_of, given["d_outputs"][0, head], carried[first + head], how.scale)
        carried[first + head] = found.state
        made["value"][0, head] = found.value.astype(made["value"].dtype)
        if sizes.by_channel:
            made["decay"][0, head] = found.decay
        rows = [] if sizes.by_channel else [found.decay]
        rows += [] if found.beta is None else [found.beta]
        for n, row in enumerate(rows):
            made["gates"][0, head, 0, n : n + 1] = row
        sums = [found.query, found.key] if not sums else [sums[0] + found.query, sums[1] + found.key]
        if head == step - 1 or (step >= sizes.group and (head + 1) % sizes.group == 0):
            _add(made, added, at, sums)
            sums = []
    for name, ref in zip(("query", "key"), added, strict=False):

        @pl.when(part == parts - 1)
        def finish(name: str = name, ref: Any = ref) -> None:
            made[name][0, 0] = ref[...].astype(made[name].dtype)

    @pl.when(chunk == pl.num_programs(2) - 1)
    def end() -> None:
        made["initial"][0] = carried[pl.ds(first, step)]


def _add(made: dict[str, Any], added: list[Any], at: int, sums: list[jax.Array]) -> None:
    """Write the gradients of a key head's query and key, or add a part of them."""
    if added:
        for ref, x in zip(added, sums, strict=True):
            ref[...] = ref[...] + x
    else:
        for name, x in zip(("query", "key"), sums, strict=True):
            made[name][0, at] = x.astype(made[name].dtype)


class _Chunk(NamedTuple):
    """A head's chunk. decay: a row [1, tokens], or [tokens, dim]; beta: a row, for the delta rule; unseen: the updates, for the
    delta rule before they are multiplied with beta; state: before the chunk."""

    query: jax.Array
    key: jax.Array
    decay: jax.Array
    beta: jax.Array | None
    unseen: jax.Array
    inverse: jax.Array | None
    state: jax.Array


class _Gradients(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    beta: jax.Array | None
    state: jax.Array


def _gradients(chunk: _Chunk, d_outputs: jax.Array, d_after: jax.Array, scale: float) -> _Gradients:
    """d_after: of the state after the chunk."""
    key, size, dtype, delta = chunk.key, chunk.key.shape[0], chunk.query.dtype, chunk.beta is not None
    square, channels = square_of(size), chunk.decay.shape[0] > 1
    lower = square.column <= square.row
    rows = jnp.concatenate([chunk.query, key], 0) if delta else chunk.query
    made = (by_channel if channels else by_head)(rows, key, chunk.decay, square)
    keys, scaled = key.astype(jnp.float32), np.float32(scale) * d_outputs.astype(jnp.float32)
    ended, update = keys * made.ended, chunk.unseen.astype(jnp.float32)
    seen = jnp.where(lower, made.products[:size], 0.0)
    d_update = dot(seen, scaled, 0, 0, dtype) + dot(ended, d_after, 1, 0, dtype)
    d_read, d_value, d_beta, started = scaled, d_update, None, made.started
    if delta:
        assert chunk.inverse is not None
        assert chunk.beta is not None
        strength = as_column(chunk.beta)
        update = strength * chunk.unseen
        d_value = wide_dot(chunk.inverse, strength * d_update, dtype, a_axis=0)
        d_read = jnp.concatenate([scaled, -d_value], 0)
        lower = jnp.concatenate([lower, square.column < square.row], 0)
        started = jnp.concatenate([started] * 2, 0)
    # Of products times the updates' beta, which are its columns'.
    d_products = jnp.where(lower, dot(d_read, chunk.unseen, 1, 1, dtype), 0.0)
    if delta:
        of_updates = as_row(jnp.sum(d_update * chunk.unseen, 1, keepdims=True))
        d_beta = of_updates + jnp.sum(d_products[size:] * made.products[size:], 0, keepdims=True)
        assert chunk.beta is not None
        d_products = d_products * chunk.beta
    begun, d_begun = rows.astype(jnp.float32) * started, dot(d_read, chunk.state, 1, 1, dtype)
    d_ended = dot(update, d_after, 1, 1, dtype)
    d_state = made.kept.whole * d_after + dot(begun, d_read, 0, 0, dtype)
    # Of the logarithms of decays.
    d_log_started, d_log_ended = begun * d_begun, ended * d_ended
    d_log_started = d_log_started[:size] + d_log_started[size:] if delta else d_log_started
    d_kept = made.kept.whole * jnp.sum(d_after * chunk.state, 1, keepdims=True)
    if channels:
        of_logs = d_log_started, d_log_ended, as_row(d_kept)
        d_rows, d_columns, d_decay = by_channel_gradients(rows, key, chunk.decay, square, d_products, *of_logs)
    else:
        d_log_started, d_log_ended = (jnp.sum(x, 1, keepdims=True) for x in (d_log_started, d_log_ended))
        of_logs = d_log_started, d_log_ended, jnp.sum(d_kept, 0, keepdims=True)
        d_rows, d_columns, d_decay = by_head_gradients(rows, key, made, square, d_products, *of_logs)
    d_rows = d_rows + d_begun * started
    d_key = d_columns + d_ended * made.ended
    d_key = d_key + d_rows[size:] if delta else d_key
    return _Gradients(d_rows[:size], d_key, d_value, d_decay, d_beta, d_state)
