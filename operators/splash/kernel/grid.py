"""KernelGrid: what a pass passes to Pallas: scalars, blocks and their places for each step of the grid."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....compat import varying_as
from ...kernels.derivatives import once
from ...kernels.varying import vary, varying
from .mapped import mapped_grid
from .schedule import TileSchedule, kv_block_of, q_block_of

__all__ = ["KERNELS", "Heads", "Input", "KernelGrid", "Output", "Step", "padded"]

KERNELS = "splash's kernels"  # in an error


@dataclass(frozen=True)
class Heads:
    """How heads are arranged in tiles: `kv_tile` kv heads with `group_tile` of their `group` query heads each."""

    kv_heads: int
    group: int
    kv_tile: int
    group_tile: int

    @classmethod
    def tiled(cls, kv_heads: int, group: int, heads_per_tile: int) -> Heads:
        """Tiles of `heads_per_tile` query heads: a part of a group, or whole groups."""
        return cls(kv_heads, group, max(1, heads_per_tile // group), min(group, heads_per_tile))

    @property
    def q_heads(self) -> int:
        """All query heads."""
        return self.kv_heads * self.group

    @property
    def in_tile(self) -> tuple[tuple[int, int], ...]:
        """(kv head, query head of its group) of a tile."""
        return tuple((j, g) for j in range(self.kv_tile) for g in range(self.group_tile))


class Step(NamedTuple):
    """A step of the grid: batch row, tile of kv heads, tile of a group, and the schedule's entry: a place and flags, packed."""

    batch: Any
    kv_tile: Any
    group_tile: Any
    entry: Any

    @property
    def q_block(self) -> Any:
        return q_block_of(self.entry)

    @property
    def kv_block(self) -> Any:
        return kv_block_of(self.entry)


class Input(NamedTuple):
    """An array, its block, and what the block's place depends on besides heads: 'q', 'kv', 'both' or 'none'."""

    array: Any
    spec: pl.BlockSpec
    axis: str

    def bytes_moved(self, slow: str, steps: int) -> int:
        """Bytes read of it: one block per step, or each of its blocks once if it moves only with the slow axis."""
        size = self.array.dtype.itemsize
        if self.spec.block_shape is None:  # it stays in HBM
            return 0
        if self.axis == slow:
            return math.prod(self.array.shape) * size
        return steps * math.prod(n for n in self.spec.block_shape if n is not None) * size  # type: ignore[misc]


class Output(NamedTuple):
    """An output's shape, dtype and block, and the share of it that a pass writes."""

    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec
    share: float = 1.0

    @property
    def bytes_written(self) -> int:
        return round(math.prod(self.shape) * np.dtype(self.dtype).itemsize * self.share)


def padded(x: jax.Array, blocks: dict[int, int]) -> jax.Array:
    """Pad axes to a multiple of these sizes."""
    short = [(0, -n % blocks.get(i, 1)) for i, n in enumerate(x.shape)]
    return jnp.pad(x, short) if any(n for _, n in short) else x


