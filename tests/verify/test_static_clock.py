"""Cycles from the compiler's dumps: on a schedule written by hand, and on a real one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnops.errors import ConfigError
from attnops.verify.static_clock import TileCycles, kernels_in, regions, tile_cycles

WORKER = Path(__file__).parents[2] / "benchmarks" / "tpu_static_worker.py"


def _dump(parts: list[tuple[str, int]]) -> tuple[str, str]:
    """A loop over a guarded body of regions (what they do, their bundles), as libtpu writes it."""
    lines, units = ["= control target key start", "LB: loop body", "= control target key end"], []
    number = 0

    def bundle(text: str, products: int = 0, vector: int = 0) -> None:
        nonlocal number
        lines.append(f"  {number:#x}   : > {{ {text} }}")
        units.append(f"{products} 0 {vector}")
        number += 1

    bundle("%s1 = smov.u32 0")
    bundle("%s2 = sadd.s32 1 /* Start region 90 */")
    bundle("%9 = sbr.rel (%p1) target = $region91")
    for index, (what, length) in enumerate(parts):
        bundle(f"%9 = sbr.rel (!%p2) target = $region{index}")
        for _ in range(length - 1):
            bundle("work", int(what != "sums"), {"full": 1, "masked": 2, "sums": 1}[what])
        lines[-1] += "\n      over two lines"
        bundle(f"%s3 = smov.u32 1 /* Start/End empty region {index} */")
    bundle("%s4 = sadd.s32 1 /* Start region 91 */")
    bundle("%p3 = scmp.ge.s32.totalorder %s4, 12 /* loop exit test */")
    bundle("%9 = sbr.rel (!%p3) target = $region90")
    return "\n".join(lines), "\n".join(["== CAPACTIY:", "MATMUL, XLU, VALU", "4 3 4", "== UTILIZATION:", *units])


def test_a_schedule_written_by_hand() -> None:
    bundles, utilization = _dump([("sums", 30), ("full", 100), ("masked", 120), ("sums", 20)])
    root = regions(bundles, utilization)
    assert [r.cycles for r in root.all() if r.is_loop] == [root.cycles - 2]
    # a region is left one bundle after its last; the loop's own bundles and the branches are the step
    assert tile_cycles(root) == TileCycles((100, 120), block=50, step=root.cycles - 2 - 270)


def test_ways_through_a_tile_come_as_they_stand() -> None:
    cycles = tile_cycles(regions(*_dump([("masked", 120), ("sums", 30), ("full", 100), ("full", 60)])))
    assert cycles.tiles == (120, 100, 60)
    assert cycles.cheapest_first().tiles == (60, 100, 120)
    assert cycles.total([1, 2, 3], blocks=2) == 120 + 200 + 180 + 2 * cycles.block + 6 * cycles.step


def test_one_way_through_a_tile_serves_all() -> None:
    cycles = tile_cycles(regions(*_dump([("sums", 30), ("full", 100)])))
    assert cycles.tiles == (100,)
    assert cycles.total([3, 2], blocks=2) == 500 + 2 * cycles.block + 5 * cycles.step


def test_a_guard_within_a_guard_is_a_kv_heads() -> None:
    bundles, utilization = _dump([("sums", 30), ("full", 100), ("sums", 20)])
    # the last eight bundles of both guards get a guard of their own
    lines = bundles.splitlines()
    firsts = [number for number, line in enumerate(lines) if "target = $region0" in line or "target = $region2" in line]
    for inner, first in enumerate(firsts, 40):
        length = 30 if inner == 40 else 20
        lines[first + length - 8] = lines[first + length - 8].replace("work", f"sbr.rel (%p9) target = $region{inner}")
        lines[first + length + 1] = lines[first + length + 1].replace("}", f"}} /* Start/End empty region {inner} */")
    cycles = tile_cycles(regions("\n".join(lines), utilization))
    assert (cycles.block, cycles.head, cycles.turn) == (50 - 16, 16, 0)
    assert cycles.total([4], blocks=2, heads=3) == 4 * (100 + cycles.step) + 2 * 34 + 3 * 16
    # five bundles of the first one are a loop
    first = firsts[0] + 30 - 6
    lines[first] = lines[first].replace("}", "} /* Start region 50 */")
    lines[first + 5] = lines[first + 5].replace("work", "sbr.rel (!%p9) target = $region50")
    looped = tile_cycles(regions("\n".join(lines), utilization))
    assert looped == cycles._replace(head=16 - 5, turn=5)
    assert looped.total([4], blocks=2, heads=3, turns=9) == cycles.total([4], blocks=2) - 16 + 3 * 11 + 9 * 5


def test_a_tile_without_a_guard_of_its_own() -> None:
    """The guard around the whole step holds a block's start and end too."""
    bundles, utilization = _dump([("full", 100)])
    lines = bundles.splitlines()
    first = next(number for number, line in enumerate(lines) if "target = $region0" in line)
    work = [number for number in range(first + 1, len(lines)) if "work" in lines[number]]
    rows = utilization.splitlines()
    for guard, (start, end) in enumerate(((5, 25), (60, 80)), 40):
        begin, stop = work[start], work[end]
        lines[begin] = lines[begin].replace("work", f"sbr.rel (%p9) target = $region{guard}")
        lines[stop] = lines[stop].replace("}", f"}} /* Start/End empty region {guard} */")
        numbers = [int(line.split(":")[0], 16) for line in lines[begin : stop + 1] if line.startswith("  0x")]
        for number in numbers:  # no products in them
            rows[4 + number] = "0 0 1"
    root = regions("\n".join(lines), "\n".join(rows))
    assert tile_cycles(root) == TileCycles((60,), block=40, step=root.cycles - 2 - 100)


