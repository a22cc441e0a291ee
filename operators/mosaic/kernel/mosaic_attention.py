"""PartialMosaic: the kernels of a generation combined, with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....masks import SegmentIds
from ....scores.steps import Diagonal, Steps
from ...flash.kernel.partial_gpu import PartialGpu
from ...flash.kernel.tile_schedule import tile_schedule
from ...kernels.block_words import block_words
from ...kernels.folded_rows import FoldedRows
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.lse import merge_stacked
from ...kernels.operands import DynamicArgs, Operands, StaticArgs, join_static
from ...kernels.seen_keys import seen_keys, zero_where_hidden
from ...kernels.tile_mask import traced_numbers
from .block import MosaicBlock
from .distance_tables import by_distance
from .id_spans import id_spans
from .launch import launch
from .mosaic_sizes import MosaicSizes, MosaicTiles, latent_columns, padded_dim
from .spans import bounds_of, numbered
from .tile import MosaicLogits

__all__ = ["PartialMosaic"]

_GROUP = 8  # rows that are swizzled together
_BY_PAIR = ("batch", "heads", "q", "kv")


@dataclass(frozen=True)
class PartialMosaic(PartialGpu):
    """A generation's kernels as a PartialAttention, for bfloat16 and float16.

    fold: the query heads of a kv head are rows of the same tiles of the forward pass. kv_splits: parts of the keys that it works
    on separately, merged by their lse.
    """

    tiles: MosaicTiles = field(kw_only=True)
    fold: bool = field(default=False, kw_only=True)
    kv_splits: int = field(default=1, kw_only=True)
    generation: ClassVar[str]  # as in the names of its kernels
    lines: ClassVar[int]  # rows, or keys, of a warpgroup's tile
    title: ClassVar[str]
    kernels: ClassVar[Mapping[str, type[MosaicBlock]]]  # by pass

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """See PartialAttention."""
        folded = FoldedRows.of(self.layout, operands) if self.fold else None
        run = _Pass(self, static_args, operands, dynamic, "forward", folded)
        columns = self.value_columns or operands.value.shape[3]
        more = {} if operands.sinks is None else {"sinks": operands.sinks}
        if folded is not None:
            short = (0, 0), (0, run.of_rows[2] - folded.rows)
            more = {name: jnp.pad(folded.sinks(x), short) for name, x in more.items()}
        output, lse = (self._whole if self.kv_splits == 1 else self._merged)(run, more, operands.query.dtype)
        output, lse = lax.slice(output, (0,) * 4, (*run.query_shape[:3], columns)), lse[:, :, : run.rows]
        return (output, lse) if folded is None else (folded.output(output), folded.numbers(lse))

    def _whole(self, run: _Pass, more: dict[str, jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
        """(output in the layout, lse), both with padding."""
        shape = (*run.inputs["query"].shape[:3], run.dims[1])
        outputs = run.launch(more, {"output": (shape, dtype), "lse": (run.of_rows, jnp.float32)})
        return outputs["output"], outputs["lse"]

    def _merged(self, run: _Pass, more: dict[str, jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The same from parts of the keys, whose outputs are float32 [parts * batch, heads, rows, dim]."""
        batch, *of_rows = run.of_rows
        rows = (self.kv_splits * batch, *of_rows)
        outputs = run.launch(more, {"output": ((*rows, run.dims[1]), jnp.float32), "lse": (rows, jnp.float32)})
        parts = {name: x.reshape(self.kv_splits, batch, *x.shape[1:]) for name, x in outputs.items()}
        output, lse = merge_stacked(parts["output"], parts["lse"])
        output = output.astype(dtype)
        return output.swapaxes(1, 2) if self.layout == "bthd" else output, lse

    def gradients(
        self,
        static_args: StaticArgs,
        operands: Operands,
        dynamic: DynamicArgs,
        d_output: jax.Array,
        shift: jax.Array,
        delta: jax.Array,
    ) -> _Gradients:
        """See PartialGpu."""
        return _Gradients(self, static_args, operands, dynamic, d_output, shift, delta)


