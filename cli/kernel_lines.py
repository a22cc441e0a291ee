"""What `attnops verify` prints about a program's kernels: VMEM on a TPU; registers, shared memory and inner loops on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..distribution import with_extras
from ..planning.text import bytes_text
from ..verify.compiled import KernelUse
from ..verify.devices import AnyKernelUse
from ..verify.gpu.gpu_device import GpuDevice
from ..verify.gpu.gpu_kernels import GpuKernelUse, GpuLoop
from ..verify.gpu.part_regions import PartShares
from ..verify.gpu.sass import TileLoop
from ..verify.report import TargetReport

__all__ = ["kernel_limits", "kernel_lines"]

_UNREAD = "VMEM use and communication are not known: this jaxlib can't read programs of this libtpu"
_NO_FILE = f"registers, spills, shared memory and occupancy are not known without {with_extras('cuda-compile')}"
_NO_LOOPS = f"instructions of the inner loops are not known without {with_extras('cuda-sass')}"
_NO_SHAPE = "tensor-core time is not known: the instructions don't give the shape of a product"


def kernel_limits(report: TargetReport) -> str:
    """What a device provides for its kernels."""
    device = report.device
    if isinstance(device, GpuDevice):
        shared = bytes_text(device.shared_bytes)
        return f"{device.multiprocessors} multiprocessors, and {shared} of shared memory per block of threads"
    return f"a kernel {bytes_text(report.vmem_default)} of VMEM by default and {bytes_text(report.vmem_most)} at most"


def kernel_lines(
    report: TargetReport, kernels: Sequence[AnyKernelUse] | None, reported: Sequence[AnyKernelUse] = ()
) -> Iterator[str]:
    """Yield one or more lines for each kind of kernel, and say what isn't known. reported: GPU kernels already described, for
    which the name is enough."""
    if kernels is None:
        yield _UNREAD
        return
    missing = list[str]()
    for place, kernel in enumerate(kernels):
        if kernel in kernels[:place]:
            continue
        times = kernels.count(kernel)
        many = f", {times} times" if times > 1 else ""
        if isinstance(kernel, KernelUse):
            used = "an unknown part" if kernel.vmem_used is None else bytes_text(kernel.vmem_used)
            limit = report.vmem_default if kernel.vmem_limit is None else kernel.vmem_limit
            yield f"{kernel.name}: {used} of {bytes_text(limit)} of VMEM{many}"
        elif kernel in reported:
            yield f"{kernel.name}: as in the previous pass{many}"
        else:
            yield f"{kernel.name}: {_resources(kernel)}{many}"
            yield from (f"{kernel.name}: {_loop(loop)}" for loop in kernel.loops or ())
            yield from (
                f"{kernel.name}: loop that corrects sums, of {loop.instructions} instructions; {loop.stall_cycles} stall cycles"
                for loop in kernel.sum_loops
            )
            yield from (
                f"{kernel.name}: loop that converts, of {loop.instructions} instructions; {loop.stall_cycles} stall cycles"
                for loop in kernel.converting
            )
            yield from (f"{kernel.name}: {_loading(loop)}" for loop in kernel.loading)
            missing += _missing(kernel)
    yield from dict.fromkeys(missing)


def _resources(kernel: GpuKernelUse) -> str:
    if kernel.registers is None:
        return "compiled"
    spills = f"{kernel.stack_bytes} B per thread spilled" if kernel.stack_bytes else "none spilled"
    # A kernel of Mosaic GPU asks for its shared memory where it is launched, which can't be read.
    shared = "" if kernel.shared_bytes is None else f"{bytes_text(kernel.shared_bytes)} of shared memory per block of "
    text = f"{kernel.registers} registers per thread, {spills}; {shared or 'blocks of '}{kernel.threads} threads"
    if (occupancy := kernel.occupancy) is None:
        return text
    blocks = f"{occupancy.blocks} block{'s' if occupancy.blocks != 1 else ''}"
    return (
        f"{text}; a multiprocessor holds {blocks}, {occupancy.warps} of {occupancy.most_warps} warps, bound by "
        f"{' and '.join(occupancy.bound)}"
    )


def _loop(gpu_loop: GpuLoop) -> str:
    loop = gpu_loop.loop
    text = (
        f"inner loop of {loop.instructions} instructions, {loop.tensor} of tensor cores, {loop.ex2} of EX2; "
        f"{loop.stall_cycles} stall cycles"
    )
    if loop.by_parts:
        whole, hidden = (loop.mean(PartShares(seen, 0.0))[1] for seen in (1.0, 0.0))
        text += (
            f", {whole:.0f} of them where a warp's rows see the tile whole, {hidden:.0f} where they see nothing of it"
        )
    if gpu_loop.bound is None:
        return text
    cycles = ", ".join(f"{unit} {count:.0f}" for unit, count in gpu_loop.bound.cycles.items() if count is not None)
    qualifier = ", as far as is known" if None in gpu_loop.bound.cycles.values() else ""
    return f"{text}; bound by {gpu_loop.bound.bound}{qualifier} (cycles: {cycles})"


def _loading(loop: TileLoop) -> str:
    return (
        f"loop of the warps that load, of {loop.instructions} instructions, {loop.copies} of TMA; "
        f"{loop.stall_cycles} stall cycles"
    )


def _missing(kernel: GpuKernelUse) -> Iterator[str]:
    if kernel.registers is None:
        yield _NO_FILE
    elif kernel.loops is None:
        yield _NO_LOOPS
    elif any(loop.loop.tensor_flops is None for loop in kernel.loops):
        yield _NO_SHAPE
