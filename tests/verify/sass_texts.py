"""Texts of a disassembler, written by hand."""

from __future__ import annotations

__all__ = ["KERNEL", "sass_text"]


def sass_text(*lines: str | tuple[str, int]) -> str:
    """What nvdisasm -c -hex prints: labels as they are, instructions with their stall count in the second word."""
    made = ['.section .text.kernel,"ax",@progbits', "        .align 128"]
    address = 0
    for line in lines:
        if isinstance(line, str):
            made.append(f"{line}:")
            continue
        text, stall = line
        made.append(f"        /*{address:04x}*/                   {text} ;   /* 0x{0x7918:016x} */")
        made.append(f"                                            /* 0x{stall << 41 | 0x1F << 52:016x} */")
        address += 16
    return "\n".join(made) + "\n"


KERNEL = sass_text(
    ("S2R R0, SR_TID.X", 1),
    ".L_x_0",
    ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 4),
    ("@!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4", 4),
    ("MUFU.EX2 R20, R20", 2),
    ("FFMA R21, R20, R3, R4", 5),
    ("@P1 BRA `(.L_x_0)", 15),
    ".L_x_1",
    ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 4),
    ("FADD2 R20, R20, R22", 1),
    ("FMNMX R20, R20, R22, !PT", 1),
    ("@!UP0 MUFU.EX2 R20, R20", 2),
    ("@P1 BRA `(.L_x_1)", 5),
    ".L_x_2",
    ("LDG.E R0, [R2.64]", 1),
    ("@P2 BRA `(.L_x_2)", 5),
    ("BRA `(.L_x_9)", 0),
    ".L_x_9",
    ("@P3 BRA `(.L_x_0)", 3),
    ("EXIT", 5),
)