@dataclass(frozen=True)
class _Gradients:
    """See Gradients."""

    part: PartialMosaic
    static_args: StaticArgs
    operands: Operands
    dynamic: DynamicArgs
    d_output: jax.Array
    shift: jax.Array
    delta: jax.Array

    def of_query(self) -> jax.Array:
        """The gradient of the query."""
        (d_query,) = self._run("dq", {"d_query": ("query", self.operands.query)})
        return d_query

    def of_keys(self) -> tuple[jax.Array, jax.Array | None]:
        """The gradients of key and value."""
        given = {"key": self.operands.key, "value": self.operands.value}
        d_key, *d_value = self._run("dkv", {f"d_{name}": (name, x) for name, x in given.items() if x is not None})
        return d_key, d_value[0] if d_value else None

    def _run(self, which: str, of: dict[str, tuple[str, jax.Array]]) -> list[jax.Array]:
        run = _Pass(self.part, self.static_args, self.operands, self.dynamic, which)
        short = ((0, 0), (0, 0), (0, run.of_rows[2] - self.shift.shape[2]))
        more = {
            "d_output": run.padded(self.d_output, run.dims[1]),
            "lse": jnp.pad(self.shift, short, constant_values=jnp.inf),  # rows beyond the end have no weights
            "delta": jnp.pad(self.delta, short),
        }
        outputs = run.launch(more, {name: (run.inputs[x].shape, like.dtype) for name, (x, like) in of.items()})
        return [lax.slice(outputs[name], (0,) * 4, like.shape) for name, (_, like) in of.items()]


