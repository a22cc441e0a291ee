"""PartialMosaic: the kernels of a generation combined, with their gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ...flash.kernel.partial_gpu import PartialGpu
from ...flash.kernel.tile_schedule import tile_schedule
from ...kernels.block_words import block_words
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.operands import DynamicArgs, Operands, StaticArgs, join_static
from ...kernels.seen_keys import seen_keys, zero_where_hidden
from ...kernels.tile_mask import TileLogits, traced_numbers
from .block import MosaicBlock
from .launch import launch
from .mosaic_sizes import MosaicSizes, MosaicTiles, padded_dim

__all__ = ["PartialMosaic"]

_GROUP = 8  # rows that are swizzled together


@dataclass(frozen=True)
class PartialMosaic(PartialGpu):
    """A generation's kernels as a PartialAttention, for bfloat16 and float16."""

    tiles: MosaicTiles = field(kw_only=True)
    generation: ClassVar[str]  # as in the names of its kernels
    title: ClassVar[str]
    kernels: ClassVar[Mapping[str, type[MosaicBlock]]]  # by pass

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """See PartialAttention."""
        run = _Pass(self, static_args, operands, dynamic, "forward")
        query, value, time = operands.query, operands.value, self.layout.index("t")
        more = {} if operands.sinks is None else {"sinks": operands.sinks}
        shape = (*run.inputs["query"].shape[:3], run.dims[1])
        outputs = run.launch(more, {"output": (shape, query.dtype), "lse": (run.of_rows, jnp.float32)})
        output = lax.slice(outputs["output"], (0,) * 4, (*query.shape[:3], value.shape[3]))
        return output, outputs["lse"][:, :, : query.shape[time]]

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
        d_key, d_value = self._run(
            "dkv", {"d_key": ("key", self.operands.key), "d_value": ("value", self.operands.value)}
        )
        return d_key, d_value

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
    number for each row of the tiles."""

    def __init__(
        self, part: PartialMosaic, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, which: str
    ) -> None:
        self.part, self.static_args, self.which = part, static_args, which
        self.sizes: MosaicSizes = getattr(part.tiles, which)
        mask, dropout = join_static(static_args, dynamic)
        query, key, value = operands.query, operands.key, operands.value
        head, time = part.layout.index("h"), part.layout.index("t")
        seen = seen_keys(mask, key.shape[head], (key, value))
        if seen is not None:  # the weights of hidden keys are 0, and 0 times NaN isn't
            value = zero_where_hidden(value, seen, part.layout)
            key = key if which == "forward" else zero_where_hidden(key, seen, part.layout)
        self.dims = padded_dim(query.shape[3]), padded_dim(value.shape[3])
        self.heads, self.kv_heads = query.shape[head], key.shape[head]
        self.blocks = {
            "q": -(-query.shape[time] // self.sizes.block_q),
            "kv": -(-key.shape[time] // self.sizes.block_kv),
        }
        self.slow = "kv" if which == "dkv" else "q"
        tables = self.heads if mask.heads_differ else 1
        self.table = tile_schedule(mask, self.sizes.block_q, self.sizes.block_kv, self.slow, tables)
        rows = self.blocks["q"] * self.sizes.block_q
        self.of_rows = query.shape[0], self.heads, rows
        self.inputs = {
            "query": self.padded(query, self.dims[0]), "key": self.padded(key, self.dims[0]),
            "value": self.padded(value, self.dims[1]), "schedule": jnp.asarray(self.table.table),
            **self._of_mask(mask, dropout, rows, tables),
        }  # fmt: skip
        if operands.bias is not None:
            self.inputs["bias"] = self._by_tiles(operands.bias, ("batch", "heads", "q", "kv"))
        for number, x in enumerate(operands.captures):
            self.inputs[f"capture{number}"] = self._by_tiles(x, ("batch", "heads", "q", "kv"))

    def launch(
        self, more: dict[str, jax.Array], outputs: dict[str, tuple[tuple[int, ...], Any]]
    ) -> dict[str, jax.Array]:
        """Run the pass's kernel, with more inputs."""
        part = self.part
        kernel = part.kernels[self.which](
            self.sizes,
            TileLogits(part.scale, part.soft_cap, self.static_args),
            self.table,
            part.layout,
            self.kv_heads if self.slow == "kv" else self.heads,
            self.heads // self.kv_heads,
            self.blocks[self.slow],
            self.dims,
            part.interpret,
        )
        return launch(kernel, f"attnops_{part.generation}_{self.which}", part.title, self.inputs | more, outputs)

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

    def _of_mask(self, mask: LocalMask, dropout: Dropout | None, rows: int, tables: int) -> dict[str, jax.Array]:
        """What tiles read of the mask and the dropout."""
        arrays = traced_numbers(mask, dropout, None)
        words = block_words(mask, self.sizes.block_q, self.sizes.block_kv, rows, tables)
        arrays |= {f"words{number}": x.words for number, x in enumerate(words) if x is not None}
        for number, leaf in enumerate(mask.mask.split()[1]):
            if "q_blocks" in leaf.dims:
                continue  # in words
            x = jnp.asarray(leaf.array)
            arrays[f"leaf{number}"] = self._by_tiles(x.astype(jnp.int8 if x.ndim == 4 else jnp.int32), leaf.dims)
        return arrays
