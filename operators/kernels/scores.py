"""A score's steps on a tile of logits, and their gradient; shared by all kernels.

A tile says how it cuts the steps' arrays (`ScoreTile`). Everything is elementwise: the gradient of a step's input is that of its
result times a factor of the same element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ...scores.steps import Add, Cap, Diagonal, Function, Linear, Lookup, Multiply, Product, Step, Steps
from .local_mask import LocalMask, score_positions
from .precision import exact
from .primitives import cut, cut_along, loop, numbers, put, shifted, summed
from .tiles import TilePosition, TileSource

__all__ = [
    "BlockScores",
    "Pull",
    "ScoreTile",
    "Scored",
    "Share",
    "WholeScores",
    "apply_steps",
    "diagonal_sums",
    "from_diagonals",
    "tanh",
    "without_padded_rows",
]


class ScoreTile(Protocol):
    """The arrays of a tile, each in a shape that broadcasts to it. What is added to logits is multiplied by `unit`, where it has
    the fewest elements."""

    def aligned(self, number: int) -> jax.Array:
        """The tile's part of an aligned array."""
        ...

    def distance(self) -> jax.Array:
        """How far query and key are apart, in the dtype of the logits."""
        ...

    def linear(self, step: Linear, unit: float) -> jax.Array:
        """An aligned array times the distance."""
        ...

    def diagonal(self, step: Diagonal, unit: float) -> jax.Array:
        """The number of each pair's distance."""
        ...

    def lookup(self, step: Lookup, unit: float) -> jax.Array:
        """The number of each pair in a table."""
        ...

    def product(self, step: Product, unit: float) -> jax.Array:
        """The number of each query for the index of each key."""
        ...

    def places(self, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
        """Batch row, query head, and positions of query and key, int32 in this shape."""
        ...


# The gradient of a step's arrays: (step, number of the array, a number for each element of the tile).
Share = tuple[Step, int, jax.Array]
Pull = Callable[[jax.Array], tuple[jax.Array, list[Share]]]


class Scored(NamedTuple):
    """Logits are x * factor, times `unit` unless that is `absorbed`. pull: from the gradient of the logits, not in units, to that
    of what the steps were applied to, and the arrays' shares of it."""

    x: jax.Array
    factor: float
    absorbed: bool
    pull: Pull


def tanh(x: jax.Array) -> jax.Array:
    """The default of `apply_steps`."""
    return jnp.tanh(x)


def apply_steps(
    steps: Steps,
    x: jax.Array,
    factor: float,
    unit: float,
    tile: ScoreTile,
    *,
    tanh: Callable[[jax.Array], jax.Array] = tanh,
    vjp: Callable[..., tuple[Any, Callable[[jax.Array], Any]]] = jax.vjp,
) -> Scored:
    """Apply steps to logits x * factor. unit: what the kernel's logits are multiplied by: log2 e for powers of 2.

    A sum is made in units at once: its arrays have fewer elements than the tile.
    """
    absorbed = False
    pulls: list[Pull] = []
    after_function = False
    for step in steps.steps:
        x, factor, absorbed, pull = _applied(step, x, factor, absorbed, unit, tile, tanh, vjp)
        after_function |= isinstance(step, Function)
        pulls.append(_of_seen(pull) if after_function else pull)

    def pulled(gradient: jax.Array) -> tuple[jax.Array, list[Share]]:
        shares: list[Share] = []
        for pull in reversed(pulls):
            gradient, some = pull(gradient)
            shares += some
        return gradient, shares

    return Scored(x, factor, absorbed, pulled)


def _of_seen(pull: Pull) -> Pull:
    """A pull that is 0 where the gradient is: a hidden element may be where a function has no number or no derivative, and 0
    times that isn't 0."""

    def pulled(d: jax.Array) -> tuple[jax.Array, list[Share]]:
        hidden = d == 0
        before, shares = pull(d)
        of_seen = [(step, n, jnp.where(hidden, jnp.zeros_like(share), share)) for step, n, share in shares]
        return jnp.where(hidden, jnp.zeros_like(before), before), of_seen

    return pulled


def without_padded_rows(steps: Steps | None, x: jax.Array, shift: jax.Array) -> jax.Array:
    """Logits x for weights exp(x - shift) -> -inf in rows whose shift is inf, if the score has a function: rows beyond the end,
    where it may have no number."""
    if steps is None or Function.name not in steps.names:
        return x
    return jnp.where(jnp.broadcast_to(shift == jnp.inf, x.shape), jnp.full_like(x, -jnp.inf), x)


def _applied(
    step: Step,
    x: jax.Array,
    factor: float,
    absorbed: bool,
    unit: float,
    tile: ScoreTile,
    tanh: Callable[[Any], Any],
    vjp: Callable[..., tuple[Any, Callable[[jax.Array], Any]]],
) -> tuple[jax.Array, float, bool, Pull]:
    work = unit if absorbed else 1.0
    if isinstance(step, Cap):
        capped = tanh(x * (factor / (step.cap * work)))
        return capped, step.cap, False, lambda d: (d * (1.0 - capped * capped), [])
    if isinstance(step, Multiply):
        times = tile.aligned(step.reads[0])
        return x * times, factor, absorbed, lambda d: (d * times, [(step, 0, d * (x * (factor / work)))])
    if isinstance(step, Function):
        natural = x * (factor / work)
        arrays = [jnp.broadcast_to(tile.aligned(n), natural.shape) for n in step.reads]
        places = tile.places(natural.shape)

        def function(logits: jax.Array, *captured: jax.Array) -> jax.Array:
            result = step.function(logits, *places, *captured)
            return jnp.broadcast_to(result, natural.shape).astype(natural.dtype)

        def through(d: jax.Array) -> tuple[jax.Array, list[Share]]:
            _, back = vjp(function, natural, *arrays)
            d, *shares = back(d)
            return d, [(step, n, share) for n, share in enumerate(shares)]

        return function(natural, *arrays), 1.0, False, through
    # The others are sums.
    base = x * (factor * (unit / work))
    if isinstance(step, Add):
        plus, minus = (tile.aligned(n) for n in step.reads)
        return base + (plus - minus) * unit, 1.0, True, lambda d: (d, [(step, 0, d), (step, 1, -d)])
    if isinstance(step, Linear):
        return base - tile.linear(step, unit), 1.0, True, lambda d: (d, [(step, 0, -d * tile.distance())])
    if isinstance(step, Diagonal):
        added = tile.diagonal(step, unit)
    elif isinstance(step, Lookup):
        added = tile.lookup(step, unit)
    else:
        assert isinstance(step, Product)
        added = tile.product(step, unit)
    return base + added, 1.0, True, lambda d: (d, [(step, 0, d)])


def from_diagonals(x: jax.Array, rows: int, keys: int) -> jax.Array:
    """[..., rows, keys] whose element (r, c) is number c - r + rows - 1 of x [..., rows + keys - 1].

    No index is computed: copies of x are read as rows that are shorter by one, so each begins one number earlier.
    """
    *lead, length = x.shape
    if rows == 1:
        return x[..., None, :]
    flat = jnp.broadcast_to(x[..., None, :], (*lead, rows, length)).reshape(*lead, rows * length)
    flat = lax.slice_in_dim(flat, rows - 1, rows * length - 1, axis=len(lead))
    return flat.reshape(*lead, rows, length - 1)[..., :keys]


def diagonal_sums(x: jax.Array, platform: str) -> jax.Array:
    """The transpose of `from_diagonals`: the sum of each diagonal of x [..., rows, keys], in a fixed order.

    On a CPU row after row: the shifted rows of other devices take twice the memory of x and six times as long.
    """
    *lead, rows, keys = x.shape
    if rows == 1:
        return lax.squeeze(x, (x.ndim - 2,))
    length, same = rows + keys - 1, [(0, 0)] * len(lead)
    if platform == "cpu":
        axis, zeros = len(lead), x[..., 0, :1] * 0 + jnp.zeros((*lead, length), x.dtype)

        def add_row(row: Any, sums: jax.Array) -> jax.Array:
            starts = (*(0,) * axis, rows - 1 - row)
            new = lax.squeeze(cut_along(x, row, 1, axis=axis), (axis,))
            return put(sums, cut(sums, starts, new.shape) + new, starts)

        return loop(0, rows, add_row, zeros)
    flat = jnp.pad(x, [*same, (0, 0), (0, rows - 2)]).reshape(*lead, rows * (length - 1))
    shifted_rows = jnp.pad(flat, [*same, (rows - 1, 1)]).reshape(*lead, rows, length)
    return lax.squeeze(summed(shifted_rows, len(lead)), (len(lead),))


def _times(x: jax.Array, unit: float) -> jax.Array:
    return x if unit == 1 else x * unit


def _one_hot(index: jax.Array, count: int, dtype: Any) -> jax.Array:
    return (index[..., None] == numbers((1,) * index.ndim + (count,), index.ndim)).astype(dtype)


@dataclass(frozen=True)
class WholeScores:
    """A ScoreTile of all rows and some keys, [batch, heads, q, keys]."""

    steps: Steps
    arrays: tuple[jax.Array, ...]
    mask: LocalMask
    dtype: Any
    keys: slice

    @property
    def _shape(self) -> tuple[int, int]:
        return self.mask.q_len, self.keys.stop - self.keys.start

    def aligned(self, number: int) -> jax.Array:
        """See ScoreTile."""
        x = self.arrays[number]
        return x if x.shape[3] == 1 or x.shape[3] == self._shape[1] else x[..., self.keys]

    def _positions(self) -> tuple[jax.Array, jax.Array]:
        """int32 [batch | 1, 1, q, 1] and [batch | 1, 1, 1, keys]."""
        if self.steps.positions:
            known = score_positions(self.mask)
            assert known is not None
            return known[0][:, None, :, None], known[1][:, None, None, self.keys]
        q_len, width = self._shape
        rows = shifted(numbers((1, 1, q_len, 1), 2), self.mask.q_start)
        offset = 0 if self.mask.query_offset is None else self.mask.query_offset
        rows = shifted(rows, offset if isinstance(offset, int) else offset[:, None, None, None])
        return rows, shifted(shifted(numbers((1, 1, 1, width), 3), self.keys.start), self.mask.k_start)

    def distance(self) -> jax.Array:
        """See ScoreTile."""
        q, kv = self._positions()
        return abs((kv - q).astype(self.dtype))

    def linear(self, step: Linear, unit: float) -> jax.Array:
        """See ScoreTile."""
        return _times(self.aligned(step.reads[0]), unit) * self.distance()

    def places(self, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
        """See ScoreTile."""
        batch, head = numbers((shape[0], 1, 1, 1), 0), numbers((1, shape[1], 1, 1), 1)
        batch, head = shifted(batch, self.mask.batch_start), shifted(head, self.mask.head_start)
        batch, head, q, kv = (jnp.broadcast_to(x, shape) for x in (batch, head, *self._positions()))
        return batch, head, q, kv

    def diagonal(self, step: Diagonal, unit: float) -> jax.Array:
        """See ScoreTile."""
        rows, keys = self._shape
        first = self.keys.start + self.mask.k_start - self.mask.q_start - (rows - 1) + step.rows - 1
        x = self.arrays[step.reads[0]]
        return from_diagonals(_times(cut_along(x, first, rows + keys - 1, axis=2), unit), rows, keys)

    def lookup(self, step: Lookup, unit: float) -> jax.Array:
        """See ScoreTile."""
        q, kv = self._positions()
        index = step.index(q, kv)[:, 0]
        return jnp.moveaxis(_times(self.arrays[step.reads[0]], unit)[:, index], 0, 1)

    def product(self, step: Product, unit: float) -> jax.Array:
        """See ScoreTile."""
        x, (_, kv) = self.arrays[step.reads[0]], self._positions()
        chosen = _one_hot(step.index(kv[:, 0, 0]), x.shape[-1], x.dtype)
        return jnp.einsum(
            "bhqn,bkn->bhqk" if chosen.shape[0] > 1 else "bhqn,zkn->bhqk",
            _times(x, unit),
            chosen,
            precision=exact(x.dtype),
        )


class BlockScores:
    """The arrays of a score's steps, padded to whole blocks, and their gradients, for a pass in blocks over plain XLA."""

    def __init__(
        self, steps: Steps, arrays: tuple[jax.Array, ...], source: TileSource, dtype: Any, platform: str
    ) -> None:
        self.steps, self.source, self.dtype, self.platform = steps, source, dtype, platform
        self.shapes = tuple(x.shape for x in arrays)
        self.padded_rows = -source.mask.q_len % source.block_q
        self.padded_keys = -source.mask.kv_len % source.block_kv
        self.arrays = tuple(self._padded(x, form) for x, form in zip(arrays, steps.forms, strict=True))

    def _padded(self, x: jax.Array, form: str) -> jax.Array:
        if form == "aligned":
            return self.source.pad(x)
        if form == "columns":
            short = -x.shape[2] % self.source.block_q
            return jnp.pad(x, ((0, 0), (0, 0), (0, short if x.shape[2] > 1 else 0), (0, 0)))
        # Rows beyond the end have numbers before the first one, keys beyond it after the last.
        return jnp.pad(x, ((0, 0), (0, 0), (self.padded_rows, self.padded_keys))) if form == "diagonal" else x

    def unpadded(self, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Gradients of the padded arrays as those of the arrays."""
        return tuple(
            x[:, :, self.padded_rows : self.padded_rows + shape[2]]
            if form == "diagonal"
            else x[tuple(slice(n) for n in shape)]
            for x, shape, form in zip(gradients, self.shapes, self.steps.forms, strict=True)
        )

    def tile(self, at: TilePosition) -> BlockTile:
        """The arrays of one tile."""
        return BlockTile(self, at)


@dataclass(frozen=True)
class BlockTile:
    """A ScoreTile [heads, block_q, block_kv]."""

    scores: BlockScores
    at: TilePosition

    def aligned(self, number: int) -> jax.Array:
        """See ScoreTile."""
        return self.scores.source.cut(self.scores.arrays[number], self.at)

    def _positions(self) -> tuple[jax.Array, jax.Array]:
        """int32 [1, block_q, 1] and [1, 1, block_kv]."""
        if self.scores.steps.positions:
            q, kv = self.scores.source.positions(self.at)
            return q[:, :, None], kv[:, None]
        rows, cols = self.scores.source.places(self.at)
        return rows[None], cols[None]

    def distance(self) -> jax.Array:
        """See ScoreTile."""
        q, kv = self._positions()
        return abs((kv - q).astype(self.scores.dtype))

    def linear(self, step: Linear, unit: float) -> jax.Array:
        """See ScoreTile."""
        return _times(self.aligned(step.reads[0]), unit) * self.distance()

    def places(self, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
        """See ScoreTile."""
        mask = self.scores.source.mask
        head = shifted(numbers((self.at.heads, 1, 1), 0, self.at.head), mask.head_start)
        batch = jnp.asarray(shifted(self.at.batch, mask.batch_start), jnp.int32)
        batch, head, q, kv = (jnp.broadcast_to(x, shape) for x in (batch, head, *self._positions()))
        return batch, head, q, kv

    def _diagonals(self, step: Diagonal) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Where the tile's numbers are in the padded array, and how many."""
        source, x = self.scores.source, self.scores.arrays[step.reads[0]]
        rows, keys = source.block_q, source.block_kv
        row = shifted(self.at.q_block * rows, source.mask.q_start)
        key = shifted(source.first_key(self.at.kv_block), source.mask.k_start)
        first = key - row + (step.rows - rows + self.scores.padded_rows)
        many = [n > 1 for n in x.shape[:2]]
        start = (self.at.batch if many[0] else 0, self.at.head if many[1] else 0, first)
        return start, (1, self.at.heads if many[1] else 1, rows + keys - 1)

    def diagonal(self, step: Diagonal, unit: float) -> jax.Array:
        """See ScoreTile."""
        x = cut(self.scores.arrays[step.reads[0]], *self._diagonals(step))[0]
        return from_diagonals(_times(x, unit), self.scores.source.block_q, self.scores.source.block_kv)

    def _index(self, step: Lookup) -> jax.Array:
        """int32 [block_q, block_kv]."""
        entries = self.scores.arrays[step.reads[0]].shape[1]
        q, kv = self._positions()
        return jnp.clip(step.index(q, kv)[0], 0, entries - 1)

    def lookup(self, step: Lookup, unit: float) -> jax.Array:
        """See ScoreTile."""
        table = self.scores.arrays[step.reads[0]]
        if table.shape[0] > 1:
            table = cut_along(table, self.at.head, self.at.heads)
        return jnp.take(_times(table, unit), self._index(step), axis=1)

    def _columns(self, step: Product) -> tuple[jax.Array, jax.Array]:
        """(the tile's rows [heads, block_q, n], which of the n each key has [block_kv, n])."""
        x = self._rows(self.scores.arrays[step.reads[0]])
        _, kv = self._positions()
        return x, _one_hot(step.index(kv[0, 0]), x.shape[-1], x.dtype)

    def _rows_at(self, x: jax.Array) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        size = self.scores.source.block_q
        where_is = ((self.at.batch, 1), (self.at.head, self.at.heads), (self.at.q_block * size, size))
        places = [(0, 1) if n == 1 else at for n, at in zip(x.shape[:3], where_is, strict=True)]
        return (*(start for start, _ in places), 0), (*(size for _, size in places), x.shape[3])

    def _rows(self, x: jax.Array) -> jax.Array:
        return cut(x, *self._rows_at(x))[0]

    def product(self, step: Product, unit: float) -> jax.Array:
        """See ScoreTile."""
        x, chosen = self._columns(step)
        return jnp.einsum("hqn,kn->hqk", _times(x, unit), chosen, precision=exact(x.dtype))

    # -- gradients ---------------------------------------------------------------------------------------------------

    def add_share(self, gradients: tuple[jax.Array, ...], share: tuple[Step, int, jax.Array]) -> tuple[jax.Array, ...]:
        """Add a tile's share [heads, block_q, block_kv] to the gradients of the padded arrays."""
        step, read, part = share
        number = step.reads[read]
        whole = gradients[number]
        form = self.scores.steps.forms[number]
        if form == "aligned":
            start = self.scores.source.start(whole, self.at)
            new = put(whole, (self.scores.source.cut(whole, self.at) + _summed_to(part, whole.shape[1:]))[None], start)
        elif form == "diagonal":
            assert isinstance(step, Diagonal)
            start, size = self._diagonals(step)
            old = cut(whole, start, size)
            diagonals = _summed_to(diagonal_sums(part, self.scores.platform)[..., None], (old.shape[1], size[2], 1))
            new = put(whole, old + diagonals[None, ..., 0], start)
        elif form == "table":
            assert isinstance(step, Lookup)
            new = self._add_to_table(whole, step, part)
        else:
            assert isinstance(step, Product)
            old, (_, chosen) = self._rows(whole), self._columns(step)
            rows = jnp.einsum("hqk,kn->hqn", part, chosen, precision=exact(part.dtype))
            new = put(whole, (old + _summed_to(rows, old.shape))[None], self._rows_at(whole)[0])
        return (*gradients[:number], new, *gradients[number + 1 :])

    def _add_to_table(self, whole: jax.Array, step: Lookup, part: jax.Array) -> jax.Array:
        """A histogram over the entries: on a CPU by a scatter, one addition after another.

        A GPU's scatter adds in an order that changes from run to run, a TPU's one element at a time. There rows are multiplied
        with ones and zeros.
        """
        index, entries = self._index(step), whole.shape[1]
        part = part if whole.shape[0] > 1 else part.sum(0, keepdims=True)
        if self.scores.platform == "cpu":
            sums = jnp.zeros((part.shape[0], entries), part.dtype).at[:, index].add(part)
        else:

            def of_row(sums: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                at, values = row
                return sums + lax.dot(values, _one_hot(at, entries, part.dtype), precision=exact(part.dtype)), None

            start = part[:, 0, :1] * 0 + jnp.zeros((part.shape[0], entries), part.dtype)
            sums, _ = lax.scan(of_row, start, (index, part.swapaxes(0, 1)))
        if whole.shape[0] == 1:
            return whole + sums
        return put(whole, cut_along(whole, self.at.head, self.at.heads) + sums, (self.at.head, 0))


def _summed_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x summed over the dimensions in which the shape has 1."""
    for axis, size in reversed(list(enumerate(shape))):
        if size == 1 and x.shape[axis] > 1:
            x = summed(x, axis)
    return x