class _Pass:
    """One pass over the arrays. inputs: what each reads. dims: columns of keys and values. of_rows: the shape of an array with a
    number for each row of the tiles; rows: how many belong to a head. folded: how queries become rows, if they aren't them."""

    def __init__(
        self,
        part: PartialMosaic,
        static_args: StaticArgs,
        operands: Operands,
        dynamic: DynamicArgs,
        which: str,
        folded: FoldedRows | None = None,
    ) -> None:
        if static_args.score is not None:
            score, captures = by_distance(static_args.score, operands.captures)
            static_args, operands = replace(static_args, score=score), operands._replace(captures=captures)
        self.part, self.static_args, self.which, self.folded = part, static_args, which, folded
        self.sizes: MosaicSizes = getattr(part.tiles, which)
        mask, dropout = join_static(static_args, dynamic)
        key, value = operands.key, operands.value
        head, time = part.layout.index("h"), part.layout.index("t")
        self.group = operands.query.shape[head] // key.shape[head]
        scales = {"key_scale": operands.key_scale, "value_scale": operands.value_scale}
        seen = seen_keys(mask, key.shape[head], operands.of_keys)
        if seen is not None:  # the weights of hidden keys are 0, and 0 times NaN isn't
            value = None if value is None else zero_where_hidden(value, seen, part.layout)
            scales = {name: x if x is None else zero_where_hidden(x, seen, part.layout) for name, x in scales.items()}
            key = key if which == "forward" and value is not None else zero_where_hidden(key, seen, part.layout)
        if folded is not None:
            operands = folded.operands(operands, static_args.score)
        query = operands.query
        self.query_shape, self.rows = query.shape, query.shape[time]
        dim, in_key = query.shape[3], part.value_columns
        self.dims = padded_dim(dim), latent_columns(dim, in_key) if in_key else padded_dim(value.shape[3])
        self.heads, self.kv_heads = query.shape[head], key.shape[head]
        self.blocks = {
            "q": -(-self.rows // self.sizes.block_q),
            "kv": -(-key.shape[time] // self.sizes.block_kv),
        }
        self.slow = "kv" if which == "dkv" else "q"
        tables = self.heads if mask.heads_differ else 1
        # To the mask the rows of all heads of a group are one block.
        self.block_q = self.sizes.block_q if folded is None else folded.q_len
        asks = part.kernels[which].asks(self.sizes)
        self.table = tile_schedule(mask, self.block_q, self.sizes.block_kv, self.slow, tables, asks=asks)
        rows = self.blocks["q"] * self.sizes.block_q
        self.of_rows = query.shape[0], self.heads, rows
        self.inputs = {
            "query": self.padded(query, self.dims[0]), "key": self.padded(key, self.dims[0]),
            **({} if value is None else {"value": self.padded(value, self.dims[1])}),
            "schedule": jnp.asarray(self.table.table), **self._of_mask(mask, dropout, rows, tables),
        }  # fmt: skip
        for name, scale in scales.items():
            if scale is not None:
                self.inputs[name] = self._by_tiles(scale.astype(jnp.float32), ("batch", "heads", "kv"))
        by_name = {"key": key, "value": value}.items()
        self.stored = tuple((name, x.dtype.name) for name, x in by_name if x is not None and x.dtype.itemsize == 1)
        if operands.bias is not None:
            self.inputs["bias"] = self._by_tiles(operands.bias, _BY_PAIR)
        if static_args.score is not None:
            self.inputs |= self._of_score(static_args.score, operands.captures, mask)

    def launch(
        self, more: dict[str, jax.Array], outputs: dict[str, tuple[tuple[int, ...], Any]]
    ) -> dict[str, jax.Array]:
        """Run the pass's kernel, with more inputs."""
        part = self.part
        kernel = part.kernels[self.which](
            self.sizes,
            MosaicLogits(part.scale, part.soft_cap, self.static_args, part.interpret),
            self.table,
            part.layout,
            self.kv_heads if self.slow == "kv" else self.heads,
            self.group,
            self.blocks[self.slow],
            self.dims,
            part.interpret,
            part.kv_splits if self.which == "forward" else 1,
            None if self.folded is None else self.folded.q_len,
            part.value_columns is not None,
            self.stored,
        )
        blocks = self.inputs["query"].shape[0] * kernel.heads * kernel.blocks * kernel.splits * kernel.column_blocks
        name = f"attnops_{part.generation}_{self.which}"
        return launch(kernel, name, part.title, blocks, self.inputs | more, outputs)

    def padded(self, x: jax.Array, columns: int) -> jax.Array:
        """With that many columns and a multiple of 8 tokens, zeros after its own: TMA moves whole groups of 8."""
        short = [0, 0, 0, columns - x.shape[3]]
        time = self.part.layout.index("t")
        short[time] = -x.shape[time] % _GROUP
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, n, 0) for n in short]) if any(short) else x

    def _by_tiles(self, x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
        """An array padded to whole tiles. Those by query and key have the order of the pass's tiles."""
        block = {"q": self.sizes.block_q, "kv": self.sizes.block_kv}
        # Of four dimensions any may be 1 for all.
        alike = [n == 1 and len(dims) == 4 for n in x.shape]
        short = [0 if same else -n % block.get(dim, 1) for n, dim, same in zip(x.shape, dims, alike, strict=True)]
        x = jnp.pad(x, [(0, n) for n in short]) if any(short) else x
        return x.swapaxes(2, 3) if len(dims) == 4 and self.slow == "kv" else x

    def _of_score(self, score: Steps, captures: tuple[jax.Array, ...], mask: LocalMask) -> dict[str, jax.Array]:
        """What tiles read of a score's arrays."""
        rows_of = {read: step.rows for step in score.steps if isinstance(step, Diagonal) for read in step.reads}
        made: dict[str, Callable[[int, jax.Array], jax.Array]] = {
            "aligned": lambda number, x: self._by_tiles(x, _BY_PAIR),
            "diagonal": lambda number, x: self._diagonal(x, rows_of[number], mask),
            "table": lambda number, x: x,
            "columns": lambda number, x: self._columns(x),
        }
        forms = enumerate(zip(captures, score.forms, strict=True))
        return {f"capture{number}": made[form](number, x) for number, (x, form) in forms}

    def _diagonal(self, x: jax.Array, rows: int, mask: LocalMask) -> jax.Array:
        """A Diagonal's array [batch, heads, rows + keys - 1] as [batch, heads, lines, places]: a line of any tile is a run of it.

        Of folded rows, whose heads differ within a tile, as [batch, heads, q, kv]. What lies beyond an end is never seen.
        """

        def at(distance: np.ndarray) -> jax.Array:
            """Of a local key's number less a local row's."""
            return jnp.take(x, distance + (mask.k_start - mask.q_start + (rows - 1)), axis=2, mode="clip")

        if self.folded is not None:
            of_rows, of_keys = (np.arange(n, dtype=np.int32) for n in (self.folded.q_len, mask.kv_len))
            return self._by_tiles(self.folded.array(at(of_keys[None] - of_rows[:, None]), _BY_PAIR), _BY_PAIR)
        q, kv = (self.blocks[dim] * getattr(self.sizes, f"block_{dim}") for dim in ("q", "kv"))
        before, after = (kv, q) if self.slow == "kv" else (q, kv)
        places = np.arange(-before, after, dtype=np.int32)[None] - np.arange(self.part.lines, dtype=np.int32)[:, None]
        return at(-places if self.slow == "kv" else places)

    def _columns(self, x: jax.Array) -> jax.Array:
        """A Product's array [batch, heads, q, entries] as [batch, heads, entries, rows]: rows that are read together lie beside
        each other."""
        x = x if self.folded is None else self.folded.array(x, _BY_PAIR)
        short = -x.shape[2] % self.sizes.block_q if x.shape[2] > 1 else 0
        return jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))).swapaxes(2, 3)

    def _of_mask(self, mask: LocalMask, dropout: Dropout | None, rows: int, tables: int) -> dict[str, jax.Array]:
        """What tiles read of the mask and the dropout."""
        arrays = traced_numbers(mask, dropout, None)
        of_words = rows if self.folded is None else self.folded.q_len
        for number, leaf_words in enumerate(block_words(mask, self.block_q, self.sizes.block_kv, of_words, tables)):
            if leaf_words is not None:
                words = leaf_words.words if self.folded is None else self.folded.words(leaf_words.words)
                arrays[f"words{number}"] = jnp.pad(words, (*((0, 0),) * 4, (0, rows - words.shape[4])))
        for number, leaf in enumerate(mask.mask.split()[1]):
            if "q_blocks" in leaf.dims:
                continue  # in words
            x = jnp.asarray(leaf.array)
            x = x if self.folded is None else self.folded.array(x, leaf.dims)
            arrays[f"leaf{number}"] = self._by_tiles(x.astype(jnp.int8 if x.ndim == 4 else jnp.int32), leaf.dims)
        return arrays | self._of_spans(mask)

    def _of_spans(self, mask: LocalMask) -> dict[str, jax.Array]:
        """The spans of segment ids that are in order, where they are a part of the mask that keys have to pass."""
        arrays, unordered = dict[str, jax.Array](), None
        for one in numbered(mask.mask.conjuncts()):
            if one.part.kind != SegmentIds.kind:
                continue
            of_rows, of_keys = (jnp.asarray(x).astype(jnp.int32) for x in one.part.arrays())
            lines, columns, dim = (of_rows, of_keys, "q") if self.slow == "q" else (of_keys, of_rows, "kv")
            *bounds, rest = id_spans(lines, columns)
            for name, x in zip(bounds_of(one), bounds, strict=True):
                x = x if self.folded is None else self.folded.array(x, ("batch", dim))
                arrays[name] = self._by_tiles(x, ("batch", dim))
            unordered = rest if unordered is None else unordered | rest
        return arrays if unordered is None else arrays | {"unordered": unordered.astype(jnp.int32)}
