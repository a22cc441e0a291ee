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
    assert tile_cycles(root) == TileCycles(full=100, masked=120, block=50, step=root.cycles - 2 - 270)


def test_one_way_through_a_tile_is_both() -> None:
    cycles = tile_cycles(regions(*_dump([("sums", 30), ("full", 100)])))
    assert (cycles.full, cycles.masked) == (100, 100)
    assert cycles.total(full=3, masked=2, blocks=2) == 500 + 2 * cycles.block + 5 * cycles.step


def test_other_forms_are_refused() -> None:
    bundles, utilization = _dump([("full", 5)])
    with pytest.raises(ConfigError, match="libtpu"):
        regions(bundles, utilization.replace("MATMUL", "MXU"))
    with pytest.raises(ConfigError, match="libtpu"):
        regions(bundles + "\n  0xff  :  { nop }", utilization)
    with pytest.raises(ConfigError, match="found 0"):
        tile_cycles(regions(*_dump([("sums", 5)])))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
def test_the_forward_tile_keeps_the_matrix_units_busy(tmp_path: Path) -> None:
    """v5e, head dim 128: 1024 x 1024 weights are 4096 cycles of products alone, and at most 15 % more with the softmax."""
    case = {"kernel": "attnops", "target": "v5e:2x2", "dim": 128, "blocks": [1024, 1024, 512], "fused": True}
    case |= {"length": 4096, "out": str(tmp_path)}
    subprocess.run([sys.executable, str(WORKER), json.dumps(case)], check=True, capture_output=True)
    found = kernels_in(tmp_path)
    forward = tile_cycles(regions(*(path.read_text() for path in found["attnops_splash_forward"])))
    assert 0.93 * 4096 < forward.full < 4096 / 0.85
    assert forward.full < forward.masked < 1.15 * forward.full
    assert tile_cycles(regions(*(p.read_text() for p in found["attnops_splash_backward"]))).full < 10000
