"""The instructions of a compiled GPU kernel, from the text of NVIDIA's disassembler."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Instruction", "instructions_of"]

_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>.*?);?\s*/\*\s*0x[0-9a-f]{16}\s*\*/"
)
_SECOND_WORD = re.compile(r"^/\*\s*0x([0-9a-f]{16})\s*\*/")
_TARGET = re.compile(r"\((\.L\w+)\)")
# Since Volta each instruction says how many cycles its warp waits before the next: bits 105 to 108 of its 128.
_STALL_SHIFT, _STALL_BITS = 105 - 64, 0xF


class Instruction(NamedTuple):
    """guard: a predicate, perhaps negated. stall: cycles that its warp waits before the next."""

    guard: str | None
    name: str
    rest: str
    stall: int

    @property
    def operands(self) -> list[str]:
        """In the text's order: what is written comes first."""
        return [one.strip().removesuffix(".reuse") for one in self.rest.split(",")]

    def target(self, labels: dict[str, int]) -> int | None:
        """The place of the instruction that a branch goes to; None of others, and of one to an unknown label."""
        found = _TARGET.search(self.rest) if self.name.startswith("BRA") else None
        return labels.get(found[1]) if found else None


def instructions_of(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """All of them in order, and for each label the place of the instruction behind it."""
    instructions, labels = list[Instruction](), dict[str, int]()
    opened: re.Match[str] | None = None
    for line in map(str.strip, text.splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            opened = match
        elif opened is not None and (second := _SECOND_WORD.match(line)):
            stall = int(second[1], 16) >> _STALL_SHIFT & _STALL_BITS
            instructions.append(Instruction(opened["guard"], opened["name"], opened["rest"], stall))
            opened = None
    return instructions, labels
