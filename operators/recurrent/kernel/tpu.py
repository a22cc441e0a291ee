"""Linear attention with decay on TPUs: the chunks of kernel/linear.py, with everything of a chunk in VMEM.

A step of the grid works on one chunk of some heads. The state of a head is carried from chunk to chunk in the block of the state
that is returned. A document that starts is a log decay which is exp(0) = 0 in float32, so the kernels know no documents.

With a gradient, the forward pass keeps the state before each chunk and, for the delta rule, the chunk's inverse and of each value
what its key hadn't seen; tpu_backward.py goes through the chunks in reverse. For both, U = beta (I + P beta)^-1 (V - (K e^G) S).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....compat import varying_as
from ...kernels.derivatives import reverse_only
from ...kernels.varying import vary, varying
from .linear import LINEAR, chunked
from .tpu_backward import backward
from .tpu_call import Arrays, How, Kept, operands_of, part_of
from .tpu_products import as_column, by_channel, by_head, dot, square_of, unit_inverse, unit_solve, wide_dot
from .tpu_sizes import FORWARD, KEEPING, Sizes, chunk_tokens, schedule

__all__ = ["chunked_tpu"]

_FORGOTTEN = -200.0  # exp of it is 0 in float32, and so is that of any sum with it


def chunked_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    initial_state: jax.Array | None,
    document: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    gradient_on_xla: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `linear.chunked`, whose shapes it takes and returns. gradient_on_xla: whether the gradient is that of `linear.chunked`,
    instead of a kernel's."""
    arrays = (query, key, value, log_decay, beta, initial_state, document)
    if query.shape[2] == 1:  # one token is products of a vector and a matrix: no chunk
        return chunked(*arrays, scale=scale, chunk_size=chunk_size)
    arrays = reverse_only(arrays, LINEAR, "")
    run = functools.partial(_prepared, scale, chunk_size, interpret)
    if not gradient_on_xla:
        return run(*arrays)
    return _differentiated_on_xla(run, functools.partial(chunked, scale=scale, chunk_size=chunk_size), *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiated_on_xla(run: Any, on_xla: Any, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    result: tuple[jax.Array, jax.Array] = run(*arrays)
    return result


def _keep_arrays(run: Any, on_xla: Any, *arrays: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    return _differentiated_on_xla(run, on_xla, *arrays), arrays


def _backward_on_xla(run: Any, on_xla: Any, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    *floating, document = arrays
    _, pull = jax.vjp(lambda *floating: on_xla(*floating, document), *floating)
    none = None if document is None else np.zeros(document.shape, jax.dtypes.float0)
    return (*pull(cotangents), none)


_differentiated_on_xla.defvjp(_keep_arrays, _backward_on_xla)


def _prepared(
    scale: float,
    chunk_size: int,
    interpret: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    initial_state: jax.Array | None,
    document: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The arrays in whole chunks and in the dtypes of the kernels, whose gradients JAX adds to those of the kernels."""
    batch, key_heads, tokens, dim = query.shape
    heads, value_dim = value.shape[1], value.shape[3]
    size = chunk_tokens(tokens, chunk_size)
    chunks = -(-tokens // size)
    channels, out_dtype = log_decay.shape[3] > 1, query.dtype
    # Mosaic has no float16; in float32 its factors lose nothing.
    narrow = all(x.dtype == jnp.bfloat16 for x in (query, key, value))
    query, key, value = (x if narrow else x.astype(jnp.float32) for x in (query, key, value))
    decay = jnp.maximum(log_decay.astype(jnp.float32), np.float32(_FORGOTTEN))
    if document is not None:
        before = jnp.pad(document, ((0, 0), (1, 0)))[:, :-1]  # the first token's is that of the initial state, 0
        decay = jnp.where((document != before)[:, None, :, None], np.float32(_FORGOTTEN), decay)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 3)])

    rows = [] if channels else [decay[..., 0]]
    rows += [] if beta is None else [beta.astype(jnp.float32)]
    arrays = Arrays(
        padded(query),
        padded(key),
        padded(value),
        padded(decay) if channels else None,
        jnp.stack([padded(x).reshape(batch, heads, chunks, size) for x in rows], 3) if rows else None,
        None if initial_state is None else initial_state.astype(jnp.float32),
    )
    initial, delta = initial_state is not None, beta is not None
    sizes = Sizes(heads, heads // key_heads, dim, value_dim, size, np.dtype(query.dtype), channels, delta, initial)
    outputs, state = _chunks(How(sizes, scale, interpret), arrays)
    return outputs[:, :, :tokens].astype(out_dtype), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(how: How, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    outputs, state, _ = _forward(how, arrays, FORWARD)
    return outputs, state


def _keep(how: How, arrays: Arrays) -> tuple[tuple[jax.Array, jax.Array], tuple[Arrays, Kept]]:
    outputs, state, kept = _forward(how, arrays, KEEPING)
    return (outputs, state), (arrays, kept)


def _backward(how: How, kept: tuple[Arrays, Kept], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Arrays]:
    return (backward(how, *kept, *cotangents),)


_chunks.defvjp(_keep, _backward)


def _forward(how: How, arrays: Arrays, name: str) -> tuple[jax.Array, jax.Array, Kept]:
    sizes = how.sizes
    batch, tokens = arrays.query.shape[0], arrays.query.shape[2]
    heads, dim, value_dim, size = sizes.heads, sizes.dim, sizes.value_dim, sizes.chunk
    chunks, (step, *_) = tokens // size, schedule(sizes, name)
    tokens_of = lambda width: pl.BlockSpec((1, step, size, width), lambda b, h, c: (b, h, c, 0))  # noqa: E731
    of_chunk = lambda *shape: pl.BlockSpec((1, step, 1, *shape), lambda b, h, c: (b, h, c, 0, 0))  # noqa: E731
    of_heads = pl.BlockSpec((1, step, dim, value_dim), lambda b, h, c: (b, h, 0, 0))
    keys = max(step // sizes.group, 1)
    steps = max(sizes.group // step, 1)  # of a key head
    key_block = pl.BlockSpec((1, keys, size, dim), lambda b, h, c: (b, part_of(h, steps), c, 0))
    gates = 0 if arrays.gates is None else arrays.gates.shape[3]
    specs = Arrays(key_block, key_block, tokens_of(value_dim), tokens_of(dim), of_chunk(gates, size), of_heads)
    inputs = operands_of(arrays, specs)
    results: dict[str, Any] = {
        "output": ((batch, heads, tokens, value_dim), arrays.query.dtype, tokens_of(value_dim)),
        "state": ((batch, heads, dim, value_dim), jnp.float32, of_heads),
    }
    if name == KEEPING:
        results["states"] = ((batch, heads, chunks, dim, value_dim), jnp.float32, of_chunk(dim, value_dim))
        if sizes.delta:
            results["inverse"] = ((batch, heads, chunks, size, size), jnp.float32, of_chunk(size, size))
            results["unseen"] = ((batch, heads, tokens, value_dim), jnp.float32, tokens_of(value_dim))

    def kernel(*refs: Any) -> None:
        _kernel(dict(zip((*inputs, *results), refs, strict=True)), how, step)

    operands = [x for x, _ in inputs.values()]
    axes = varying(operands)
    operands = [vary(x, axes) for x in operands]
    products = size * (2 * dim + (2 if sizes.delta else 1) * value_dim) + 3 * dim * value_dim
    written = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype, _ in results.values())
    found = pl.pallas_call(
        kernel,
        out_shape=[varying_as(operands[0], shape, dtype) for shape, dtype, _ in results.values()],
        grid=(batch, heads // step, chunks),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for *_, spec in results.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY)),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * heads * tokens * products,
            transcendentals=batch * heads * tokens * size,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in operands) + written,
        ),
        interpret=how.interpret,
        name=name,
    )(*operands)
    made = dict(zip(results, found, strict=True))
    return made["output"], made["state"], Kept(*(made.get(name) for name in Kept._fields))


def _kernel(refs: dict[str, Any], how: How, step: int) -> None:
    state, sizes = refs["state"], how.sizes

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = refs["initial"][...] if "initial" in refs else jnp.zeros(state.shape, jnp.float32)

    for head in range(step):
        at = head // sizes.group if step >= sizes.group else 0
        gates = [refs["gates"][0, head, 0, n : n + 1] for n in range(refs["gates"].shape[3])] if "gates" in refs else []
        decay = refs["decay"][0, head] if sizes.by_channel else gates[0]
        beta = gates[-1] if sizes.delta else None
        before = state[0, head]
        tokens = refs["query"][0, at], refs["key"][0, at], refs["value"][0, head]
        made = _chunk(*tokens, decay, beta, before, how.scale, keeps="inverse" in refs)
        refs["output"][0, head] = made.outputs.astype(refs["output"].dtype)
        state[0, head] = made.state
        if "states" in refs:
            refs["states"][0, head, 0] = before
        if "inverse" in refs:
            refs["inverse"][0, head, 0] = made.inverse
            refs["unseen"][0, head] = made.unseen


class _Chunk(NamedTuple):
    """outputs [tokens, value_dim] of a head's chunk, the state after it and, of the delta rule, the inverse if it is kept, and of
    each value what its key hadn't seen: the updates before they are multiplied with beta."""

    outputs: jax.Array
    state: jax.Array
    inverse: jax.Array | None = None
    unseen: jax.Array | None = None


def _chunk(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
    scale: float,
    keeps: bool,
) -> _Chunk:
    """decay: a row [1, tokens], or [tokens, dim]; beta: a row. keeps: whether the inverse is wanted."""
    size, dtype = query.shape[0], query.dtype
    square = square_of(size)
    rows = query if beta is None else jnp.concatenate([query, key], 0)
    decayed = by_head(rows, key, decay, square) if decay.shape[0] == 1 else by_channel(rows, key, decay, square)
    started = decayed.started if beta is None else jnp.concatenate([decayed.started] * 2, 0)
    read = dot(rows.astype(jnp.float32) * started, state, 1, 0, dtype)
    update, inverse, unseen = value.astype(jnp.float32), None, None
    product = functools.partial(dot, b_axis=0, dtype=dtype)
    if beta is not None:
        # Updates are differences, which may cancel in the sums over tokens: rounded to bfloat16 they wouldn't.
        product = functools.partial(wide_dot, dtype=dtype)
        strict = jnp.where(square.column < square.row, decayed.products[size:], 0.0) * beta
        if keeps:
            inverse = unit_inverse(strict, square, dtype)
            unseen = product(inverse, update - read[size:], a_axis=1)
        else:
            unseen = unit_solve(strict, update - read[size:], square, dtype)
        update = as_column(beta) * unseen
    seen = jnp.where(square.column <= square.row, decayed.products[:size], 0.0)
    outputs = np.float32(scale) * (read[:size] + product(seen, update, a_axis=1))
    after = decayed.kept.of(state, product(key.astype(jnp.float32) * decayed.ended, update, a_axis=0))
    return _Chunk(outputs, after, inverse, unseen)
