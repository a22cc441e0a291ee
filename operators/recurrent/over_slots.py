"""The steps of linear attention over slots: convolutions, gates, and the recurrence of each row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .gated import by_heads, gated, skipped
from .kernel.convolution import Convolution, activated, conv_of_chunk, conv_over_rows
from .kernel.gates import ROLES, Gates, Ungated
from .kernel.over_rows import last_tokens_alone, over_rows
from .kernel.rows_on_kernels import Slots, chunks_of_rows, last_tokens_of_rows
from .local import RecurrentCall

__all__ = ["over_slots", "over_slots_by_kernels"]


def over_slots(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[jax.Array, Slots]:
    """(outputs, slots) of a step: each row continues its own state."""
    assert call.rows is not None
    rows = call.rows

    def convolve(x: jax.Array, one: Convolution, number: int) -> tuple[jax.Array, jax.Array]:
        del number
        outputs, window = conv_over_rows(x[0], one.weight, one.bias, one.slots, rows)
        return outputs[None], window

    given, windows = _convolved(call, given, convolve)
    *every, strength = gated(given, gates, call.valid)

    def run(arrays: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _chunk(call, arrays, state, scale)

    arrays = tuple(x[0] for x in (*every, *(() if strength is None else (strength,))))
    by_one = call.one_by_one(given.key.shape[2])
    slots, size = call.arrays["initial_state"], call.config.chunk_size
    outputs, slots = over_rows(run, arrays, slots, call.rows, size, one_by_one=by_one)
    return skipped(given, outputs[None]), (slots, *windows)


def over_slots_by_kernels(call: RecurrentCall, given: Ungated, gates: Gates, scale: float) -> tuple[jax.Array, Slots]:
    """The same by kernels. That of the last tokens has the convolutions and the gates too."""
    rows, outputs = call.rows, None
    assert rows is not None
    assert call.token is not None
    windows = tuple(one.slots for one in given.convolved if one is not None)
    slots: Slots = (call.arrays["initial_state"], *windows)
    raw = (given.query, given.key, given.value, given.decay, *(() if given.beta is None else (given.beta,)))
    arrays = tuple(x[0] for x in raw)
    if rows.longest is None or rows.longest > last_tokens_alone(rows.longest, rows.write.shape[1]):
        run = functools.partial(_raw_chunk, call, given, gates, scale)
        outputs, slots, rows = chunks_of_rows(run, arrays, slots, rows, call.config.chunk_size)
    token = functools.partial(
        call.token, given=given, gates=gates, activation=call.problem.option.get("conv_activation"), scale=scale
    )
    outputs, slots = last_tokens_of_rows(token, arrays, slots, rows, outputs)
    return outputs[None], slots


def _convolved(
    call: RecurrentCall, given: Ungated, convolve: Callable[[jax.Array, Convolution, int], tuple[jax.Array, jax.Array]]
) -> tuple[Ungated, list[jax.Array]]:
    """(the tokens behind their convolutions, the windows after). convolve: an array of tokens by one, the number-th."""
    activation, windows = call.problem.option.get("conv_activation"), list[jax.Array]()
    for name, one in zip(ROLES, given.convolved, strict=True):
        if one is not None:
            x: jax.Array = getattr(given, name)
            outputs, window = convolve(x, one, len(windows))
            of_role: dict[str, Any] = {name: activated(outputs, activation).astype(x.dtype)}
            given = given._replace(**of_role)
            windows.append(window)
    return given, windows


def _chunk(
    call: RecurrentCall, arrays: tuple[jax.Array, ...], state: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """(outputs, the state) after tokens: query, key, value, log decay and, for the delta rule, beta."""
    query, key, value, decay, *beta = map(by_heads, arrays)
    outputs, after = call.chunked(
        query, key, value, decay, *(beta or (None,)), state, None, scale=scale, chunk_size=call.config.chunk_size
    )
    return jnp.moveaxis(outputs, 1, 2), after


def _raw_chunk(
    call: RecurrentCall, given: Ungated, gates: Gates, scale: float, arrays: tuple[jax.Array, ...], before: Slots,
    count: jax.Array,
) -> tuple[jax.Array, Slots]:  # fmt: skip
    """The same of tokens as a model passes them, of which the first `count` count, with the windows of convolutions."""
    query, key, value, decay, *beta = arrays
    valid = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < count
    given = given._replace(query=query, key=key, value=value, decay=decay, beta=beta[0] if beta else None)
    state, *windows = before

    def convolve(x: jax.Array, one: Convolution, number: int) -> tuple[jax.Array, jax.Array]:
        outputs, window = conv_of_chunk(x, one, windows[number], count)
        return jnp.where(valid[..., None, None], outputs, 0), window  # no activation moves 0

    given, after = _convolved(call, given, convolve)
    *every, strength = gated(given, gates, valid)
    outputs, state = _chunk(call, (*every, *(() if strength is None else (strength,))), state, scale)
    return skipped(given, outputs), (state, *after)
