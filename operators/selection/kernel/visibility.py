"""Which keys each query may see, from the keywords of a call; and the blocks of keys that a block of queries visits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ....errors import InputError, is_whole, shown
from ....masks import Causal, Full, Lengths, Mask, Positions, SegmentIds, SlidingWindow
from ...kernels.local_mask import LocalMask
from ...kernels.primitives import loop, numbers
from ...kernels.tiles import TilePosition, TileSource, tile_table

__all__ = ["VisibleBlocks", "Window", "local_mask"]

# As in jax.nn: keys to the left and to the right, or one number for both.
Window = int | tuple[int | None, int | None]


def local_mask(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = True,
    sliding_window: Window | None = None,
    query_offset: int | Int[Array, " batch"] = 0,
    q_positions: Int[Array, "batch q_len"] | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    q_segment_ids: Int[Array, "batch q_len"] | None = None,
    kv_segment_ids: Int[Array, "batch kv_len"] | None = None,
) -> LocalMask:
    """The mask of these keywords, all of which must allow a key.

    The position of query i is i + query_offset, or q_positions[i]; that of a key is its index. sliding_window: (left, right)
    inclusive distances, None for no limit; one number for both. kv_lengths: a key beyond isn't visible. Errors: InputError.
    """
    mask: Mask = Full()
    left, right = _distances(sliding_window)
    if q_positions is not None:
        if not (isinstance(query_offset, int) and query_offset == 0):
            raise InputError("got query_offset and q_positions; wanted one of them: both say where queries are.")
        _check("q_positions", q_positions, (batch, q_len))
        if causal or left is not None or right is not None:
            keys = jnp.broadcast_to(numbers((1, kv_len), 1), (batch, kv_len))
            mask = Positions(q_positions.astype(jnp.int32), keys, left, min(0, right or 0) if causal else right)
    else:
        if not isinstance(query_offset, int):
            _check("query_offset", query_offset, (batch,))
        mask = Causal() if causal else mask
        if left is not None or right is not None:
            mask = mask & SlidingWindow(left, right)
    if kv_lengths is not None:
        _check("kv_lengths", kv_lengths, (batch,))
        mask = mask & Lengths(kv_lengths)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise InputError(
            "got segment ids of queries or of keys alone; wanted q_segment_ids and kv_segment_ids, or neither."
        )
    if q_segment_ids is not None:
        _check("q_segment_ids", q_segment_ids, (batch, q_len))
        _check("kv_segment_ids", kv_segment_ids, (batch, kv_len))
        mask = mask & SegmentIds(q_segment_ids, kv_segment_ids)
    return LocalMask(mask, 0, q_len, kv_len, query_offset)


class VisibleBlocks:
    """The blocks of keys that blocks of queries visit, and what is visible of each."""

    def __init__(self, mask: LocalMask, block_q: int, block_kv: int) -> None:
        if mask.heads_differ:
            raise InputError("the mask has blocks for each head; wanted one for all heads, which share the selection.")
        self._source = TileSource(mask, None, block_q, block_kv, every_tile=True)
        self._table = tile_table(mask, block_q, block_kv, separate_full=False)
        self._shape = block_q, block_kv

    def fold(self, batch: Any, q_block: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """step(block of keys, carry) over the blocks that a block of queries may see, in no particular order."""
        first, (_, last), block = self._table.tile_range(batch, 0, q_block)
        return loop(first, last, lambda n, c: step(jnp.asarray(block(n), jnp.int32), c), carry)

    def seen(self, batch: Any, q_block: Any, kv_block: Any) -> Bool[Array, "block_q block_kv"]:
        """Which keys of a block are visible to each query; none beyond the end of the keys."""
        seen = self._source.seen(TilePosition(batch, 0, 1, q_block, kv_block))
        return jnp.ones(self._shape, bool) if seen is None else jnp.broadcast_to(seen[0], self._shape)


def _distances(window: Window | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    left, right = (window, window) if isinstance(window, int) else window
    if not all(n is None or is_whole(n, 0) for n in (left, right)):
        raise InputError(
            f"sliding_window is {shown(window)}; wanted (left, right), each an int >= 0 or None, or one int."
        )
    return left, right


def _check(name: str, x: jax.Array | None, shape: tuple[int, ...]) -> None:
    if x is None or x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise InputError(f"{name} is {shown(x)}; wanted integers {list(shape)}.")
