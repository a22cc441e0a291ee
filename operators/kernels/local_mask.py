"""The mask and the dropout of one shard, with the shard's place in the whole problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...masks import And, Full, Mask
from ...masks.bounds import Blocks, Extent
from ...symbolic import is_symbolic
from .primitives import length, numbers, shifted
from .threefry import threefry

__all__ = ["Dropout", "LocalMask", "dropout_seed", "score_positions"]


_CONSTANT = 128  # the most weights of a mask stored as a constant


@dataclass(frozen=True)
class LocalMask:
    """The mask of one shard. Local row r is row `q_start + r` of the whole problem, local key c is key `k_start + c`.

    `mask` holds the shard's own pieces of the traced arrays. A start is traced where that length is split.
    `query_offset` is an int, a traced [batch] array, or None when no part of the mask depends on positions. `hides_keys` is
    False if each key of the whole problem is known to be seen by some query. batch_start, head_start: the shard's first batch row
    and query head, if a score asks for them.
    """

    mask: Mask
    q_start: int | jax.Array
    q_len: int
    kv_len: int
    query_offset: int | jax.Array | None
    k_start: int | jax.Array = 0
    hides_keys: bool = True
    batch_start: int | jax.Array = 0
    head_start: int | jax.Array = 0

    def placed(self, batch_start: int | jax.Array, head_start: int | jax.Array) -> LocalMask:
        """The same mask with its shard's first batch row and query head."""
        return replace(self, batch_start=batch_start, head_start=head_start)

    @property
    def _symbolic(self) -> bool:
        """Whether a length is a symbolic dimension of jax.export."""
        return is_symbolic(self.q_len) or is_symbolic(self.kv_len)

    @property
    def heads_differ(self) -> bool:
        """Whether heads have different blocks."""
        return any(getattr(atom, "heads", 1) > 1 for atom in self.mask.leaves())

    def kinds(self, block_q: int, block_kv: int) -> np.ndarray | jax.Array:
        """0 empty, 1 partial, 2 full, int8 [batch | 1, q blocks, kv blocks]; a NumPy array if nothing in it is traced.

        Exact for a static mask; otherwise empty and full are certain. What lies beyond the ends doesn't count. If heads have
        different blocks, empty and full mean so for all of them.
        """
        return self.kinds_of_heads(block_q, block_kv, 1)[:, 0]

    def kinds_of_heads(self, block_q: int, block_kv: int, tables: int) -> np.ndarray | jax.Array:
        """The same for that many groups of heads: [batch | 1, tables | 1, q blocks, kv blocks].

        The second size is 1 where heads don't differ.
        """
        kinds = self._kinds_by_head(block_q, block_kv)
        if kinds.shape[1] == 1:
            return kinds
        return _merge_heads(kinds.reshape(kinds.shape[0], tables, -1, *kinds.shape[2:]))

    def _kinds_by_head(self, block_q: int, block_kv: int) -> np.ndarray | jax.Array:
        xp: Any = jnp if self._symbolic else np
        if isinstance(self.mask, Full):  # wherever its rows are
            return xp.full((1, 1, -(-self.q_len // block_q), -(-self.kv_len // block_kv)), 2, np.int8)
        offset = 0 if self.query_offset is None else self.query_offset
        static, dynamic = self.mask.split_static()
        known: np.ndarray | jax.Array | None = None
        starts = self.q_start, self.k_start
        if not self._symbolic and isinstance(starts[0], int) and isinstance(starts[1], int) and isinstance(offset, int):
            known = static.live_blocks_by_head(
                block_q,
                block_kv,
                q_len=self.q_len,
                kv_len=self.kv_len,
                q_start=starts[0],
                query_offset=offset,
                k_start=starts[1],
            )[None]
            if not dynamic:
                return known
        (first_row, last_row), (first_key, last_key) = _ends(self.q_len, block_q, 2), _ends(self.kv_len, block_kv, 3)
        rows = Extent(first_row + self.q_start, last_row + self.q_start)
        along = offset if isinstance(offset, int) else offset[:, None, None, None]
        keys = Extent(first_key + self.k_start, last_key + self.k_start)
        blocks = Blocks(rows, Extent(rows.lo + along, rows.hi + along), keys, block_q, block_kv)
        some, every = (self.mask if known is None else And(dynamic)).block_bounds(blocks)
        kinds = jnp.where(every & some, 2, jnp.where(some, 1, 0)).astype(jnp.int8)
        if kinds.shape[1] > 1 and not self.heads_differ:  # an array with a plane for each head
            kinds = jnp.asarray(_merge_heads(kinds[:, None]))
        kinds = jnp.broadcast_to(kinds, (*kinds.shape[:2], *blocks.shape))
        return kinds if known is None else jnp.minimum(kinds, known)

    def array(self, keys: slice | None = None) -> jax.Array | np.ndarray | None:
        """Return the mask of some or all keys as a bool array that broadcasts to [batch, heads, q, keys]; None if full."""
        if isinstance(self.mask, Full):
            return None
        # Of a symbolic length only all keys are asked for: a cut would have to know that its array is long enough.
        whole = keys is None and self._symbolic
        keys = keys or slice(0, self.kv_len)
        mask = self.mask if whole else self.mask.narrow(slice(0, self.q_len), keys)
        width = keys.stop - keys.start
        # NumPy's numbers make a static mask a constant of the program, of two digits per weight: 33 MB for 4096 x 4096. Numbers
        # that the program computes are a few instructions, fused with what is done with the logits. Up to this size
        # the constant is the smaller of the two.
        count = _host_numbers if not self._symbolic and self.q_len * width <= _CONSTANT else numbers
        # Arrays in a mask have rank 4, so the numbers do too, in case rank promotion is disabled.
        ones = () if mask.is_static and not hasattr(self.query_offset, "ndim") else (1, 1)
        rows = shifted(count((*ones, self.q_len, 1), len(ones)), self.q_start)
        offset = 0 if self.query_offset is None else self.query_offset
        positions = shifted(rows, offset if isinstance(offset, int) else offset[:, None, None, None])
        cols = shifted(shifted(count((*ones, 1, width), len(ones) + 1), keys.start), self.k_start)
        visible = mask.test(rows, positions, cols)
        return visible if visible.ndim == 4 else visible[(None,) * (4 - visible.ndim)]

    @property
    def all_rows_see(self) -> bool:
        """Whether it is known, without testing each weight, that every row sees a key."""
        start, offset = self.q_start, 0 if self.query_offset is None else self.query_offset
        if not isinstance(start, int) or not isinstance(offset, int) or not isinstance(self.k_start, int):
            return False  # traced
        if self._symbolic:
            return False
        if self.k_start != 0 or not self.mask.is_static or "mask_function" in self.mask.features():
            return False
        return not self.mask.may_have_dead_rows(self.q_len, self.kv_len, q_start=start, query_offset=offset)


def _ends(size: int, block: int, axis: int) -> tuple[Any, Any]:
    """The first and the last number of each block of a length, along an axis of four; traced for a symbolic length."""
    count = -(-size // block)
    shape = tuple(count if i == axis else 1 for i in range(4))
    first = (numbers if is_symbolic(size) else _host_numbers)(shape, axis) * block
    xp: Any = jnp if is_symbolic(size) else np
    return first, xp.minimum(first + block, length(size)) - 1


def _merge_heads(kinds: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Kinds [batch, tables, heads, q, kv] merged over heads: empty and full where all of them are."""
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    return xp.where(kinds.min(2) == 2, 2, xp.minimum(kinds.max(2), 1)).astype(np.int8)


def _host_numbers(shape: tuple[int, ...], axis: int) -> np.ndarray:
    """`numbers`, as a constant."""
    return np.arange(shape[axis], dtype=np.int32).reshape(shape)


@dataclass(frozen=True)
class Dropout:
    """Which weights are dropped: a function of only the seed and a weight's place in the whole problem.

    So every mesh, every block size and both passes drop the same weights, and none of this is stored. `seed` is uint32
    [2]; the starts are this shard's first batch row, head, query row and key.
    """

    seed: jax.Array
    probability: float
    batch_start: int | jax.Array
    head_start: int | jax.Array
    q_start: int | jax.Array
    k_start: int | jax.Array = 0

    def keep_all(self, batch: int, heads: int, rows: int, keys: slice) -> jax.Array:
        """Return [batch, heads, rows, keys], True where a weight is kept."""
        width = keys.stop - keys.start
        return self.keep(
            numbers((batch, 1, 1, 1), 0),
            numbers((1, heads, 1, 1), 1),
            numbers((1, 1, rows, 1), 2),
            shifted(numbers((1, 1, 1, width), 3), keys.start),
        )

    def keep(self, batch: Any, head: Any, row: Any, col: Any) -> jax.Array:
        """Return True where a weight is kept, for local indices of any shapes that broadcast together."""
        first, second = self.head_keys(batch, head)
        return self.keep_mask(first, second, shifted(row, self.q_start), shifted(col, self.k_start), self.probability)

    def head_keys(self, batch: Any, head: Any) -> tuple[jax.Array, jax.Array]:
        """One key per head, uint32: computed on few elements, so that only one draw per weight is left."""
        return self.head_key(self.seed[0], self.seed[1], batch + self.batch_start, head + self.head_start)

    @staticmethod
    def head_key(first: Any, second: Any, batch: Any, head: Any) -> tuple[jax.Array, jax.Array]:
        """`head_keys` for the seed's words and for a batch row and a head of the whole problem; also used inside kernels."""
        batch, head = (jnp.asarray(index).astype(jnp.uint32) for index in (batch, head))
        return threefry(first, second, batch, head)

    @staticmethod
    def keep_mask(first: Any, second: Any, row: Any, col: Any, probability: float) -> jax.Array:
        """`keep` for a head's key and for rows and keys of the whole problem; also used inside kernels."""
        row, col = (jnp.asarray(index).astype(jnp.uint32) for index in (row, col))
        bits = threefry(first, second, row, col)[0]
        # 32 random bits decide, so p is exact to 2**-32.
        return bits >= np.uint32(min(round(probability * 2**32), 2**32 - 1))


def score_positions(mask: LocalMask) -> tuple[jax.Array, jax.Array] | None:
    """The arrays of the mask's Positions: (queries' [batch, q], keys' [batch, kv])."""
    leaves = [leaf for leaf in mask.mask.conjuncts() if leaf.kind == "positions"]
    return leaves[0].arrays() if len(leaves) == 1 else None


def dropout_seed(rng: jax.Array) -> jax.Array:
    """The seed [2] of a call's dropout, from a typed or a raw random key."""
    key = rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    return jax.random.bits(key, (2,), jnp.uint32)
