"""Static cycles of the GPU kernels: the stalls of their loops over tiles in the compiler's schedule, times the tiles.

Sums of different sizes compare kernels of one GPU. They are an estimate: waits for memory and for tensor cores aren't in them,
nor how many blocks of threads fill the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..devices import spec_of_kind
from ..distribution import with_extras
from ..errors import ConfigError
from ..masks import And, Full, Lengths, Mask, SegmentIds
from ..masks.static import SpanMask
from ..operators.paged.page_visits import KernelTiles
from ..planning import AttentionProblem, OperationConfig, PassSizes, Placement
from .devices import lowered_for, tracing_on
from .gpu.gpu_kernels import GpuKernelUse, gpu_kernels
from .gpu.gpu_mesh import described_gpus
from .gpu.part_regions import EVERY_PART, PartShares
from .local_call import LocalProblem

if TYPE_CHECKING:
    from ..operators.kernels.local_mask import LocalMask

__all__ = [
    "GpuCost",
    "compiled_kernels",
    "gpu_cost",
    "loop_tiles",
    "loop_turns",
    "part_shares",
    "same_splits",
    "step_cost",
]

_WARP = 32
_LEAST_SPILL = 16  # bytes
_WARPS_OF_GROUP = 4
_MOST_PARTS = 2**26  # of a mask, that are counted


class GpuCost(NamedTuple):
    """One device's part of a call: cycles for which warps stall, their share of a second on the whole GPU, and the most
    registers per thread and bytes of shared memory per block of any kernel. spills: which kernels spill registers, if any do.
    """

    stalls: int
    seconds: float
    registers: int
    shared_bytes: int
    spills: str | None


def gpu_cost(
    problem: AttentionProblem,
    placement: Placement,
    config: OperationConfig,
    passes: tuple[PassSizes, ...],
    kernels: tuple[GpuKernelUse, ...],
) -> GpuCost:
    """The cost of a pass's compiled kernels, with the sizes that they run with. Errors: ConfigError if a kernel's loops can't be
    read or told apart.
    """
    from ..operators.kernels.local_mask import LocalMask

    sizes: Any = config
    local, spec = placement.local, spec_of_kind(problem.device_kind)
    assert spec is not None
    stalls, registers, shared = 0.0, 0, 0
    spills: list[str] = []
    for size in passes:
        name = size.kernel
        kernel = _readable(name, kernels)
        assert kernel.loops is not None
        assert kernel.registers is not None
        spills += _spilled(name, kernel)
        folded = size.products == "forward" and bool(sizes.fold)
        block = (local.q_len if folded else size.block_q), size.block_kv
        offset = None if problem.dynamic_query_offset else problem.query_offset or 0
        heads = local.kv_heads if folded else local.q_heads
        tiles = loop_tiles(problem.mask, block, size.outer, local.q_len, local.kv_len, offset, heads, asks=size.asks)
        warps, by_block = (kernel.threads or 0) // _WARP - size.loading, sum(tiles)
        converted = _converted(kernel, tiles)
        warps -= _WARPS_OF_GROUP * (len(kernel.converting) // max(len(tiles), 1))
        turns, shares = loop_turns(tiles, size, problem.mask), EVERY_PART
        if kernel.by_parts and problem.mask.is_static and offset is not None:
            mask = LocalMask(problem.mask, 0, local.q_len, local.kv_len, offset)
            shares = part_shares(mask, block, size.part, heads, asks=size.asks)
        if size.loading and turns and len(kernel.loops) % len(turns) == 0:  # parts of the warps have loops of their own
            parts = len(kernel.loops) // len(turns)
            turns, warps = turns * parts, warps // (size.programs or parts)
        elif len(kernel.loops) == len(turns) + 1:  # the last one is for keys, values or scales that aren't finite
            turns = (*turns, 0.0)
        if len(kernel.loops) != len(turns):
            raise ConfigError(f"{name} has {len(kernel.loops)} loops where {len(turns)} are known")
        by_head = sum(loop.loop.mean(shares)[1] * count for loop, count in zip(kernel.loops, turns, strict=True))
        # A warpgroup corrects the sums of all rows of a block, tile by tile.
        of_sums = sum(loop.stall_cycles for loop in kernel.sum_loops) * by_block * _WARPS_OF_GROUP
        stalls += (by_head * warps + of_sums + converted) * heads * local.batch
        registers, shared = max(registers, kernel.registers), max(shared, kernel.shared_bytes or 0)
    seconds = stalls / (spec.issued_a_cycle * spec.cores * spec.clock)
    return GpuCost(round(stalls), seconds, registers, shared, "; ".join(spills) or None)


def _converted(kernel: GpuKernelUse, tiles: tuple[float, ...]) -> float:
    """Stalls of a head's tiles in warpgroups that convert keys and values, each with a loop for every loop over tiles. Errors:
    ConfigError if they can't be told apart."""
    groups, rest = divmod(len(kernel.converting), max(len(tiles), 1))
    if rest:
        raise ConfigError(f"{kernel.name} has {len(kernel.converting)} loops that convert, for {len(tiles)} over tiles")
    of_each = zip(kernel.converting, tiles * groups, strict=True)
    return _WARPS_OF_GROUP * sum(loop.stall_cycles * count for loop, count in of_each)


