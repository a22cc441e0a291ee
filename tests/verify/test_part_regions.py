"""Loops that leave out what a warp doesn't see of a tile, on texts written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sass_texts import KERNEL, sass_text

from attnops.cli.kernel_lines import kernel_lines
from attnops.verify.gpu.gpu_kernels import GpuKernelUse, GpuLoop
from attnops.verify.gpu.part_regions import EVERY_PART, PartShares
from attnops.verify.gpu.sass import TileLoop, tile_loops
from attnops.verify.report import TargetReport

WORD, BIT = ("REDUX.OR R46, R0", 1), ("LOP3.LUT P0, RZ, R46, 0x8, RZ, 0xc0, !PT", 1)
NOT_P1 = ("PLOP3.LUT P0, PT, P1, PT, PT, 0xf, 0x0", 1)
UP2 = ("PLOP3.LUT P0, PT, PT, PT, UP2, 0x80, 0x0", 1)
_REGION = ("BRA.U !UP0, `(.L_x_1)", 1), ("FADD R1, R1, R2", 7), ".L_x_1"
SEEN, CUT = 0.5, 0.25
SHARES = PartShares(SEEN, CUT)


def _by_parts(*body: str | tuple[str, int]) -> TileLoop:
    """The loop of this body, in which an exponential stalls for 1 and the branch back for 2."""
    (loop,) = tile_loops(
        sass_text(".L_x_0", *body, ("MUFU.EX2 R20, R20", 1), ("@P5 BRA `(.L_x_0)", 2), ".L_x_9", ("BRA `(.L_x_0)", 5))
    )
    return loop


def test_parts_that_a_warp_leaves_out() -> None:
    """Regions by bits of the warp's word; one for what is cut lies within that for what is seen. Uniform registers and predicates
    as on Blackwell."""
    loop = _by_parts(
        ("REDUX.OR UR21, R2", 2),
        ("ULOP3.LUT UP4, URZ, UR21, 0x8, URZ, 0xc0, !UPT", 1),
        ("BRA.U !UP4, `(.L_x_37)", 5),
        ("ULOP3.LUT UP1, URZ, UR21, 0x80000, URZ, 0xc0, !UPT", 9),
        ("BRA.U !UP1, `(.L_x_38)", 5),
        *(("R2P PR, R131, 0x7f", 6), ("SEL R24, R24, 0xff800000, P0", 3), ("@!P4 IMAD R40, R40, R128, -0x800000", 4)),
        ".L_x_38",
        ("FMNMX3.NAN R133, R100, R104, R108, !PT", 2),
        ".L_x_37",
        ("ULOP3.LUT UR3, UR9, 0x1, URZ, 0xc0, !UPT", 1),
        ("BRA.U !UP4, `(.L_x_39)", 5),  # the same test again
        ("MUFU.EX2 R21, R21", 8),
        ".L_x_39",
    )
    always = 2 + 1 + 5 + 1 + 5 + 1 + 2
    seen, cut = 9 + 5 + 2 + 8, 6 + 3 + 4
    assert (loop.instructions, loop.stall_cycles, loop.ex2) == (14, always + seen + cut, 2)
    assert (loop.seen_instructions, loop.seen_stalls) == (4, seen)
    assert (loop.cut_instructions, loop.cut_stalls) == (3, cut)
    assert loop.by_parts
    assert loop.mean(EVERY_PART) == (loop.instructions, loop.stall_cycles)
    assert loop.mean(SHARES) == (7 + 4 * SEEN + 3 * CUT, always + seen * SEEN + cut * CUT)
    assert loop.mean(PartShares(0.0, 0.0))[1] == always


@pytest.mark.parametrize(
    "test",
    [
        [("LOP3.LUT P0, RZ, R46, 0x8, RZ, 0xc0, !PT", 1)],
        [("LOP3.LUT R5, R46, 0x8, RZ, 0xc0, !PT", 1), ("ISETP.NE.U32.AND P0, PT, R5, RZ, PT", 1)],
        [("LOP3.LUT R5, R46, 0x8, RZ, 0xc0, !PT", 1), ("ISETP.NE.AND P1, PT, R5, 0x8, PT", 1), NOT_P1],
        [("SHF.R.U32.HI R5, RZ, 0x3, R46", 1), ("LOP3.LUT P0, RZ, R5, 0x1, RZ, 0xc0, !PT", 1)],
        [("SHF.L.U32 R5, R46, 0x1c, RZ", 1), ("ISETP.LT.AND P0, PT, R5, RZ, PT", 1)],
        [("SHF.L.U32 R5, R46, 0x1c, RZ", 1), ("ISETP.GT.AND P1, PT, R5, -0x1, PT", 1), NOT_P1],
        [("R2P PR, R46, 0x78", 1), ("PLOP3.LUT P0, PT, PT, PT, P3, 0x80, 0x0", 1)],
        [("ULOP3.LUT UP2, URZ, UR12, 0x8, URZ, 0xc0, !UPT", 1), ("PLOP3.LUT P0, PT, PT, PT, UP2, 0x80, 0x0", 1)],
        [("R2UR UR7, R46", 1), ("UMOV UR8, UR7", 1), ("ULOP3.LUT UP2, URZ, UR8, 0x8, URZ, 0xc0, !UPT", 1), UP2],
    ],
    ids=[
        "mask", "compared", "equal", "shifted", "sign", "not negative", "predicates", "uniform predicate", "uniform copy",
    ],
)  # fmt: skip
def test_ways_to_test_a_bit(test: list[tuple[str, int]]) -> None:
    """Of a copy of the word, as on Hopper."""
    loop = _by_parts(
        ("REDUX.OR UR12, R0", 1),
        ("IMAD.U32 R46, RZ, RZ, UR12", 1),
        ("IADD3.X R0, R24, UR9, RZ, P1, !PT", 1),
        *test,
        ("@!P0 BRA `(.L_x_1)", 1),
        ("FADD R1, R1, R2", 7),
        ".L_x_1",
    )
    assert (loop.seen_instructions, loop.seen_stalls, loop.cut_stalls) == (1, 7, 0)


@pytest.mark.parametrize(
    ("lines", "seen", "cut"),
    [
        ([WORD, ("LOP3.LUT P0, RZ, R3, 0x8, RZ, 0xc0, !PT", 1)], 0, 0),  # another register
        ([WORD, ("MOV R46, R3", 1), BIT], 0, 0),  # written again
        ([WORD, ("LDG.E.128 R44, [R2.64]", 1), BIT], 0, 0),
        ([WORD, BIT, ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R129", 1)], 0, 0),  # a barrier's wait
        ([WORD, ("@P3 MOV R46, R3", 1), BIT], 0, 0),  # perhaps written
        ([WORD, ("LOP3.LUT P0, RZ, R46, 0x80000, RZ, 0xc0, !PT", 1)], -7, 7),  # cut, or not seen
        ([("ISETP.NE.AND P0, PT, R3, RZ, PT", 1)], 0, 0),
        ([WORD, BIT, ("@P2 BRA `(.L_x_9)", 1)], 7, 0),
        ([("LOP3.LUT P0, RZ, R46, 0x8, RZ, 0xc0, !PT", 1), WORD], 7, 0),  # of the turn before
    ],
    ids=[
        "another register", "copied over", "loaded over", "wait", "perhaps another", "cut alone", "no word", "wait behind",
        "before",
    ],
)  # fmt: skip
def test_branches_by_bits_of_a_word_and_others(lines: list[tuple[str, int]], seen: int, cut: int) -> None:
    loop = _by_parts(*lines, ("@!P0 BRA `(.L_x_1)", 1), ("FADD R1, R1, R2", 7), ".L_x_1")
    assert (loop.seen_stalls, loop.cut_stalls) == (seen, cut)
    assert loop.by_parts == (seen != 0)
    assert loop.stall_cycles == sum(stall for _, stall in lines) + 1 + 7 + 1 + 2


def test_what_is_done_instead() -> None:
    """Of a branch that is taken where the part is seen, and of one that isn't. What runs where none is seen isn't in the sums."""
    loop = _by_parts(
        *(WORD, BIT, ("@P0 BRA `(.L_x_1)", 1), ("MOV R1, RZ", 3), ("BRA `(.L_x_2)", 5)),
        *(".L_x_1", ("FADD R1, R1, R2", 7), ".L_x_2"),
        *(("@!P0 BRA `(.L_x_3)", 1), ("FADD R1, R1, R2", 9), ("BRA `(.L_x_4)", 5)),
        *(".L_x_3", ("MOV R1, RZ", 2), ".L_x_4"),
    )
    always = 1 + 1 + 1 + 1 + 1 + 2
    assert loop.stall_cycles == always + 7 + 9 + 5
    assert loop.mean(SHARES)[1] == always + SEEN * (7 + 9 + 5) + (1 - SEEN) * (3 + 5 + 2)


def test_a_branch_that_comes_back_from_another_word() -> None:
    """Where two ways meet, only what is so on both is known."""
    loop = _by_parts(
        WORD, ("@P4 BRA `(.L_x_2)", 1), ("MOV R46, R3", 1), ".L_x_2", BIT, ("@!P0 BRA `(.L_x_1)", 1), ("FADD R1, R1, R2", 7),
        ".L_x_1",
    )  # fmt: skip
    assert not loop.by_parts


@pytest.mark.parametrize("least", ["REDUX.MIN.S32", "CREDUX.MIN.S32"])
def test_words_that_are_computed_from_what_a_warp_has(least: str) -> None:
    """From the least and the greatest number of its rows; the compiler may turn a test around."""
    word = [
        *(("UIADD3 UR18, UPT, UPT, UR18, 0x1f, URZ", 1), ("USHF.R.S32.HI UR18, URZ, 0x5, UR18", 1)),
        *(("UISETP.LT.AND UP2, UPT, URZ, UR18, UPT", 1), ("USEL UR18, URZ, UR18, !UP2", 1)),
        *(("USHF.L.U32 UR19, UR34, UR18, URZ", 1), ("ULOP3.LUT UP0, URZ, UR19, 0x1, URZ, 0xc0, !UPT", 1)),
        *(("USHF.L.U32 UR18, UR18, 0x10, URZ", 1), ("ULOP3.LUT UR18, UR18, 0xf0000, UR19, 0x36, !UPT", 1)),
    ]
    loop = _by_parts(
        (f"{least} UR18, R135", 1),
        *word,
        ("BRA.U UP0, `(.L_x_31)", 1),
        *(("ULOP3.LUT UP1, URZ, UR18, 0x10000, URZ, 0xc0, !UPT", 3), ("BRA.U !UP1, `(.L_x_32)", 4)),
        *(("SEL R24, R24, 0xff800000, P0", 5), ".L_x_32", ("FMNMX R1, R1, R2, !PT", 6), ".L_x_31"),
    )
    assert (loop.seen_stalls, loop.cut_stalls) == (3 + 4 + 6, 5)
    assert loop.stall_cycles == 1 + len(word) + 1 + 3 + 4 + 5 + 6 + 1 + 2


def test_tests_that_show_no_bit() -> None:
    """What has exponentials runs where a part is seen, and what lies within it or has none where one is cut."""
    vote = ("VOTE.ANY P0, P0", 1), ("SEL R5, RZ, 0x1, !P0", 1), ("ISETP.NE.U32.AND P1, PT, R5, RZ, PT", 1)
    cut = *vote, ("@!P1 BRA `(.L_x_1)", 1), ("SEL R24, R24, 0xff800000, P2", 7), ".L_x_1"
    loop = _by_parts(*cut)
    assert loop.mean(SHARES)[1] == 3 + 1 + 7 * (1 - SEEN + CUT) + 1 + 2
    loop = _by_parts(*vote, ("@!P1 BRA `(.L_x_2)", 1), ("MUFU.EX2 R2, R2", 9), *cut, ".L_x_2")
    assert loop.mean(SHARES)[1] == 3 + 1 + (9 + 3 + 1) * SEEN + 7 * CUT + 1 + 2
    both = ("REDUX.MIN.S32 UR14, R179", 1), ("REDUX.MAX.S32 UR6, R177", 1), ("IMAD.U32 R177, RZ, RZ, UR6", 1)
    tests = ("UISETP.GT.AND UP0, UPT, UR14, 0x7f, UPT", 1), ("PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0", 1)
    last = (
        ("ISETP.LT.AND P2, PT, R177, 0x1, PT", 1),
        ("@P0 BRA P2, `(.L_x_1)", 1),
        ("SEL R24, R24, R25, P3", 7),
        ".L_x_1",
    )
    loop = _by_parts(*both, *tests, *last)
    assert loop.mean(SHARES)[1] == 3 + 2 + 2 + 7 * (1 - SEEN + CUT) + 1 + 2
    uniform = "ULOP3.LUT UR5, UR7, UR8, URZ, 0xc0, !UPT"  # of no lanes
    assert not _by_parts((uniform, 1), ("UISETP.NE.AND UP0, UPT, UR5, URZ, UPT", 1), *_REGION).by_parts


@pytest.mark.parametrize("longer_first", [True, False])
def test_the_longer_of_two_runs_where_a_part_is_cut(longer_first: bool) -> None:
    """What follows in both has been copied into both."""
    first, second = (8, 3) if longer_first else (3, 8)
    loop = _by_parts(
        *(("VOTE.ANY P2, P0", 1), ("VOTE.ANY P1, P1", 1), ("@!P2 BRA `(.L_x_4)", 1), ("FADD R1, R1, R2", 2)),
        *(("@!P1 BRA `(.L_x_5)", 1), ("MUFU.EX2 R2, R2", first), ("BRA `(.L_x_4)", 5)),
        *(".L_x_5", ("MUFU.EX2 R2, R2", second), ".L_x_4"),
    )
    cut, uncut = (8 + 5, 3) if longer_first else (8, 3 + 5)
    assert loop.stall_cycles == 3 + 2 + 1 + cut + 1 + 2
    assert loop.mean(SHARES)[1] == 3 + (2 + 1) * SEEN + cut * CUT + uncut * (SEEN - CUT) + 1 + 2


def test_loops_without_parts() -> None:
    for loop in tile_loops(KERNEL):
        assert not loop.by_parts
        assert loop.mean(SHARES) == (loop.instructions, loop.stall_cycles)


def test_what_is_printed_of_such_a_loop() -> None:
    loop = TileLoop(50, 8, None, 8, 0, 1000, 0, 0, 20, 400, 10, 300)
    kernel = GpuKernelUse("attnops_blackwell_forward", 128, 0, None, 256, loops=(GpuLoop(loop, None),))
    plan: Any = None
    told = " ".join(kernel_lines(TargetReport("b200", plan, None, 0, 0, (), ()), (kernel,)))
    expected = "1000 stall cycles, 700 of them where a warp's rows see the tile whole, 300 where they see nothing of it"
    assert expected in told
