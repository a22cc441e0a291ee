"""tile_loops and others: the loops over tiles of a compiled GPU kernel, from the text of NVIDIA's disassembler."""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .instructions import Instruction, instructions_of
from .part_regions import PartShares, of_turn

__all__ = [
    "TileLoop",
    "converting_loops",
    "disassembled",
    "disassembler",
    "loading_loops",
    "sum_loops",
    "tile_loops",
]

_EXPONENTIAL = re.compile(r"MUFU\.EX2")
_TENSOR = re.compile(r"(?P<kind>[HI]MMA|[HIQ]GMMA|UTC[A-Z]*MMA)\b")
_READ, _WRITTEN = re.compile("LDTM"), re.compile("STTM")  # of tensor memory
_COPY = re.compile(r"UTMALDG|UBLKCP")  # by TMA, of a tensor or of bytes
_SPILLED = re.compile("LDL|STL")  # to a thread's memory
_FROM_SHARED, _TO_SHARED = re.compile("LDS"), re.compile("STSM?")
_WIDENED = re.compile(r"I2F|HADD2|F2FP\.F16\.E[45]M[23]")  # numbers of 8 bits to 16 or 32
_OF_WARP = {"884": 8 * 8 * 4, "1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32}
_OF_GROUP = re.compile(r"\.(\d+)x(\d+)x(\d+)")
_WARPS_OF_GROUP = 4
# Float32 work of a lane, packed instructions counting twice, as in the guide's rate for additions and multiplications.
_FLOAT32 = {"FADD": 1, "FMUL": 1, "FFMA": 1, "FADD2": 2, "FMUL2": 2, "FFMA2": 2}
_SECONDS = 60


class TileLoop(NamedTuple):
    """One turn of a loop, for one warp: its instructions, those of the tensor cores, and exponentials (EX2), in the code's
    counts.

    tensor_flops: in units of 16-bit products; TF32 counts twice and 8-bit half; None where the instructions don't show the shape
    of their product. float32: additions, multiplications and fused ones per lane. stall_cycles: the sum of the instructions'
    waits in the compiler's schedule, without waits for memory. copies: to shared memory by TMA. spills: registers that are
    written to memory or read from there.

    All of these are of a turn in which a warp's rows see something of each part of the tile, and all of none. seen_instructions
    and seen_stalls: what is left out for all parts that they don't see, less what is done instead; cut_instructions and
    cut_stalls: what is left out for those that they see whole. 0 where a warp doesn't look at parts.
    """

    instructions: int
    tensor: int
    tensor_flops: float | None
    ex2: int
    float32: int
    stall_cycles: int
    copies: int = 0
    spills: int = 0
    seen_instructions: int = 0
    seen_stalls: int = 0
    cut_instructions: int = 0
    cut_stalls: int = 0

    @property
    def by_parts(self) -> bool:
        """Whether a warp leaves something out of it for parts of the tile."""
        return self.seen_instructions != 0 or self.cut_instructions != 0

    def mean(self, shares: PartShares) -> tuple[float, float]:
        """(instructions, stall cycles) of a mean turn."""
        hidden, uncut = 1 - shares.seen, 1 - shares.cut
        return (
            self.instructions - hidden * self.seen_instructions - uncut * self.cut_instructions,
            self.stall_cycles - hidden * self.seen_stalls - uncut * self.cut_stalls,
        )


def disassembler() -> str | None:
    """The program nvdisasm: from the wheel nvidia-cuda-nvdisasm, else from the path; None if there is none."""
    package = importlib.util.find_spec("nvidia")
    for folder in [] if package is None else package.submodule_search_locations or []:
        for program in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(program)
    return shutil.which("nvdisasm")


def disassembled(cubin: bytes) -> str | None:
    """The text of a binary with its instructions' words; None without nvdisasm, or if it doesn't know the binary."""
    program = disassembler()
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            run = subprocess.run([program, "-c", "-hex", str(path)], capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
    return run.stdout if run.returncode == 0 else None


def tile_loops(text: str) -> tuple[TileLoop, ...]:
    """The innermost loops with exponentials, in program order: the loops of a softmax over tiles."""
    return _inner_loops(text, lambda body: _some(body, _EXPONENTIAL))


def loading_loops(text: str) -> tuple[TileLoop, ...]:
    """The innermost loops with copies by TMA and without exponentials, in program order: those of warps that load for others."""
    return _inner_loops(text, lambda body: _some(body, _COPY) and not _some(body, _EXPONENTIAL))


def converting_loops(text: str) -> tuple[TileLoop, ...]:
    """The innermost loops that read shared memory, widen numbers and write them there, without exponentials and copies, in
    program order: those of warps that convert keys and values for others."""
    return _inner_loops(
        text,
        lambda body: (
            all(_some(body, kind) for kind in (_FROM_SHARED, _WIDENED, _TO_SHARED))
            and not any(_some(body, kind) for kind in (_COPY, _EXPONENTIAL))
        ),
    )


def sum_loops(text: str) -> tuple[TileLoop, ...]:
    """The innermost loops that read and write tensor memory without exponentials and products: those of warps that correct sums
    there. A wait whose code lies behind all loops branches back over products too."""
    return _inner_loops(
        text,
        lambda body: (
            all(_some(body, kind) for kind in (_READ, _WRITTEN))
            and not any(_some(body, kind) for kind in (_EXPONENTIAL, _TENSOR))
        ),
    )


def _some(body: list[Instruction], kind: re.Pattern[str]) -> bool:
    return any(kind.match(instruction.name) for instruction in body)


def _inner_loops(text: str, wanted: Callable[[list[Instruction]], bool]) -> tuple[TileLoop, ...]:
    instructions, labels = instructions_of(text)
    targets = [instruction.target(labels) for instruction in instructions]
    spans = {(target, at + 1) for at, target in enumerate(targets) if target is not None and target <= at}
    # A branch back out of code behind the loops, such as a wait for a barrier, is no loop: it begins within one.
    loops = [span for span in sorted(spans) if not any(o[0] < span[0] < o[1] < span[1] for o in spans)]
    found = [span for span in loops if wanted(instructions[slice(*span)])]
    inner = [span for span in found if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in found)]
    return tuple(_loop(instructions, targets, *span) for span in inner)


def _loop(instructions: list[Instruction], targets: list[int | None], start: int, end: int) -> TileLoop:
    whole = instructions[start:end]
    weights = of_turn(whole, [None if at is None or not start <= at < end else at - start for at in targets[start:end]])
    body = [instruction for instruction, weight in zip(whole, weights, strict=True) if weight.all_cut]
    names = collections.Counter(instruction.name for instruction in body)
    tensor = {name: times for name, times in names.items() if _TENSOR.match(name)}
    flops = [(_product(name), times) for name, times in tensor.items()]
    has_flops = all(count is not None for count, _ in flops)
    stalls = [instruction.stall for instruction in whole]
    return TileLoop(
        len(body),
        sum(tensor.values()),
        sum((count or 0.0) * times for count, times in flops) if has_flops else None,
        names["MUFU.EX2"] + names["MUFU.EX2.F16"],
        sum(_FLOAT32.get(name.split(".")[0], 0) * times for name, times in names.items()),
        sum(instruction.stall for instruction in body),
        sum(_COPY.match(instruction.name) is not None for instruction in body),
        sum(_SPILLED.match(instruction.name) is not None for instruction in body),
        sum(weight.seen for weight in weights),
        sum(weight.seen * stall for weight, stall in zip(weights, stalls, strict=True)),
        sum(weight.cut for weight in weights),
        sum(weight.cut * stall for weight, stall in zip(weights, stalls, strict=True)),
    )


def _product(name: str) -> float | None:
    """Operations of one warp's share of a tensor-core instruction, in 16-bit operations."""
    parts = name.split(".")
    weight = 2.0 if "TF32" in parts else 0.5 if parts[0] in ("IMMA", "IGMMA", "QGMMA") else 1.0
    if group := _OF_GROUP.search(name):
        m, n, k = map(int, group.groups())
        return 2 * m * n * k * weight / _WARPS_OF_GROUP
    return next((2 * _OF_WARP[part] * weight for part in parts if part in _OF_WARP), None)
