"""The places of each row's k greatest scores, which are computed block by block of keys.

Only the scores of these rows are kept, as integers in the same order; see ordering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

from ...kernels.primitives import cut_along, put
from .ordering import WORD, least_chosen, packed, positions_of, without_later_bits

__all__ = ["BestPlaces", "best_places"]

Fold = Callable[[Callable[[Any, Any], Any], Any], Any]


class BestPlaces(NamedTuple):
    """places: ascending, then -1, counted over all blocks; counts: how many are used. order: all scores, 0 where not visible."""

    places: Int[Array, "rows k"]
    counts: Int[Array, " rows"]
    order: UInt32[Array, "blocks rows keys"]


def best_places(
    fold: Fold,
    score: Callable[[Any], UInt32[Array, "rows keys"]],
    k: int,
    shape: tuple[int, int, int],
    zeros: Callable[[tuple[int, ...], Any], jax.Array],
) -> BestPlaces:
    """Of each row exactly the k greatest visible scores, of equal ones the first; all visible ones if there are no more.

    fold(step, carry): step(block, carry) over the blocks that any row sees. score: `ordered` scores of a block. shape: (blocks,
    rows, keys of a block, a multiple of 32). zeros(shape, dtype): varying as the scores do.
    """
    blocks, rows, keys = shape
    order = fold(lambda block, x: put(x, score(block)[None], (block, 0, 0)), zeros(shape, jnp.uint32))

    def count(least: Array) -> Array:
        def more(block: Any, total: Array) -> Array:
            return total + (cut_along(order, block, 1)[0] >= least[:, None]).sum(1, dtype=jnp.int32)

        return fold(more, zeros((rows,), jnp.int32))

    least, chosen = least_chosen(count, k, count(zeros((rows,), jnp.uint32) + jnp.uint32(1)))

    def bits(block: Any, words: tuple[Array, Array]) -> tuple[Array, Array]:
        part = cut_along(order, block, 1)[0]
        greater, equal = packed(part > least[:, None]), packed((part == least[:, None]) & (part > 0))
        place = (0, block * (keys // WORD))
        return put(words[0], greater, place), put(words[1], equal, place)

    nothing = zeros((rows, blocks * keys // WORD), jnp.uint32)
    greater, equal = fold(bits, (nothing, nothing))
    left = chosen - lax.population_count(greater).astype(jnp.int32).sum(1)
    return BestPlaces(positions_of(greater | without_later_bits(equal, left), k), chosen, order)
