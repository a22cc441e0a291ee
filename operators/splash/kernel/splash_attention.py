"""PartialSplash: the kernels combined, with their gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ...kernels.block_words import block_words
from ...kernels.blocking import Blocking
from ...kernels.dequantise import dequantised, quantised_gradients
from ...kernels.operands import DynamicArgs, Operands, Results, StaticArgs, join_static
from ...kernels.partial_attention import residual_names
from ...kernels.seen_keys import seen_keys
from ...vanilla.kernel.blockwise import blockwise_gradients
from .backward import add_key_gradients, add_query_gradient, backward_kernel, row_numbers
from .bias import bias_block, bias_kernel, bias_order, visited_bias
from .forward import forward_kernel, forward_outputs, forward_scratch
from .grid import KERNELS, Heads, Input, KernelGrid, Output
from .key_sums import add_key_sums
from .mapped import mapped_pass
from .schedule import tile_schedule
from .schedule_rules import broken_rule
from .score_gradients import add_capture_gradients, capture_blocks, capture_gradients, capture_kernel, sums_fit
from .score_tile import add_captures
from .splash_blocks import PassBlocks, SplashBlocks
from .tile import Logits, add_to_grid

__all__ = ["PartialSplash"]


@dataclass(frozen=True)
class PartialSplash:
    """These kernels as a PartialAttention.

    query [batch, heads, q, dim], key [batch, kv_heads, kv, dim], value [batch, kv_heads, kv, value_dim], of any lengths;
    bias broadcasts to [batch, heads, q, kv]; sinks float32 [heads]. Key and value may be int8 or fp8, unscaled or with
    scales, float32 [batch, kv_heads, kv]; the output has the query's dtype. interpret: True for Pallas' interpreter, or the
    parameters of the slow one that simulates a TPU's memory, for tests. tokens_first: write the output as [batch, q, heads *
    value_dim], for callers who swap heads and queries; value_dim is a multiple of 128, and the division is fused.

    value_columns: values are the first so many numbers of their keys, which aren't quantised; `value` is None, and its gradient a
    part of the key's. Fully masked rows give output 0, lse -inf (or that of the sink) and zero gradients.
    """

    scale: float
    soft_cap: float | None
    blocks: SplashBlocks
    platform: str
    interpret: bool | pltpu.InterpretParams
    residual_checkpoint_name: str | None
    tokens_first: bool = False
    value_columns: int | None = None
    layout: str = "bhtd"
    title: ClassVar[str] = KERNELS

    @property
    def names(self) -> tuple[str, str]:
        """See PartialAttention."""
        return residual_names(self.residual_checkpoint_name)

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """See PartialAttention."""
        return _forward(self, self._logits(static_args), operands, dynamic)

    def differentiate(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
    ) -> Operands:
        """See PartialAttention."""
        run: Callable[..., Operands] = functools.partial(_backward, self, self._logits(static_args))
        if self.blocks.dq is None:
            run = mapped_pass(run)
        return _of_quantised(operands, run(_dequantised(operands), dynamic, results))

    def _logits(self, static_args: StaticArgs) -> Logits:
        return Logits(self.scale, self.soft_cap, static_args, self.blocks.use_base2_exp)


def _dequantised(operands: Operands) -> Operands:
    """The operands with key and value in the query's dtype, without scales, as the backward kernels require."""
    dtype = operands.query.dtype
    key = dequantised(operands.key, operands.key_scale, "bhtd", dtype)
    value = operands.value
    value = None if value is None else dequantised(value, operands.value_scale, "bhtd", dtype)
    return operands._replace(key=key, value=value, key_scale=None, value_scale=None)


def _of_quantised(operands: Operands, gradients: Operands) -> Operands:
    """The gradients of the original operands, from those of the `_dequantised` ones."""
    key, key_scale = quantised_gradients(operands.key, operands.key_scale, gradients.key)
    value, value_scale = None, None
    if operands.value is not None:
        value, value_scale = quantised_gradients(operands.value, operands.value_scale, gradients.value)
    return gradients._replace(key=key, value=value, key_scale=key_scale, value_scale=value_scale)