class KernelGrid:
    """Collects the arrays of a pass, then runs its kernel.

    Dimensions of the grid, `order`: batch, tiles of kv heads, then tiles of a group and entries of the schedule. If these go by
    kv block (`slow` is 'kv') the last two are swapped, so that all query heads of a group visit a kv block before the next one.
    A pass that sums over heads or batch rows has these after the entries.
    """

    def __init__(
        self, batch: int, heads: Heads, block_q: int, block_kv: int, schedule: TileSchedule, slow: str
    ) -> None:
        self.batch, self.heads, self.block_q, self.block_kv = batch, heads, block_q, block_kv
        self.schedule, self.slow = schedule, slow
        last = ("entry", "group_tile") if slow == "kv" else ("group_tile", "entry")
        self.order: tuple[str, ...] = ("batch", "kv_tile", *last)
        self.scalars: dict[str, Any] = {"schedule": jnp.asarray(schedule.words)}
        self.inputs: dict[str, Input] = {}
        self.outputs: dict[str, Output] = {}
        self.scratch: dict[str, Any] = {}
        self.aliased: dict[str, str] = {}  # inputs whose memory an output takes over
        self.capture_shapes: tuple[tuple[int, ...], ...] = ()  # of the arrays that a score's steps read
        self.value_view: tuple[slice, ...] | None = None  # where values are a part of keys, the index of theirs
        self.value_sum_view: tuple[slice, ...] | None = None

    # -- where a step is ---------------------------------------------------------------------------------------------

    def step(self, ids: tuple[Any, ...], words: Any) -> Step:
        """The step at these indices of the grid."""
        batch, kv_tile, group_tile, entry = (
            ids[self.order.index(name)] for name in ("batch", "kv_tile", "group_tile", "entry")
        )
        schedule = self.schedule
        place = entry if schedule.tables == 1 else kv_tile * schedule.length + entry
        place = place if schedule.rows == 1 else batch * (schedule.tables * schedule.length) + place
        return Step(batch, kv_tile, group_tile, words[place])

    def here(self, refs: dict[str, Any]) -> Step:
        """The step at which the kernel is."""
        return self.step(tuple(pl.program_id(i) for i in range(4)), refs["schedule"])

    def begins_sum(self) -> Any:
        """Whether a step is the first at its entry, in a pass that sums over what comes after entries in the grid."""
        summed = range(self.order.index("entry") + 1, len(self.order))
        return functools.reduce(operator.and_, (pl.program_id(i) == 0 for i in summed), True)

    def block(self, shape: tuple[int | None, ...], where: Callable[[Step], tuple[Any, ...]]) -> pl.BlockSpec:
        """A block whose place depends on the step."""
        return pl.BlockSpec(shape, lambda *args: where(self.step(args[:4], args[4])))

    def _tile_of_heads(self, s: Step) -> Any:
        """The number of a step's tile among those of all query heads. These stay in one axis: if it is split into kv heads and
        groups, XLA no longer makes tensors in the kernel's order, but copies them.
        """
        return s.kv_tile * (self.heads.group // self.heads.group_tile) + s.group_tile

    def query_block(self, dim: int, layout: str) -> pl.BlockSpec:
        """A block of [batch, heads, q, dim], or with q and dim swapped."""
        heads = (None, len(self.heads.in_tile))
        if layout == "seq_minor":
            return self.block((*heads, dim, self.block_q), lambda s: (s.batch, self._tile_of_heads(s), 0, s.q_block))
        return self.block((*heads, self.block_q, dim), lambda s: (s.batch, self._tile_of_heads(s), s.q_block, 0))

    def token_block(self, dim: int) -> pl.BlockSpec:
        """A block of [batch, q, heads * dim]."""
        return self.block(
            (None, self.block_q, len(self.heads.in_tile) * dim), lambda s: (s.batch, s.q_block, self._tile_of_heads(s))
        )

    def key_block(self, dim: int, layout: str) -> pl.BlockSpec:
        """A block of [batch, kv heads, kv, dim], or with kv and dim swapped."""
        if layout == "seq_minor":
            return self.block(
                (None, self.heads.kv_tile, dim, self.block_kv), lambda s: (s.batch, s.kv_tile, 0, s.kv_block)
            )
        return self.block((None, self.heads.kv_tile, self.block_kv, dim), lambda s: (s.batch, s.kv_tile, s.kv_block, 0))

    def row_block(self) -> pl.BlockSpec:
        """One number per query row, of [batch, heads, 1, q]: the rows lie along the lanes."""
        shape = (None, len(self.heads.in_tile), 1, self.block_q)
        return self.block(shape, lambda s: (s.batch, self._tile_of_heads(s), 0, s.q_block))

    def leaf_block(self, batch: int, along: Literal["q", "kv"]) -> pl.BlockSpec:
        """One number per query row or key, of [batch | 1, 1, length]."""
        size = self.block_q if along == "q" else self.block_kv
        return self.block(
            (None, 1, size),
            lambda s: (s.batch if batch > 1 else 0, 0, s.q_block if along == "q" else s.kv_block),
        )

    def dense_block(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """A block of [batch, kv heads, group, q, kv]; a size of 1 applies to all."""
        many = [n > 1 for n in shape]
        sizes = (self.heads.kv_tile, self.heads.group_tile, self.block_q, self.block_kv)

        def where(s: Step) -> tuple[Any, ...]:
            at = (s.batch, s.kv_tile, s.group_tile, s.q_block, s.kv_block)
            return tuple(i if yes else 0 for i, yes in zip(at, many, strict=True))

        return self.block((None, *(n if yes else 1 for n, yes in zip(sizes, many[1:], strict=True))), where)

    def words_block(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """A block of [batch, kv heads, group, kv blocks, words, q]; a size of 1 among the first three applies to all."""
        many = [n > 1 for n in shape[:3]]
        sizes = (self.heads.kv_tile if many[1] else 1, self.heads.group_tile if many[2] else 1)

        def where(s: Step) -> tuple[Any, ...]:
            at = (i if yes else 0 for i, yes in zip((s.batch, s.kv_tile, s.group_tile), many, strict=True))
            return (*at, s.kv_block, 0, s.q_block)

        return self.block((None, *sizes, None, shape[4], self.block_q), where)

    def head_block(self, shape: tuple[int, ...], **along: int) -> pl.BlockSpec:
        """A block of [batch | 1, heads | 1, ...], of the tile's heads; along: the axes of queries (`q`) and keys (`kv`)."""
        sizes = list(shape[1:])
        sizes[0] = len(self.heads.in_tile) if shape[1] > 1 else 1
        for name, axis in along.items():
            sizes[axis - 1] = self.block_q if name == "q" else self.block_kv

        def where(s: Step) -> tuple[Any, ...]:
            at = [0] * len(shape)
            at[:2] = s.batch if shape[0] > 1 else 0, self._tile_of_heads(s) if shape[1] > 1 else 0
            for name, axis in along.items():
                at[axis] = s.q_block if name == "q" else s.kv_block
            return tuple(at)

        return self.block((None, *sizes), where)

    def add_of_heads(self, name: str, array: jax.Array, **along: int) -> None:
        """Add such an array, padded to whole blocks along these axes."""
        blocks = {axis: self.block_q if of == "q" else self.block_kv for of, axis in along.items()}
        array = padded(array, blocks)
        self.inputs[name] = Input(array, self.head_block(array.shape, **along), *along or (self.slow,))

    def add_dense(self, name: str, array: jax.Array) -> None:
        """Add an array [batch, heads, q, kv], any of them 1."""
        array = self.by_group(array)
        self.inputs[name] = Input(array, self.dense_block(array.shape), "both")

    def by_group(self, x: jax.Array) -> jax.Array:
        """[batch, heads, q, kv], each of them or 1, as [batch, kv heads, group, q, kv], padded."""
        batch, heads, q_len, kv_len = x.shape
        split = (1, 1) if heads == 1 else (self.heads.kv_heads, self.heads.group)
        x = x.reshape(batch, *split, q_len, kv_len)
        return padded(x, {i: n for i, n in ((3, self.block_q), (4, self.block_kv)) if x.shape[i] > 1})

    # -- the call ----------------------------------------------------------------------------------------------------

    def run(
        self,
        name: str,
        kernel: Callable[[dict[str, Any]], None],
        *,
        parallel: int,
        cost: pl.CostEstimate,
        vmem_limit_bytes: int | None,
        scheduler: bool,
        interpret: bool | pltpu.InterpretParams,
    ) -> dict[str, jax.Array]:
        """Run the kernel over the grid, whose first `parallel` dimensions may run in any order; returns the outputs by name."""
        arrays = [*self.scalars.values(), *(x.array for x in self.inputs.values())]
        axes = varying(arrays)
        arrays = once([vary(jnp.asarray(x), axes) for x in arrays], KERNELS)
        names = (*self.scalars, *self.inputs, *self.outputs, *self.scratch)
        heads = self.heads
        sizes = {
            "batch": self.batch,
            "kv_tile": heads.kv_heads // heads.kv_tile,
            "group_tile": heads.group // heads.group_tile,
        }
        out_shape = [varying_as(arrays[0], x.shape, x.dtype) for x in self.outputs.values()]
        call = lambda covered: pl.pallas_call(  # noqa: E731
            lambda *refs: kernel(self._with_views(dict(zip(names, refs, strict=True)))),
            out_shape=out_shape,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=tuple((sizes | {"entry": covered})[name] for name in self.order),
                in_specs=[x.spec for x in self.inputs.values()],
                out_specs=[x.spec for x in self.outputs.values()],
                scratch_shapes=list(self.scratch.values()),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=(pltpu.PARALLEL,) * parallel + (pltpu.ARBITRARY,) * (4 - parallel),
                vmem_limit_bytes=vmem_limit_bytes,
                flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True} if scheduler else None,
            ),
            input_output_aliases={
                len(self.scalars) + list(self.inputs).index(source): list(self.outputs).index(target)
                for source, target in self.aliased.items()
            },
            cost_estimate=cost,
            interpret=interpret,
            name=name,
        )
        # With jax_enable_x64 a Python number among the indices would be 64-bit, which Mosaic lacks. Inputs and outputs
        # have 32 bits or fewer.
        with jax.enable_x64(False):
            covered = self.schedule.covered
            if isinstance(covered, int):
                results = call(covered)(*arrays)
            else:
                results = mapped_grid(lambda n, *arrays: call(n)(*arrays), len(self.scalars))(covered, *arrays)
        return dict(zip(self.outputs, results, strict=True))

    def _with_views(self, refs: dict[str, Any]) -> dict[str, Any]:
        """With values, and their sums, that are parts of the keys' and aren't loaded or kept by themselves."""
        if self.value_view is not None:
            refs["value"] = refs["key"].at[self.value_view]
        if self.value_sum_view is not None:
            refs["value_sum"] = refs["key_sum"].at[self.value_sum_view]
        return refs

    def cost(self, dims: int) -> pl.CostEstimate:
        """The work of the live tiles; `dims` is the summed depth of a weight's products."""
        steps = self.schedule.covered if isinstance(self.schedule.covered, int) else self.schedule.length
        heads = self.batch * self.heads.kv_heads * self.heads.group
        weights = round(heads * self.schedule.tiles * self.block_q * self.block_kv)
        tiles = self.batch * self.heads.kv_heads * self.heads.group // len(self.heads.in_tile)
        moved = sum(x.bytes_moved(self.slow, tiles * steps) for x in self.inputs.values())
        moved += sum(x.bytes_written for x in self.outputs.values())
        return pl.CostEstimate(flops=2 * weights * dims, transcendentals=weights, bytes_accessed=moved)
