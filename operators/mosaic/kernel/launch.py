"""A pass of a kernel over arrays: passed to it by name, with the places that it needs."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....compat import varying_as
from ...kernels.derivatives import once
from ...kernels.varying import vary, varying
from .block import BLOCKS, WARPGROUPS, MosaicBlock

__all__ = ["launch"]

_COPIES = 16  # copies and products that the interpreter takes to run beside each other: more than a block issues before it waits


def launch(
    kernel: MosaicBlock,
    name: str,
    title: str,
    inputs: dict[str, jax.Array],
    outputs: dict[str, tuple[tuple[int, ...], Any]],
) -> dict[str, jax.Array]:
    """Run a kernel over its grid; returns the outputs, of these shapes and dtypes, by name. title: what an error calls it."""
    arrays = list(inputs.values())
    axes = varying(arrays)
    arrays = once([vary(x, axes) for x in arrays], title)
    scratch = kernel.scratch(inputs["query"].dtype)
    names = (*inputs, *outputs, *scratch)

    def body(*refs: Any) -> None:
        by_name: dict[str, Any] = {}
        for name, ref in zip(names, refs, strict=True):
            several = name.split()  # those that share a place
            by_name |= dict(zip(several, ref if len(several) > 1 else (ref,), strict=True))
        kernel(by_name)

    interpreted: dict[str, Any] = {}
    if kernel.interpret:
        interpreted["interpret"] = plgpu.InterpretGPUParams(  # type: ignore[attr-defined] # not in jax 0.10
            detect_races=True, num_tma_threads_per_device=_COPIES
        )
    run = plgpu.kernel(
        body,
        out_type=tuple(varying_as(arrays[0], *shape_and_dtype) for shape_and_dtype in outputs.values()),
        grid=(inputs["query"].shape[0] * kernel.heads * kernel.blocks * kernel.splits,),
        grid_names=(BLOCKS,),
        num_threads=kernel.warpgroups,
        thread_name=WARPGROUPS,
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **interpreted,
    )
    with jax.enable_x64(False):
        results = run(*arrays)
    # What a kernel of Mosaic GPU returns isn't known to vary over the axes of a shard_map, whatever its types say.
    return {name: vary(result, axes) for name, result in zip(outputs, results, strict=True)}