def step_cost(kind: str, visits: Mapping[str, KernelTiles], kernels: tuple[GpuKernelUse, ...]) -> GpuCost:
    """The cost of a step over pages, whose kernels go through so many tiles. Errors: ConfigError if a kernel's loops can't be
    read or told apart."""
    spec = spec_of_kind(kind)
    assert spec is not None
    stalls, registers, spills = 0.0, 0, list[str]()
    for name, tiles in visits.items():
        kernel = _readable(name, kernels)
        parts, rest = divmod(len(kernel.loops or ()), len(tiles.loops))  # of the warps, with loops of their own
        if not parts or rest or len(kernel.sum_loops) not in (0, len(tiles.loops)):
            raise ConfigError(f"{name} has {len(kernel.loops or ())} loops where {len(tiles.loops)} are known")
        by_tile = zip(kernel.loops or (), tiles.loops * parts, strict=True)
        stalls += tiles.warps / parts * sum(loop.loop.stall_cycles * count for loop, count in by_tile)
        of_sums = zip(kernel.sum_loops, tiles.loops, strict=False)
        stalls += _WARPS_OF_GROUP * sum(loop.stall_cycles * count for loop, count in of_sums)
        registers = max(registers, kernel.registers or 0)
        spills += _spilled(name, kernel)
    seconds = stalls / (spec.issued_a_cycle * spec.cores * spec.clock)
    shared = max((tiles.shared_bytes for tiles in visits.values()), default=0)
    return GpuCost(round(stalls), seconds, registers, shared, "; ".join(spills) or None)


def _spilled(name: str | None, kernel: GpuKernelUse) -> list[str]:
    """That a kernel spills registers in its loops, if it's more than a few, whose loads count as stalls like others."""
    size = kernel.stack_bytes or 0
    told = size >= _LEAST_SPILL and kernel.spills_in_loops
    return [f"{name} spills {size} bytes of registers per thread"] if told else []


def _readable(name: str | None, kernels: tuple[GpuKernelUse, ...]) -> GpuKernelUse:
    """The kernel of a name. Errors: ConfigError if its instructions can't be read."""
    kernel = next((use for use in kernels if use.name == name), None)
    if kernel is None or kernel.loops is None or kernel.registers is None:
        raise ConfigError(
            f"the instructions of {name} can't be read; pip install '{with_extras('cuda-compile', 'cuda-sass')}'."
        )
    return kernel


def compiled_kernels(kind: str, local: LocalProblem, part: str, fields: Mapping[str, Any]) -> tuple[GpuKernelUse, ...]:
    """The kernels of a call, or of its gradient, compiled for one GPU of a kind with some fields set. Raises what the compiler
    raises."""
    spec = spec_of_kind(kind)
    assert spec is not None
    mesh = described_gpus(spec.name)
    replicated = NamedSharding(mesh, PartitionSpec())
    function, shapes = local.program(fields, part, mesh)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated) for x in shapes]
    with tracing_on(mesh, "cuda"):
        lowered = lowered_for(jax.jit(function, out_shardings=replicated).trace(arrays), "cuda")
    compiled = lowered.compile()
    return gpu_kernels(compiled, compiled.as_text(), spec)


