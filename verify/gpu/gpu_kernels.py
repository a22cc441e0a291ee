"""gpu_kernels: the Pallas kernels of a program compiled for GPUs: registers, spills, shared memory, occupancy, inner loops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...devices import GpuSpec
from .cubin import CubinFunction, cubin_functions
from .launches import Launch, launches, program_name
from .mosaic_kernels import TARGET as MOSAIC
from .mosaic_kernels import mosaic_binaries, mosaic_function, mosaic_name
from .occupancy import Occupancy, occupancy
from .sass import TileLoop, converting_loops, disassembled, loading_loops, sum_loops, tile_loops
from .units import LoopBound, loop_bound

__all__ = ["GpuKernelUse", "GpuLoop", "gpu_kernels", "triton_names"]

_TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
_NAMED = re.compile(r' name = "([^"]+)", num_stages = \d+')


class GpuLoop(NamedTuple):
    """A loop over tiles, and what bounds it."""

    loop: TileLoop
    bound: LoopBound | None


@dataclass(frozen=True)
class GpuKernelUse:
    """A kernel of a program. What can't be read is None: everything but the name without cramjam, loops without nvdisasm.

    registers and stack_bytes (which holds spilled registers) are per thread, shared_bytes per block. loops: over tiles, of the
    warps that compute; loading: of those that load for them, if there are any; sum_loops: of those that correct sums in tensor
    memory, for each tile of all rows of the block; converting: of warpgroups that convert 8-bit keys and values, each its own.
    """

    name: str
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    blocks: int | None = None
    occupancy: Occupancy | None = None
    loops: tuple[GpuLoop, ...] | None = None
    loading: tuple[TileLoop, ...] = ()
    sum_loops: tuple[TileLoop, ...] = ()
    converting: tuple[TileLoop, ...] = ()

    @property
    def by_parts(self) -> bool:
        """Whether its warps leave something out of loops for parts of a tile."""
        return any(loop.loop.by_parts for loop in self.loops or ())

    @property
    def spills_in_loops(self) -> bool:
        """Whether registers are spilled in a loop, not once for all tiles of a block. Warps that load have time for it."""
        loops = (*(loop.loop for loop in self.loops or ()), *self.sum_loops, *self.converting)
        return any(loop.spills for loop in loops)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        loops = None
        if self.loops is not None:
            loops = [
                loop.loop._asdict()
                | ({} if loop.bound is None else {"unit_cycles": loop.bound.cycles, "bound": loop.bound.bound})
                for loop in self.loops
            ]
        occupied = None if self.occupancy is None else self.occupancy._asdict()
        helping = {
            name: [loop._asdict() for loop in getattr(self, name)] for name in ("loading", "sum_loops", "converting")
        }
        return vars(self) | {"occupancy": occupied, "loops": loops} | helping


def gpu_kernels(compiled: Any, text: str, spec: GpuSpec | None) -> tuple[GpuKernelUse, ...]:
    """The Pallas kernels of a compiled program, in program order. spec: the GPU's; without it there is no occupancy."""
    of_triton = iter(_of_triton(compiled, triton_names(text), spec))
    binaries = mosaic_binaries(compiled, _capability(spec)) if MOSAIC in text else {}
    found = []
    for target, after in _calls(text):
        if target == MOSAIC:
            name = mosaic_name(after)
            found += [] if name is None else [_of_mosaic(name, binaries.get(name, set()), spec)]
        elif _NAMED.search(after):
            found.append(next(of_triton))
    return tuple(found)


def _calls(text: str) -> Iterator[tuple[str, str]]:
    """(target, what follows up to the next call) of each call of a Pallas kernel in a program's text."""
    parts = re.split(f"({re.escape(_TRITON)}|{re.escape(MOSAIC)})", text)
    return zip(parts[1::2], parts[2::2], strict=True)


def _of_triton(compiled: Any, names: tuple[str, ...], spec: GpuSpec | None) -> tuple[GpuKernelUse, ...]:
    launched = launches(compiled) if names else ()
    named_launches = [launch for launch in launched or () if launch.name in names]
    if len(named_launches) != len(names):  # the file has another form: use only the text
        return tuple(GpuKernelUse(name) for name in names)
    uses: dict[Launch, GpuKernelUse] = {}
    for launch in named_launches:
        if launch not in uses:
            uses[launch] = _use(launch, spec)
    return tuple(uses[launch] for launch in named_launches)


def _of_mosaic(name: str, binaries: set[bytes], spec: GpuSpec | None) -> GpuKernelUse:
    """Its launch can't be read: the blocks and the shared memory aren't known. There are several binaries if calls of the same
    name differ; then which is which isn't known either."""
    if len(binaries) != 1:
        return GpuKernelUse(name)
    (binary,) = binaries
    function = mosaic_function(binary, _capability(spec))
    occupied = None
    if spec is not None and function.threads is not None:
        by_registers = occupancy(spec, function.registers, function.threads, 0)
        occupied = by_registers if by_registers.blocks == 1 else None  # shared memory can't make it fewer
    return GpuKernelUse(
        name,
        function.registers,
        function.stack_bytes,
        None,
        function.threads,
        None,
        occupied,
        *_loops(binary, spec, occupied),
    )


def triton_names(text: str) -> tuple[str, ...]:
    """The names of the Pallas kernels in a program's text."""
    names = []
    for target, after in _calls(text):
        if target == _TRITON and (named := _NAMED.search(after)):
            names.append(named[1])
    return tuple(names)


def _use(launch: Launch, spec: GpuSpec | None) -> GpuKernelUse:
    function = _function(launch, spec)
    if function is None:
        return GpuKernelUse(launch.name, threads=launch.threads, blocks=launch.blocks)
    shared = function.shared_bytes + launch.shared_bytes
    occupied = None if spec is None else occupancy(spec, function.registers, launch.threads, shared)
    loops = _loops(launch.cubin, spec, occupied)
    return GpuKernelUse(
        launch.name, function.registers, function.stack_bytes, shared, launch.threads, launch.blocks, occupied, *loops
    )


def _loops(
    cubin: bytes, spec: GpuSpec | None, occupied: Occupancy | None
) -> tuple[tuple[GpuLoop, ...] | None, tuple[TileLoop, ...], tuple[TileLoop, ...], tuple[TileLoop, ...]]:
    """(the loops of warps that compute, None if they can't be read; of those that load; that correct sums; that convert)."""
    text = disassembled(cubin)
    if text is None:
        return None, (), (), ()
    computing = tuple(
        GpuLoop(loop, None if spec is None or occupied is None else loop_bound(spec, loop, occupied.warps))
        for loop in tile_loops(text)
    )
    return computing, loading_loops(text), sum_loops(text), converting_loops(text)


def _capability(spec: GpuSpec | None) -> tuple[int, int]:
    return spec.capability if spec else (9, 0)


def _function(launch: Launch, spec: GpuSpec | None) -> CubinFunction | None:
    try:
        functions = cubin_functions(launch.cubin, _capability(spec))
    except ValueError:
        return None
    if len(functions) > 1:  # NVIDIA's linker adds some that check tensor memory
        functions = tuple(one for one in functions if program_name(one.name) == launch.name)
    return functions[0] if len(functions) == 1 else None
