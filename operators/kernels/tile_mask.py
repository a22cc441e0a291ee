"""What the tiles of splash's and flash's kernels share: how products become logits, the mask, the dropout, a tile's place.

A tile reads references by name: 'leaf<n>' and 'words<n>' for the mask's arrays and its blocks, 'q_start', 'k_start',
'query_offset' and 'dropout' for traced numbers. How a tile is cut out of an array is each kernel's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...masks import Full, Mask, Slot
from .block_words import is_blocks, seen_by_words
from .evaluated_leaf import EvaluatedLeaf
from .local_mask import Dropout, LocalMask
from .operands import StaticArgs
from .primitives import shifted
from .seen_keys import Seen

__all__ = ["TileLogits", "TileMask", "traced_numbers"]


@dataclass(frozen=True)
class TileLogits:
    """How products become logits, and the static parts of the mask and the dropout."""

    scale: float
    soft_cap: float | None
    static_args: StaticArgs


def traced_numbers(mask: LocalMask, dropout: Dropout | None, seen: Seen | None) -> dict[str, jax.Array]:
    """The numbers that aren't known at trace time, int32, by name; 'clean': of `seen`.

    'dropout' is the seed and where the device's rows and heads begin: a head's key is computed from them where it is needed.
    """
    places = {
        "q_start": mask.q_start, "k_start": mask.k_start, "query_offset": mask.query_offset,
        "batch_start": mask.batch_start, "head_start": mask.head_start,
    }  # fmt: skip
    numbers = {
        name: jnp.asarray(number, jnp.int32).reshape(-1)
        for name, number in places.items()
        if number is not None and not isinstance(number, int)
    }
    if dropout is not None:
        starts = (jnp.asarray(x, jnp.int32).reshape(1) for x in (dropout.batch_start, dropout.head_start))
        numbers["dropout"] = jnp.concatenate([lax.bitcast_convert_type(dropout.seed, jnp.int32), *starts])
    if seen is not None and seen.clean is not None:
        numbers["clean"] = seen.clean.astype(jnp.int32).reshape(1)
    return numbers


class TileMask:
    """The mask and the dropout of a tile. `where` is whatever the subclass needs to know of the part of it that is asked for."""

    def __init__(self, static_args: StaticArgs, refs: dict[str, Any], batch: Any) -> None:
        self.static_args, self.refs, self.batch = static_args, refs, batch

    # -- what a subclass knows ---------------------------------------------------------------------------------------

    def _words(self, ref: Any, *where: Any) -> tuple[list[jax.Array], Any]:
        """(the rows' words of the mask's blocks, the local number of the tile's first key)."""
        raise NotImplementedError

    def _dense(self, name: str, *where: Any) -> jax.Array:
        """The tile of an array of [batch, heads, q, kv], any of them 1, in a shape that broadcasts to it."""
        raise NotImplementedError

    def _along(self, name: str, dim: str, *where: Any) -> jax.Array:
        """The tile's numbers of an array of [batch | 1, q] or [batch | 1, kv], in a shape that broadcasts to it."""
        raise NotImplementedError

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """1 / x of numbers of the tile from 1 on."""
        return 1.0 / x

    # -- its place in the whole problem ------------------------------------------------------------------------------

    def _global_rows(self, rows: Any) -> Any:
        start = self.static_args.q_start
        return shifted(rows, self.refs["q_start"][0] if start is None else start)

    def _global_keys(self, keys: Any) -> Any:
        start = self.static_args.k_start
        return shifted(keys, self.refs["k_start"][0] if start is None else start)

    def position(self, rows: Any) -> Any:
        """The positions of rows of the whole problem."""
        return shifted(rows, self.offset())

    def offset(self) -> Any:
        """Of the positions of this batch row."""
        if "query_offset" in self.refs:
            return self.refs["query_offset"][self.batch]
        return self.static_args.query_offset or 0

    def global_row_and_head(self, batch: Any, head: Any) -> tuple[Any, Any]:
        """This device's batch row and query head in the whole problem."""
        starts = (
            self.refs[name][0] if known is None else known
            for name, known in (
                ("batch_start", self.static_args.batch_start),
                ("head_start", self.static_args.head_start),
            )
        )
        return shifted(batch, next(starts)), shifted(head, next(starts))

    def positions_leaf(self) -> int | None:
        """The number of the first array of the mask's Positions, if the score goes by them."""
        score, number = self.static_args.score, 0
        if score is None or not score.positions:
            return None
        for atom in self.static_args.mask.leaves():
            if isinstance(atom, Slot):
                if atom.kind == "positions":
                    return number
                number += len(atom.parts)
        return None

    # -- dropout -----------------------------------------------------------------------------------------------------

    def _dropout_key(self, head: Any) -> tuple[jax.Array, jax.Array]:
        """Dropout's key of a head."""
        ref = self.refs["dropout"]
        first, second = (ref[i].astype(jnp.uint32) for i in (0, 1))
        return Dropout.head_key(first, second, ref[2] + self.batch, ref[3] + head)

    def dropped(self, x: jax.Array, keep: jax.Array | None) -> jax.Array:
        """Weights, or their gradients, after dropout."""
        return x if keep is None else jnp.where(keep, x * (1.0 / (1.0 - self.static_args.dropout)), 0.0)

    # -- the mask ----------------------------------------------------------------------------------------------------

    def _tests(self, mask: Mask, rows: jax.Array, keys: jax.Array, *where: Any, but: Sequence[Mask] = ()) -> list[Any]:
        """The tests that a visible key passes; rows: this device's, keys: those of the whole problem. but: parts of the mask that
        are left out."""
        if isinstance(mask, Full):
            return []
        numbers, words = itertools.count(), itertools.count()

        def passed_over(atom: Mask) -> Mask:
            for _ in atom.parts:
                next(numbers)
            if is_blocks(atom):
                next(words)
            return Full()

        def evaluate(atom: Mask) -> Mask:
            if is_blocks(atom):
                for _ in atom.parts:
                    next(numbers)
                return self._blocks(f"words{next(words)}", atom, keys, *where)
            if not isinstance(atom, Slot):
                return atom
            parts = [self._leaf(f"leaf{next(numbers)}", dims, *where) for _, _, dims in atom.parts]
            return EvaluatedLeaf(atom.related(parts, keys))

        rows = self._global_rows(rows)
        positions = self.position(rows)
        parts = [
            part.map_leaves(passed_over if any(part is one for one in but) else evaluate) for part in mask.conjuncts()
        ]
        return [self._tested(part, rows, positions, keys) for part in parts if not isinstance(part, Full)]

    def _tested(self, mask: Mask, rows: Any, positions: Any, keys: Any) -> Any:
        """A mask without arrays on the tile."""
        return mask.test(rows, positions, keys)

    def _blocks(self, name: str, atom: Any, keys: jax.Array, *where: Any) -> Mask:
        """A leaf of blocks evaluated on the tile; Full where a visited tile is known to be visible."""
        if name not in self.refs:
            return Full()
        rows, first = self._words(self.refs[name], *where)
        return EvaluatedLeaf(seen_by_words(rows, keys, self._global_keys(first), atom.block_kv))

    def _leaf(self, name: str, dims: tuple[str, ...], *where: Any) -> Any:
        """An array of the mask, to be compared with the tile's keys and rows."""
        if len(dims) == 4:
            return self._dense(name, *where).astype(jnp.int32) != 0
        if dims == ("batch",):
            ref = self.refs[name]
            return ref[self.batch if ref.shape[0] > 1 else 0]
        return self._along(name, dims[1], *where)
