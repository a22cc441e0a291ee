"""One device's part of a call: its arrays in one layout, what its neighbours hand over, and how states pass along a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...planning.recurrent.exchange import LOG_STEP, rounds
from ...planning.tables.table_problem import TableProblem
from ..kernels.varying import alike, varying
from .kernel.linear import chunked
from .kernel.over_rows import Rows

__all__ = ["Affine", "RecurrentCall", "passed_on"]

_BLOCK = 1 << 18  # bytes of a state that a core keeps in its second cache while it reads them twice and writes them


@dataclass(frozen=True)
class RecurrentCall:
    """One device's part of a call.

    arrays: by name, [batch, tokens, heads, ...] whatever the caller's layout, 0 for tokens that don't count. document int32
    [batch, tokens], or None: which one a token is of, 0 for that of the state before the device's tokens. valid bool [batch,
    tokens], or None if all tokens count. over: the mesh axes that split the sequence, () if the device has all of it. exchange:
    how maps are exchanged over them. chunked: what goes through the chunks of linear attention; see kernel/linear.py. rows: those
    of a step over slots, whose batch is 1 and whose initial_state are the slots; None for a whole call. token: what works on
    the last tokens of rows; see kernel/rows_on_kernels.py."""

    arrays: dict[str, jax.Array]
    document: jax.Array | None
    valid: jax.Array | None
    problem: TableProblem
    config: Any
    over: tuple[str, ...] = ()
    exchange: str = ""
    chunked: Callable[..., tuple[jax.Array, jax.Array]] = chunked
    rows: Rows | None = None
    token: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]] | None = None

    def one_by_one(self, key_heads: int = 1) -> int:
        """In how many blocks of heads, whole groups of key heads, rows of one token are worked on one after the other; 0 for all
        at once. On a CPU, whose caches then hold what is read twice."""
        if self.problem.platform != "cpu":
            return 0
        state = self.arrays["initial_state"]
        size = math.prod(state.shape[1:]) * state.dtype.itemsize
        return next(n for n in range(key_heads, 0, -1) if key_heads % n == 0 and (n == 1 or size // n >= _BLOCK))


class Affine(NamedTuple):
    """What some tokens do to a state: S becomes linear S + constant. linear: a matrix [..., dim, dim], or numbers that broadcast
    against the state."""

    linear: jax.Array
    constant: jax.Array


def passed_on(
    call: RecurrentCall, own: Affine, initial: jax.Array, apply: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(the state before this device's tokens, that after all devices') in the order of the axes `call.over`. Maps are sent, whose
    size doesn't depend on the number of tokens. apply: what a linear part does to a state, or to a linear part before it."""
    return (_log_step if call.exchange == LOG_STEP else _all_gather)(own, initial, call.over, apply)


def _all_gather(
    own: Affine, initial: jax.Array, over: tuple[str, ...], apply: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Every device gets the maps of all, and applies one after the other."""
    maps = jax.tree.map(lambda x: lax.all_gather(x, over), own)
    here = lax.axis_index(over)

    def step(carry: tuple[jax.Array, jax.Array], at: Any) -> tuple[Any, None]:
        state, mine = carry
        one, index = at
        mine = jnp.where(index == here, state, mine)
        return (apply(one.linear, state) + one.constant, mine), None

    count = maps.constant.shape[0]
    initial, maps, here = alike((initial, maps, here))
    (after, before), _ = lax.scan(step, (initial, initial), (maps, jnp.arange(count, dtype=jnp.int32)))
    if varying(after) & set(over):
        # In a caller's shard_map with check_vma, which is told so that all devices have the same: it may be returned whole.
        after = lax.psum(jnp.where(here == count - 1, after, 0), over)
    return before, after


def _log_step(
    own: Affine, initial: jax.Array, over: tuple[str, ...], apply: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """In each round a device gets the map of twice as many devices before it, and composes it with its own.

    The first device's map has the initial state in it, so a map that goes back to the first device is a state: it has no linear
    part, and none is sent. Devices that nothing is sent to get zeros, which is what such a map's linear part is.
    """
    here, count = lax.axis_index(over), lax.axis_size(over)
    linear, constant = own
    constant = constant + jnp.where(here == 0, apply(linear, initial), 0)
    for sent in rounds(count):
        received = lax.ppermute(constant, over, sent.constant)
        constant = apply(linear, received) + constant
        if sent.linear:
            linear = apply(linear, lax.ppermute(linear, over, sent.linear))
    before = lax.ppermute(constant, over, [(n, n + 1) for n in range(count - 1)])
    before = jnp.where(here == 0, initial, before)
    return before, lax.psum(jnp.where(here == count - 1, constant, 0), over)