def loop_tiles(
    mask: Mask,
    block: tuple[int, int],
    slow: str,
    q_len: int,
    kv_len: int,
    query_offset: int | None,
    heads: int = 1,
    *,
    asks: bool = False,
) -> tuple[float, ...]:
    """The tiles of a head that each loop of a kernel goes through, in program order: without a mask, then with one.

    query_offset: None if it is traced. What is known only when the program runs counts as masked. heads: if they see blocks of
    their own, the mean of so many. asks: see PassSizes.
    """
    from ..operators.flash.kernel.tile_schedule import tile_schedule
    from ..operators.kernels.local_mask import LocalMask

    if not mask.is_static or query_offset is None:
        visible = mask.live_blocks(*block, q_len=q_len, kv_len=kv_len, query_offset=query_offset or 0) > 0
        return 0.0, float(visible.size if query_offset is None else visible.sum())
    local = LocalMask(mask, 0, q_len, kv_len, query_offset)
    schedule = tile_schedule(local, *block, slow, heads if local.heads_differ else 1, asks=asks)
    rows = np.asarray(schedule.table).reshape(-1, schedule.table.shape[-1])
    if schedule.neighbours:
        first, full_first, after_full, after = rows.T
        full, partial = after_full - full_first, full_first - first + after - after_full
    else:
        partial, full = rows[:, 0], rows[:, 1] - rows[:, 0]
    counts = (full, schedule.some_full), (partial, schedule.some_partial)
    return tuple(float(n.sum()) / schedule.table.shape[1] for n, some in counts if some)


def loop_turns(tiles: tuple[float, ...], size: PassSizes, mask: Mask) -> tuple[float, ...]:
    """Turns of the loops of a kernel's program, by the tiles of `loop_tiles`: with segment ids there is a last loop for ids that
    aren't in order, to which packed documents don't come."""
    by_ids = size.loading and any(part.kind == SegmentIds.kind for part in mask.conjuncts())
    return (*tiles, 0.0) if by_ids else tiles


def part_shares(
    mask: LocalMask, block: tuple[int, int], part: tuple[int, int], heads: int = 1, *, asks: bool = False
) -> PartShares:
    """Of the parts, so many rows and keys, of the tiles that a loop with a mask visits. heads, asks: see `loop_tiles`. Of too
    many all are taken as seen and cut.

    A row beyond the end isn't counted; a key there is one that no row sees. What isn't a span hides keys one by one, so that a
    warp doesn't know of it.
    """
    from ..operators.flash.kernel.tile_schedule import tile_schedule

    if not all(part):
        return EVERY_PART
    tables = heads if mask.heads_differ else 1
    size = min(part[0], block[0]), min(part[1], block[1])
    if tables * (mask.q_len // size[0]) * (mask.kv_len // size[1]) > _MOST_PARTS:
        return EVERY_PART
    schedule = tile_schedule(mask, *block, "q", tables, asks=asks)
    size = size[0], block[1] if schedule.asked else size[1]
    of_tiles = np.array(mask.kinds_of_heads(*block, tables))
    of_parts = np.array(replace(mask, mask=_spans(mask.mask)).kinds_of_heads(*size, tables))
    if mask.kv_len % size[1]:
        of_parts[..., -1] = np.minimum(of_parts[..., -1], 1)
    if mask.kv_len % block[1]:
        of_tiles[..., -1] = np.minimum(of_tiles[..., -1], 1)
    # Where few tiles are full or have a mask, full ones may have no loop of their own.
    visited = of_tiles == 1 if schedule.some_full else of_tiles > 0
    rows, keys = np.arange(of_parts.shape[2]) * size[0] // block[0], of_tiles.shape[3] * (block[1] // size[1])
    visited = visited[:, :, rows].repeat(block[1] // size[1], axis=3)
    kinds = np.pad(of_parts, ((0, 0), (0, 0), (0, 0), (0, keys - of_parts.shape[3])))[visited]
    return PartShares(float((kinds > 0).mean()), float((kinds == 1).mean())) if kinds.size else EVERY_PART


def _spans(mask: Mask) -> Mask:
    """The parts of a mask by which each row sees neighbouring keys."""
    from ..operators.kernels.block_words import is_blocks

    kinds = SegmentIds.kind, Lengths.kind
    spans = [part for part in mask.conjuncts() if isinstance(part, SpanMask) or is_blocks(part) or part.kind in kinds]
    return And(spans) if spans else Full()


def same_splits(candidates: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Candidates without `kv_splits`, or with the first one of them: how many programs share the keys isn't in the sums."""
    splits = next((way["kv_splits"] for way in candidates if "kv_splits" in way), None)
    return tuple(way for way in candidates if way.get("kv_splits", splits) == splits)
