"""Loops of a disassembled kernel, and the unit that binds them, on texts written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sass_texts import KERNEL, sass_text

from attnops.devices import gpu_specs
from attnops.verify.gpu import sass
from attnops.verify.gpu.sass import TileLoop, converting_loops, disassembled, loading_loops, sum_loops, tile_loops
from attnops.verify.gpu.units import loop_bound


def test_inner_loops_with_exponentials() -> None:
    """Not the loop that loads, nor the one around all; 16 x 8 x 16 multiplications and additions an HMMA."""
    first, second = tile_loops(KERNEL)
    assert first == TileLoop(5, 2, 2 * 2 * 16 * 8 * 16, 1, 1, 4 + 4 + 2 + 5 + 15)
    assert second == TileLoop(5, 1, 2 * 16 * 8 * 16, 1, 2, 4 + 1 + 1 + 2 + 5)


def test_loops_that_correct_sums() -> None:
    """They read and write tensor memory: neither a softmax, which has exponentials too, nor what only reads."""
    text = sass_text(
        ".L_x_9",
        *(
            ".L_x_0",
            ("LDTM.x32 R0, tmem[UR4]", 2),
            ("FMUL2 R0, R0, R2", 3),
            ("STTM.x32 tmem[UR4], R0", 4),
            ("BRA `(.L_x_0)", 5),
        ),
        *(
            ".L_x_1",
            ("LDTM.x32 R0, tmem[UR4]", 1),
            ("MUFU.EX2 R0, R0", 1),
            ("STTM.x32 tmem[UR4], R0", 1),
            ("BRA `(.L_x_1)", 1),
        ),
        *(".L_x_2", ("LDTM.x32 R0, tmem[UR4]", 1), ("BRA `(.L_x_2)", 1)),
        ("BRA `(.L_x_9)", 1),
    )
    assert sum_loops(text) == (TileLoop(4, 0, 0, 0, 2, 2 + 3 + 4 + 5),)
    assert sum_loops(KERNEL) == ()


def test_loops_that_load() -> None:
    """Copies by TMA in loops of their own; not those beside exponentials, nor loads to registers."""
    text = sass_text(
        ".L_x_0", ("UTMALDG.4D [UR8], [UR4]", 2), ("@P0 UBLKCP [UR8], [UR4], UR6", 3), ("@P1 BRA `(.L_x_0)", 5),
        ".L_x_1", ("UTMALDG.2D [UR8], [UR4]", 1), ("MUFU.EX2 R0, R0", 1), ("@P1 BRA `(.L_x_1)", 1),
        ".L_x_2", ("LDG.E R0, [R2.64]", 1), ("@P1 BRA `(.L_x_2)", 1), ("EXIT", 5),
    )  # fmt: skip
    (loop,) = loading_loops(text)
    assert (loop.instructions, loop.copies, loop.ex2, loop.stall_cycles) == (3, 2, 0, 2 + 3 + 5)
    (soft,) = tile_loops(text)
    assert soft.copies == 1


def test_loops_that_convert() -> None:
    """From shared memory and to it; not those that only copy there, nor those with exponentials."""
    text = sass_text(
        ".L_x_0", ("LDS.U8 R0, [R2]", 2), ("I2F.S8 R0, R0", 3), ("STSM.16.M88.4 [R3], R0", 4), ("@P1 BRA `(.L_x_0)", 5),
        ".L_x_1", ("LDS.U8 R0, [R2]", 1), ("I2F.S8 R0, R0", 1), ("@P1 BRA `(.L_x_1)", 1),
        ".L_x_2", ("LDS R0, [R2]", 1), ("HADD2.F32 R0, R0", 1), ("MUFU.EX2 R0, R0", 1), ("STS [R3], R0", 1),
        ("@P1 BRA `(.L_x_2)", 1), ("EXIT", 5),
    )  # fmt: skip
    (loop,) = converting_loops(text)
    assert (loop.instructions, loop.copies, loop.ex2, loop.stall_cycles) == (4, 0, 0, 2 + 3 + 4 + 5)
    assert converting_loops(KERNEL) == ()


@pytest.mark.parametrize(
    ("instruction", "flops"),
    [
        ("HMMA.16816.F32.BF16", 4096.0),
        ("HMMA.1688.F32.TF32", 2 * 2048.0),  # half the rate
        ("IMMA.16832.S8.S8", 0.5 * 8192.0),  # twice
        ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16 * 2 / 4),  # of a warp, in four
        ("QGMMA.64x64x32.F32.E4M3.E4M3", 0.5 * 64 * 64 * 32 * 2 / 4),
        ("UTCHMMA", None),
    ],
)
def test_products_of_tensor_cores(instruction: str, flops: float | None) -> None:
    text = sass_text(".L_x_0", (f"{instruction} R0, gdesc[UR4], R0", 1), ("MUFU.EX2 R0, R0", 1), ("BRA `(.L_x_0)", 1))
    (loop,) = tile_loops(text)
    assert (loop.tensor, loop.tensor_flops) == (1, flops)


def test_the_unit_that_binds() -> None:
    """Of eight warps on an A100: 4096 x 100 x 8 / 2048, 64 x 32 x 8 / 16, 128 x 32 x 8 / 64, 500 x 8 / 4 cycles."""
    a100, loop = gpu_specs()["a100"], TileLoop(500, 100, 409600.0, 64, 128, 900)
    found = loop_bound(a100, loop, 8)
    assert found.cycles == {"tensor cores": 1600.0, "EX2": 1024.0, "FP32": 512.0, "issue": 1000.0, "stalls": 900.0}
    assert found.bound == "tensor cores"
    # one warp alone waits for itself; an H100's lanes and tensor cores do twice as much
    assert loop_bound(a100, loop, 1).bound == "stalls"
    faster = loop_bound(gpu_specs()["h100"], loop, 8)
    assert (faster.cycles["tensor cores"], faster.cycles["FP32"], faster.bound) == (800.0, 256.0, "EX2")
    unknown = loop_bound(a100, loop._replace(tensor_flops=None), 8)
    assert (unknown.cycles["tensor cores"], unknown.bound) == (None, "EX2")


def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    assert disassembled(b"\x7fELF") is None
    monkeypatch.setattr(sass, "disassembler", lambda: "/nowhere/nvdisasm")
    assert disassembled(b"\x7fELF") is None


@given(st.lists(st.sampled_from([".L_x_0:", "BRA `(.L_x_0)", "MUFU.EX2", "/*0000*/", "/* 0xffffffffffffffff */", ";"])))
def test_pieces_of_a_text_have_no_loops(pieces: list[str]) -> None:
    """No instruction is whole without both of its words."""
    assert tile_loops("\n".join(pieces)) == ()
