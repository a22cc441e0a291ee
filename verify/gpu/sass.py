"""tile_loops, sum_loops: the loops over tiles of a compiled GPU kernel, from the text of NVIDIA's disassembler."""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["TileLoop", "disassembled", "disassembler", "sum_loops", "tile_loops"]

_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>.*?);?\s*/\*\s*0x[0-9a-f]{16}\s*\*/"
)
_SECOND_WORD = re.compile(r"^/\*\s*0x([0-9a-f]{16})\s*\*/")
_TARGET = re.compile(r"\((\.L\w+)\)")
# Since Volta each instruction says how many cycles its warp waits before the next: bits 105 to 108 of its 128.
_STALL_SHIFT, _STALL_BITS = 105 - 64, 0xF
_TENSOR = re.compile(r"(?P<kind>[HI]MMA|[HIQ]GMMA|UTC[A-Z]*MMA)\b")
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
    waits in the compiler's schedule, without waits for memory.
    """

    instructions: int
    tensor: int
    tensor_flops: float | None
    ex2: int
    float32: int
    stall_cycles: int


class _Instruction(NamedTuple):
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
    instructions, spans = _spans(text)
    soft = [span for span in spans if _has(instructions, span, "MUFU.EX2")]
    return tuple(_loop(instructions[start:end]) for start, end in _innermost(soft))


def sum_loops(text: str) -> tuple[TileLoop, ...]:
    """The innermost loops that read and write tensor memory without exponentials: those of warps that correct sums there."""
    instructions, spans = _spans(text)
    of_memory = [span for span in spans if all(_has(instructions, span, name) for name in ("LDTM", "STTM"))]
    inner = [span for span in _innermost(of_memory) if not _has(instructions, span, "MUFU.EX2")]
    return tuple(_loop(instructions[start:end]) for start, end in inner)


def _innermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those without another one within."""
    inner = [span for span in spans if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in spans)]
    # A branch back out of code behind the loops, such as a wait for a barrier, is no loop: it begins within one.
    return [span for span in inner if not any(o[0] < span[0] < o[1] < span[1] for o in inner)]


def _spans(text: str) -> tuple[list[_Instruction], list[tuple[int, int]]]:
    """The instructions, and where each loop begins and ends."""
    instructions, labels = _parsed(text)
    spans = set[tuple[int, int]]()
    for at, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.rest)
        if instruction.name.startswith("BRA") and target and labels.get(target[1], at + 1) <= at:
            spans.add((labels[target[1]], at + 1))
    return instructions, sorted(spans)


def _has(instructions: list[_Instruction], span: tuple[int, int], name: str) -> bool:
    return any(instruction.name.startswith(name) for instruction in instructions[slice(*span)])


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
            instructions.append(_Instruction(opened["name"], opened["rest"], stall))
            opened = None
    return instructions, labels


def _loop(body: list[_Instruction]) -> TileLoop:
    names = collections.Counter(instruction.name for instruction in body)
    tensor = {name: times for name, times in names.items() if _TENSOR.match(name)}
    flops = [(_product(name), times) for name, times in tensor.items()]
    has_flops = all(count is not None for count, _ in flops)
    return TileLoop(
        len(body),
        sum(tensor.values()),
        sum((count or 0.0) * times for count, times in flops) if has_flops else None,
        names["MUFU.EX2"] + names["MUFU.EX2.F16"],
        sum(_FLOAT32.get(name.split(".")[0], 0) * times for name, times in names.items()),
        sum(instruction.stall for instruction in body),
    )


def _product(name: str) -> float | None:
    """Operations of one warp's share of a tensor-core instruction, in 16-bit operations."""
    parts = name.split(".")
    weight = 2.0 if "TF32" in parts else 0.5 if parts[0] in ("IMMA", "IGMMA", "QGMMA") else 1.0
    if group := _OF_GROUP.search(name):
        m, n, k = map(int, group.groups())
        return 2 * m * n * k * weight / _WARPS_OF_GROUP
    return next((2 * _OF_WARP[part] * weight for part in parts if part in _OF_WARP), None)