class _KernelPass:
    """One pass's operands, padded to its blocks."""

    def __init__(
        self,
        part: PartialSplash,
        logits: Logits,
        operands: Operands,
        dynamic: DynamicArgs,
        sizes: PassBlocks,
        slow: str,
        kv_blocks: slice = slice(None),
        *,
        transposed: bool,
    ) -> None:
        blocks = part.blocks
        self.part, self.operands = part, operands
        batch, q_heads = operands.query.shape[:2]
        kv_heads = operands.key.shape[1]
        heads = Heads.tiled(kv_heads, q_heads // kv_heads, blocks.heads_per_tile)
        mask, dropout = join_static(logits.static_args, dynamic)
        tables = heads.kv_heads // heads.kv_tile if mask.heads_differ else 1
        block_q, block_kv = sizes.block_q, sizes.block_kv
        schedule = tile_schedule(mask, block_q, block_kv, slow, kv_blocks, tables, sizes.subtile)
        broken = broken_rule(schedule, slow)
        assert broken is None, broken
        self.grid = grid = KernelGrid(batch, heads, block_q, block_kv, schedule, slow)
        self.q_padded, self.kv_padded = (
            -(-n // b) * b for n, b in ((logits.static_args.q_len, block_q), (logits.static_args.kv_len, block_kv))
        )
        columns = part.value_columns
        self.dim, self.value_dim = operands.query.shape[-1], columns or operands.value.shape[-1]
        words = block_words(mask, block_q, block_kv, self.q_padded, tables)
        seen = seen_keys(mask, kv_heads, operands.of_keys)
        add_to_grid(grid, mask, words, operands.bias, dropout, seen)
        self.mask, score = mask, logits.static_args.score
        if score is not None:
            add_captures(grid, score, operands.captures, mask, reverse_diagonals=transposed)
        self.queries("query", operands.query, blocks.q_layout)
        if columns is not None:
            first = slice(columns)
            grid.value_view = (
                (slice(None), first) if blocks.k_layout == "seq_minor" else (slice(None), slice(None), first)
            )
        for name, x, layout in zip(("key", "value"), operands[1:3], blocks.layouts[1:], strict=True):
            if x is None:
                continue
            x = _rows_padded(x, self.kv_padded)
            array = x.swapaxes(-1, -2) if layout == "seq_minor" else x
            grid.inputs[name] = Input(array, grid.key_block(x.shape[-1], layout), "kv")
        for name, scale in (("key_scale", operands.key_scale), ("value_scale", operands.value_scale)):
            if scale is not None:
                rows = _rows_padded(scale[..., None], self.kv_padded).swapaxes(-1, -2)
                grid.inputs[name] = Input(rows, grid.key_block(1, "seq_minor"), "kv")

    def queries(self, name: str, x: jax.Array, layout: str) -> None:
        """Add an array of the queries' shape."""
        x = _rows_padded(x, self.q_padded)
        array = x.swapaxes(-1, -2) if layout == "seq_minor" else x
        self.grid.inputs[name] = Input(array, self.grid.query_block(x.shape[-1], layout), "q")

    def rows(self, name: str, x: jax.Array, fill: float) -> None:
        """Add one number per row, [batch, heads, q]."""
        numbers = row_numbers(x, fill, self.q_padded)
        self.grid.inputs[name] = Input(numbers, self.grid.row_block(), "q")

    def run(self, name: str, kernel: Any, parallel: int, depth: int) -> dict[str, jax.Array]:
        blocks = self.part.blocks
        return self.grid.run(
            name,
            kernel,
            parallel=parallel,
            cost=self.grid.cost(depth),
            vmem_limit_bytes=blocks.vmem_limit_bytes,
            scheduler=blocks.use_experimental_scheduler,
            interpret=self.part.interpret,
        )


def _rows_padded(x: jax.Array, length: int) -> jax.Array:
    """Pad [batch, heads, rows, dim] to a length."""
    short = length - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) if short else x


def _forward(
    part: PartialSplash, logits: Logits, operands: Operands, dynamic: DynamicArgs
) -> tuple[jax.Array, jax.Array]:
    blocks = part.blocks
    transposed = blocks.transposed_tiles
    kernel_pass = _KernelPass(part, logits, operands, dynamic, blocks.forward, "q", transposed=transposed)
    if operands.sinks is not None:
        kernel_pass.grid.scalars["sinks"] = operands.sinks
    normalised, tokens_first = blocks.fuse_reciprocal, part.tokens_first
    forward_outputs(
        kernel_pass.grid, kernel_pass.q_padded, kernel_pass.value_dim, operands.query.dtype, normalised, tokens_first
    )
    forward_scratch(kernel_pass.grid, kernel_pass.value_dim, transposed)
    kernel = functools.partial(
        forward_kernel,
        grid=kernel_pass.grid,
        logits=logits,
        compute=blocks.forward.subtile,
        compute_in=blocks.block_kv_compute_in,
        transposed=transposed,
        pipeline_depth=blocks.forward.pipeline_depth,
        layouts=blocks.layouts,
        normalised=normalised,
        sum_by_product=blocks.sum_by_product,
        tokens_first=tokens_first,
    )
    outputs = kernel_pass.run("attnops_splash_forward", kernel, 3, kernel_pass.dim + kernel_pass.value_dim)
    output = outputs["output"]
    if tokens_first:
        output = output.reshape(*output.shape[:2], kernel_pass.grid.heads.q_heads, kernel_pass.value_dim).swapaxes(1, 2)
    if not normalised:
        output = (output / outputs["divisor"].swapaxes(-1, -2)).astype(operands.query.dtype)
    rows = slice(logits.static_args.q_len)
    return output[:, :, rows], outputs["lse"][:, :, 0, rows]


def _backward(
    part: PartialSplash, logits: Logits, operands: Operands, dynamic: DynamicArgs, results: Results
) -> Operands:
    output, lse, d_output, d_lse = results
    blocks = part.blocks
    delta = (output.astype(jnp.float32) * d_output.astype(jnp.float32)).sum(-1) - d_lse
    # Rows without keys and padded rows have no weights: exp(x - inf) is 0.
    shift = jnp.where(lse == -jnp.inf, jnp.inf, lse * logits.exp_factor)

    def make(
        name: str,
        sizes: PassBlocks,
        of_query: bool,
        of_keys: bool,
        keys: slice = slice(None),  # those that the pass goes over
        before: dict[str, jax.Array] | None = None,  # the gradients after the pass over the keys before them
    ) -> dict[str, jax.Array]:
        block_kv, kv_len = sizes.block_kv, logits.static_args.kv_len
        first, end = (keys.start or 0) // block_kv, -(-min(keys.stop or kv_len, kv_len) // block_kv)
        goes_on = keys.stop is not None and keys.stop < kv_len
        slow, kv_blocks = "q" if of_query else "kv", slice(first, end)
        kernel_pass = _KernelPass(part, logits, operands, dynamic, sizes, slow, kv_blocks, transposed=True)
        grid = kernel_pass.grid
        kernel_pass.queries("d_output", d_output.astype(operands.query.dtype), "head_dim_minor")
        kernel_pass.rows("lse", shift, np.inf)
        kernel_pass.rows("delta", delta, 0.0)
        if of_query:
            dtype = jnp.float32 if goes_on else operands.query.dtype
            query_before = None if before is None else before["d_query"]
            add_query_gradient(
                grid, kernel_pass.q_padded, kernel_pass.dim, dtype, blocks.stationary_weights, query_before
            )
        dims = {"key": kernel_pass.dim, "value": kernel_pass.value_dim}
        if (columns := part.value_columns) is not None:
            del dims["value"]  # its gradient is summed in the key's
            first_columns = slice(columns)
            if of_keys:
                sums = (first_columns,) if blocks.stationary_weights else (slice(None), first_columns)
                grid.value_sum_view = (slice(None), *sums)
        of_sums = (operands.key.dtype, blocks.stationary_weights)
        if of_query and of_keys:
            add_key_sums(grid, range(first * block_kv, end * block_kv), dims, *of_sums, kernel_pass.kv_padded, before)
        elif of_keys:
            add_key_gradients(grid, kernel_pass.kv_padded, dims, *of_sums)
        kernel = functools.partial(
            backward_kernel,
            grid=grid,
            logits=logits,
            compute=sizes.subtile,
            pipeline_depth=sizes.pipeline_depth,
            layouts=blocks.layouts,
            stationary_weights=blocks.stationary_weights,
            first_block=first,
            query_scale=1.0 if goes_on else logits.scale,
            in_keys=columns is not None,
        )
        depth = (
            kernel_pass.dim
            + kernel_pass.value_dim
            + of_query * kernel_pass.dim
            + of_keys * (kernel_pass.dim + kernel_pass.value_dim)
        )
        return kernel_pass.run(f"attnops_splash_{name}", kernel, 3 if not of_keys else 2, depth)

    if blocks.dq is None:
        fused = functools.partial(make, sizes=blocks.dkv, of_query=True, of_keys=True)
        gradients = _in_parts(fused, blocks, logits.static_args.kv_len)
    else:
        gradients = make("dkv", blocks.dkv, False, True) | make("dq", blocks.dq, True, False)
    d_sinks = None
    if operands.sinks is not None:
        d_sinks = -(jnp.exp(operands.sinks[None, :, None] - shift / logits.exp_factor) * delta).sum((0, 2))
    d_bias = None
    if operands.bias is not None:
        d_bias = _bias_gradient(part, logits, operands, dynamic, results, shift, delta)
    captured: tuple[jax.Array, ...] = ()
    if operands.captures:
        captured = _capture_gradients(part, logits, operands, dynamic, results, shift, delta)
    return Operands(
        gradients["d_query"][:, :, : logits.static_args.q_len],
        gradients["d_key"][:, :, : logits.static_args.kv_len],
        None if "d_value" not in gradients else gradients["d_value"][:, :, : logits.static_args.kv_len],
        d_bias,
        d_sinks,
        captures=captured,
    )


def _one_head_pass(
    part: PartialSplash,
    logits: Logits,
    operands: Operands,
    dynamic: DynamicArgs,
    results: Results,
    shift: jax.Array,
    delta: jax.Array,
    sizes: PassBlocks,
) -> _KernelPass:
    """A pass over all tiles, a head at a time: what it sums takes more VMEM than all else."""
    alone = replace(part, blocks=replace(part.blocks, heads_per_tile=1))
    kernel_pass = _KernelPass(alone, logits, operands, dynamic, sizes, "q", transposed=False)
    kernel_pass.queries("d_output", results.d_output.astype(operands.query.dtype), "head_dim_minor")
    kernel_pass.rows("lse", shift, np.inf)
    kernel_pass.rows("delta", delta, 0.0)
    return kernel_pass


def _in_xla(
    part: PartialSplash, logits: Logits, operands: Operands, dynamic: DynamicArgs, results: Results
) -> Operands:
    """All gradients by the blockwise pass, for those that no kernel sums. The compiler drops the others."""
    blocking = Blocking(min(512, logits.static_args.q_len), min(512, logits.static_args.kv_len), 1)
    return blockwise_gradients(
        logits.static_args, operands, dynamic, results, scale=logits.scale, soft_cap=logits.soft_cap,
        platform=part.platform, blocking=blocking, value_columns=part.value_columns,
    )  # fmt: skip


def _capture_gradients(
    part: PartialSplash,
    logits: Logits,
    operands: Operands,
    dynamic: DynamicArgs,
    results: Results,
    shift: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, ...]:
    """The gradients of the score's arrays: by the kernel, or in XLA where the kernel can't sum them."""
    static_args = logits.static_args
    score = static_args.score
    assert score is not None
    if not sums_fit(score, operands.captures, static_args.q_len + static_args.kv_len):
        return _in_xla(part, logits, operands, dynamic, results).captures
    wide = operands.query.dtype.itemsize * operands.query.shape[-1] > 256
    sizes = capture_blocks(static_args.q_len, static_args.kv_len, wide)
    kernel_pass = _one_head_pass(part, logits, operands, dynamic, results, shift, delta, sizes)
    add_capture_gradients(kernel_pass.grid, score, kernel_pass.mask)
    kernel = functools.partial(
        capture_kernel, grid=kernel_pass.grid, logits=logits, compute=sizes.subtile, layouts=part.blocks.layouts
    )
    outputs = kernel_pass.run("attnops_splash_dcaptures", kernel, 3, kernel_pass.dim + kernel_pass.value_dim)
    return capture_gradients(outputs, kernel_pass.grid, score, operands.captures, kernel_pass.mask)


def _bias_gradient(
    part: PartialSplash,
    logits: Logits,
    operands: Operands,
    dynamic: DynamicArgs,
    results: Results,
    shift: jax.Array,
    delta: jax.Array,
) -> jax.Array:
    """The gradient of the bias: by the kernel, or in XLA where the kernel can't sum it."""
    blocks, bias = part.blocks, operands.bias
    assert bias is not None
    q_len, kv_len = logits.static_args.q_len, logits.static_args.kv_len
    block = bias_block(q_len), bias_block(kv_len)
    sizes = PassBlocks(*block, 256 if block[0] % 256 == 0 else block[0], block[1])
    kernel_pass = _one_head_pass(part, logits, operands, dynamic, results, shift, delta, sizes)
    grid = kernel_pass.grid
    order = bias_order(bias.shape, grid.schedule.rows, grid.schedule.tables)
    if order is None or not isinstance(grid.schedule.words, np.ndarray):
        gradient = _in_xla(part, logits, operands, dynamic, results).bias
        assert gradient is not None
        return gradient
    grid.order = order
    shape = grid.inputs["bias"].array.shape
    grid.outputs["d_bias"] = Output(shape, jnp.float32, grid.dense_block(shape))
    kernel = functools.partial(
        bias_kernel,
        grid=grid,
        logits=logits,
        compute=sizes.subtile,
        layouts=blocks.layouts,
    )
    outputs = kernel_pass.run(
        "attnops_splash_dbias", kernel, order.index("entry"), kernel_pass.dim + kernel_pass.value_dim
    )
    gradient = visited_bias(outputs["d_bias"], grid)
    return gradient.reshape(*bias.shape[:2], *gradient.shape[3:])[:, :, :q_len, :kv_len].astype(bias.dtype)


def _in_parts(make: Callable[..., dict[str, jax.Array]], blocks: SplashBlocks, kv_len: int) -> dict[str, jax.Array]:
    """The fused backward pass over parts of the keys, one after another: VMEM holds the sums of one part at a time."""
    part = blocks.block_kv_dkv_sums or kv_len
    gradients = None
    for start in range(0, kv_len, part):
        name = "backward" if start == 0 else f"backward_{start}"
        gradients = make(name, keys=slice(start, start + part), before=gradients)
    assert gradients is not None
    return gradients