def test_other_forms_are_refused() -> None:
    bundles, utilization = _dump([("full", 5)])
    with pytest.raises(ConfigError, match="libtpu"):
        regions(bundles, utilization.replace("MATMUL", "MXU"))
    with pytest.raises(ConfigError, match="libtpu"):
        regions(bundles + "\n  0xff  :  { nop }", utilization)
    with pytest.raises(ConfigError, match="has 0 code paths"):
        tile_cycles(regions(*_dump([("sums", 5)])))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
def test_the_forward_tile_keeps_the_matrix_units_busy(tmp_path: Path) -> None:
    """v5e, head dim 128: 1024 x 1024 weights are 4096 cycles of products alone, and at most 5 % more with the softmax. On the
    diagonal a quarter of a tile is left out, and half of it masked."""
    forward = _compiled(tmp_path, 4096, "forward")
    full, diagonal = forward.tiles
    assert 0.93 * 4096 < full < 1.05 * 4096
    assert 0.75 * 4096 < diagonal < 0.85 * full
    assert forward.head == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
def test_the_fused_backward_clears_and_writes_a_kv_heads_sums(tmp_path: Path) -> None:
    """v5e: a store a bundle. The two sums of 512 keys in float32 are 128 registers, whatever the length."""
    short, long = (_compiled(tmp_path / str(length), length, "backward") for length in (4096, 8192))
    assert long.tiles == pytest.approx(short.tiles, rel=0.02)
    assert long.tiles[0] < 10000
    assert short.block < 400
    assert long.block == pytest.approx(short.block, rel=0.1)
    # cleared at one a bundle, written as bfloat16 at two a bundle, with the starts of both loops and of a copy
    assert short.turn == long.turn
    assert 1.5 * 128 < short.turn < 2.5 * 128
    assert short.head == long.head < 64


def _compiled(folder: Path, length: int, name: str) -> TileCycles:
    """attnops' kernel, compiled for a v5e with head dim 128."""
    case = {"kernel": "attnops", "target": "v5e:2x2", "dim": 128, "blocks": [1024, 1024, 512], "fused": True}
    case |= {"length": length, "out": str(folder)}
    subprocess.run([sys.executable, str(WORKER), json.dumps(case)], check=True, capture_output=True)
    return tile_cycles(regions(*(path.read_text() for path in kernels_in(folder)[f"attnops_splash_{name}"])))
