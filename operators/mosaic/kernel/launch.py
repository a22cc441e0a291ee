"""A kernel over arrays: passed to it by name, with the places that it needs."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....compat import varying_as
from ...kernels.derivatives import once
from ...kernels.varying import vary, varying
from .block import BLOCKS, WARPGROUPS, BlockOfThreads

__all__ = ["launch"]

_COPIES = 16  # copies and products that the interpreter takes to run beside each other: more than a block issues before it waits


def launch(
    kernel: BlockOfThreads,
    name: str,
    title: str,
    blocks: int,
    inputs: dict[str, jax.Array],
    outputs: dict[str, tuple[tuple[int, ...], Any]],
    written: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Run so many blocks of threads; returns the outputs, of these shapes and dtypes, by name. title: what an error calls the
    kernel. written: inputs that it writes in place; what they are then is returned too."""
    arrays = list(inputs.values())
    axes = varying(arrays)
    arrays = once([vary(x, axes) for x in arrays], title)
    # Written in place: XLA sees a call whose output takes the place of an operand.
    in_place: dict[str, Any] = {n: jax.new_ref(x) for n, x in zip(inputs, arrays, strict=True) if n in written}
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
        grid=(blocks,),
        grid_names=(BLOCKS,),
        num_threads=kernel.warpgroups,
        thread_name=WARPGROUPS,
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=kernel.across_warps),
        kernel_name=name,
        **interpreted,
    )
    with jax.enable_x64(False):
        results = run(*(in_place.get(n, x) for n, x in zip(inputs, arrays, strict=True)))
    # What a kernel of Mosaic GPU returns isn't known to vary over the axes of a shard_map, whatever its types say.
    made = dict(zip(outputs, results, strict=True)) | {name: jax.freeze(ref) for name, ref in in_place.items()}
    return {name: vary(result, axes) for name, result in made.items()}
