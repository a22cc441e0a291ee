"""tile_loops and others: the loops over tiles of a compiled GPU kernel, from the text of NVIDIA's disassembler."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["TileLoop", "converting_loops", "disassembled", "disassembler", "loading_loops", "sum_loops", "tile_loops"]

_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^/\*[0-9a-f]{4,}\*/\s+(?:@!?(?P<guard>U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>.*?);?\s*/\*\s*0x[0-9a-f]{16}\s*\*/"
)
_SECOND_WORD = re.compile(r"^/\*\s*0x([0-9a-f]{16})\s*\*/")
_TARGET = re.compile(r"\((\.L\w+)\)")
# Since Volta each instruction says how many cycles its warp waits before the next: bits 105 to 108 of its 128.
_STALL_SHIFT, _STALL_BITS = 105 - 64, 0xF
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
# Of instructions that write predicates, these are the first or the second operand; R2P writes all of them.
_PREDICATE, _ALL_PREDICATES = re.compile(r"U?P[0-9T]"), "PR"
_SECONDS = 60


class TileLoop(NamedTuple):
    """One turn of a loop, for one warp: its instructions, those of the tensor cores, and exponentials (EX2), in the code's
    counts.

    tensor_flops: in units of 16-bit products; TF32 counts twice and 8-bit half; None where the instructions don't show the shape
    of their product. float32: additions, multiplications and fused ones per lane. stall_cycles: the sum of the instructions'
    waits in the compiler's schedule, without waits for memory. copies: to shared memory by TMA. passed_instructions and
    passed_stalls: those of the above in parts that a warp passes over unless one of its lanes needs them. spills: registers that
    are written to memory or read from there.
    """

    instructions: int
    tensor: int
    tensor_flops: float | None
    ex2: int
    float32: int
    stall_cycles: int
    copies: int = 0
    passed_instructions: int = 0
    passed_stalls: int = 0
    spills: int = 0

    def mean(self, needing: float) -> tuple[float, float]:
        """(instructions, stall cycles) of a turn, where so large a share of the warps needs what others pass over."""
        passing = 1 - needing
        return self.instructions - passing * self.passed_instructions, self.stall_cycles - passing * self.passed_stalls


class _Instruction(NamedTuple):
    guard: str | None
    name: str
    rest: str
    stall: int


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


def _some(body: list[_Instruction], kind: re.Pattern[str]) -> bool:
    return any(kind.match(instruction.name) for instruction in body)


def _inner_loops(text: str, wanted: Callable[[list[_Instruction]], bool]) -> tuple[TileLoop, ...]:
    instructions, labels = _parsed(text)
    spans = set[tuple[int, int]]()
    for at, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.rest)
        if instruction.name.startswith("BRA") and target and labels.get(target[1], at + 1) <= at:
            spans.add((labels[target[1]], at + 1))
    # A branch back out of code behind the loops, such as a wait for a barrier, is no loop: it begins within one.
    loops = [span for span in sorted(spans) if not any(o[0] < span[0] < o[1] < span[1] for o in spans)]
    found = [span for span in loops if wanted(instructions[slice(*span)])]
    inner = [span for span in found if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in found)]
    return tuple(_loop(instructions[start:end], _passed(instructions, labels, start, end)) for start, end in inner)


def _passed(
    instructions: list[_Instruction], labels: dict[str, int], start: int, end: int
) -> Iterator[list[_Instruction]]:
    """The parts of a loop that a warp passes over if none of its lanes needs them: VOTE.ANY, then a branch forward."""
    for at in range(start, end):
        guard, name, rest, _ = instructions[at]
        target = _TARGET.search(rest)
        if guard and target and name.startswith("BRA") and at + 1 < labels.get(target[1], 0) < end:
            made = (one.name for one in reversed(instructions[start:at]) if guard in _written(one))
            if next(made, "") == "VOTE.ANY":
                yield instructions[at + 1 : labels[target[1]]]


def _written(instruction: _Instruction) -> tuple[str, ...]:
    """The predicates among what an instruction writes."""
    first = [operand.strip() for operand in instruction.rest.split(",")[:2]]
    if first[0] == _ALL_PREDICATES:
        return tuple(f"P{number}" for number in range(7))
    return tuple(operand for operand in first if _PREDICATE.fullmatch(operand))


def _parsed(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    instructions, labels = list[_Instruction](), dict[str, int]()
    opened: re.Match[str] | None = None
    for line in map(str.strip, text.splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            opened = match
        elif opened is not None and (second := _SECOND_WORD.match(line)):
            stall = int(second[1], 16) >> _STALL_SHIFT & _STALL_BITS
            instructions.append(_Instruction(opened["guard"], opened["name"], opened["rest"], stall))
            opened = None
    return instructions, labels


def _loop(body: list[_Instruction], passed: Iterable[list[_Instruction]]) -> TileLoop:
    names = collections.Counter(instruction.name for instruction in body)
    tensor = {name: times for name, times in names.items() if _TENSOR.match(name)}
    flops = [(_product(name), times) for name, times in tensor.items()]
    has_flops = all(count is not None for count, _ in flops)
    left_out = list(itertools.chain.from_iterable(passed))
    return TileLoop(
        len(body),
        sum(tensor.values()),
        sum((count or 0.0) * times for count, times in flops) if has_flops else None,
        names["MUFU.EX2"] + names["MUFU.EX2.F16"],
        sum(_FLOAT32.get(name.split(".")[0], 0) * times for name, times in names.items()),
        sum(instruction.stall for instruction in body),
        sum(_COPY.match(instruction.name) is not None for instruction in body),
        len(left_out),
        sum(instruction.stall for instruction in left_out),
        sum(_SPILLED.match(instruction.name) is not None for instruction in body),
    )


def _product(name: str) -> float | None:
    """Operations of one warp's share of a tensor-core instruction, in 16-bit operations."""
    parts = name.split(".")
    weight = 2.0 if "TF32" in parts else 0.5 if parts[0] in ("IMMA", "IGMMA", "QGMMA") else 1.0
    if group := _OF_GROUP.search(name):
        m, n, k = map(int, group.groups())
        return 2 * m * n * k * weight / _WARPS_OF_GROUP
    return next((2 * _OF_WARP[part] * weight for part in parts if part in _OF_WARP), None)
