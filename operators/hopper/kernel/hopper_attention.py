"""PartialHopper: the Hopper kernel forward, and the gradient of the kernels in Pallas' Triton flavour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....compat import varying_as
from ...flash.kernel.flash_attention import PartialFlash
from ...flash.kernel.tile_schedule import tile_schedule
from ...kernels.block_words import block_words
from ...kernels.derivatives import once
from ...kernels.local_mask import LocalMask
from ...kernels.operands import DynamicArgs, Operands, StaticArgs, join_static
from ...kernels.seen_keys import seen_keys, zero_where_hidden
from ...kernels.tile_mask import TileLogits, traced_numbers
from ...kernels.varying import vary, varying
from .forward import BLOCKS, WARPGROUPS, HopperForward
from .hopper_sizes import ROWS, HopperSizes, padded_dim

__all__ = ["NAME", "PartialHopper"]

NAME = "attnops_hopper_forward"
_SMALLEST = HopperSizes(ROWS, 16, 1)
_GROUP = 8  # rows that are swizzled together


@dataclass(frozen=True)
class PartialHopper(PartialFlash):
    """PartialFlash whose forward pass is the Hopper kernel, for bfloat16 and float16. `sizes` are those of the gradients."""

    tiles: HopperSizes = _SMALLEST

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """See PartialAttention."""
        mask, _ = join_static(static_args, dynamic)
        query, key, value = operands.query, operands.key, operands.value
        head, time = self.layout.index("h"), self.layout.index("t")
        seen = seen_keys(mask, key.shape[head], (key, value))
        if seen is not None:  # the weights of hidden keys are 0, and 0 times NaN isn't
            value = zero_where_hidden(value, seen, self.layout)
        dims = padded_dim(query.shape[3]), padded_dim(value.shape[3])
        tiles = self.tiles
        tables = query.shape[head] if mask.heads_differ else 1
        table = tile_schedule(mask, tiles.block_q, tiles.block_kv, "q", tables)
        q_blocks = -(-query.shape[time] // tiles.block_q)
        inputs = {
            "query": self._padded(query, dims[0]), "key": self._padded(key, dims[0]), "value": self._padded(value, dims[1]),
            "schedule": jnp.asarray(table.table), **self._of_mask(mask, q_blocks * tiles.block_q, tables),
        }  # fmt: skip
        if operands.sinks is not None:
            inputs["sinks"] = operands.sinks
        kernel = HopperForward(
            tiles,
            TileLogits(self.scale, self.soft_cap, static_args),
            table,
            self.layout,
            query.shape[head],
            query.shape[head] // key.shape[head],
            q_blocks,
            dims[1],
            self.interpret,
        )
        output, lse = self._run(kernel, inputs, dims)
        shape = list(query.shape[:3])
        return lax.slice(output, (0,) * 4, (*shape, value.shape[3])), lse[:, :, : query.shape[time]]

    def _padded(self, x: jax.Array, columns: int) -> jax.Array:
        """With that many columns and a multiple of 8 tokens, zeros after its own: TMA moves whole groups of 8."""
        short = [0, 0, 0, columns - x.shape[3]]
        time = self.layout.index("t")
        short[time] = -x.shape[time] % _GROUP
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, n, 0) for n in short]) if any(short) else x

    def _of_mask(self, mask: LocalMask, rows: int, tables: int) -> dict[str, jax.Array]:
        """What tiles read of the mask, padded to whole tiles."""
        arrays = traced_numbers(mask, None, None)
        block = {"q": self.tiles.block_q, "kv": self.tiles.block_kv}
        words = block_words(mask, self.tiles.block_q, self.tiles.block_kv, rows, tables)
        arrays |= {f"words{number}": x.words for number, x in enumerate(words) if x is not None}
        for number, leaf in enumerate(mask.mask.split()[1]):
            if "q_blocks" in leaf.dims:
                continue  # in words
            x = jnp.asarray(leaf.array).astype(jnp.int32)
            short = [-n % block.get(dim, 1) for n, dim in zip(x.shape, leaf.dims, strict=True)]
            arrays[f"leaf{number}"] = jnp.pad(x, [(0, n) for n in short]) if any(short) else x
        return arrays

    def _run(
        self, kernel: HopperForward, inputs: dict[str, jax.Array], dims: tuple[int, int]
    ) -> tuple[jax.Array, jax.Array]:
        """(output with padded columns and tokens, lse with padded rows)."""
        tiles, (dim, value_dim) = self.tiles, dims
        arrays = list(inputs.values())
        axes = varying(arrays)
        arrays = once([vary(x, axes) for x in arrays], self.title)
        query, rows = inputs["query"], kernel.q_blocks * tiles.block_q
        batch, heads = query.shape[0], kernel.heads
        shapes = {
            "output": varying_as(arrays[0], (*query.shape[:3], value_dim), query.dtype),
            "lse": varying_as(arrays[0], (batch, heads, rows), jnp.float32),
        }

        def places(*shape: int) -> Any:
            swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
            return plgpu.SMEM(shape, query.dtype, transforms=swizzled)

        scratch = {
            "query_tile": places(tiles.consumers, ROWS, dim),
            "key_tiles": places(tiles.stages, tiles.block_kv, dim),
            "value_tiles": places(tiles.stages, tiles.block_kv, value_dim),
            "lse_rows": plgpu.SMEM((tiles.consumers, ROWS), jnp.float32),
            "query_full": plgpu.Barrier(num_barriers=tiles.consumers),
        }
        for name in ("key", "value"):
            scratch[f"{name}_full"] = plgpu.Barrier(num_barriers=tiles.stages)
            scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=tiles.consumers, num_barriers=tiles.stages)
        if value_dim != dim:
            scratch["output_tile"] = places(tiles.consumers, ROWS, value_dim)
        names = (*inputs, *shapes, *scratch)
        interpreted: dict[str, Any] = {}
        if self.interpret:
            interpreted["interpret"] = plgpu.InterpretGPUParams(detect_races=True)  # type: ignore[attr-defined] # not in jax 0.10
        run = plgpu.kernel(
            lambda *refs: kernel(dict(zip(names, refs, strict=True))),
            out_type=tuple(shapes.values()),
            grid=(batch * heads * kernel.q_blocks,),
            grid_names=(BLOCKS,),
            num_threads=tiles.consumers + 1,
            thread_name=WARPGROUPS,
            scratch_types=list(scratch.values()),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name=NAME,
            **interpreted,
        )
        with jax.enable_x64(False):
            output, lse = run(*arrays)
        # What a kernel of Mosaic GPU returns isn't known to vary over the axes of a shard_map, whatever its types say.
        return vary(output, axes), vary(lse, axes)
