"""The count of what each device multiplies, on which benchmarks/parallel.py founds its balance."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnops import Causal, Full

_FILE = Path(__file__).parents[2] / "benchmarks" / "parallel_products.py"
_SPEC = importlib.util.spec_from_file_location("parallel_products", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
counting = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(counting)

TEXT = """
%fused (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], f32[4,8], f32[8,16])) -> (s32[], f32[4,8], f32[8,16]) {
  %p = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %y = f32[8,16]{1,0} get-tuple-element(%p), index=2
  %fusion.7 = f32[4,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused
  ROOT %out = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%p)
}

%condition (p: (s32[], f32[4,8], f32[8,16])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (q: f32[4,8], k: f32[8,16]) -> f32[4,16] {
  %q = f32[4,8]{1,0} parameter(0)
  %k = f32[8,16]{1,0} parameter(1)
  %here = f32[4,16]{1,0} dot(%q, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %moved = f32[8,16]{1,0} collective-permute(%k), source_target_pairs={{0,1},{1,0}}
  %tuple = (f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%q, %moved)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) while(%tuple), condition=%condition, body=%body
  ROOT %sum = f32[4,16]{1,0} add(%here, %here)
}
"""


def test_products_of_a_text() -> None:
    assert counting.products(TEXT) == {"here": (2 * 4 * 16 * 8, 0), "fusion.7": (2 * 4 * 16 * 8, 1)}


# Lengths in tiles of 512: of 16 x 16 of them a causal mask leaves 136; in a ring of whole shards a device has 1, 3, ... of them
# more than the one before, each hop's busiest device has all four, but for the first hop's, which has three. In zigzag order
# the pieces are one tile long, and are cut in four: of each of the 16 on the diagonal a quarter is left out.
@pytest.mark.parametrize(
    ("mask", "order", "tiles", "busiest", "lockstep"),
    [
        (Full(), "contiguous", 256, 1, 1),
        pytest.param(Causal(), "contiguous", 136, 31 / 17, 31 / 17, marks=pytest.mark.slow),
        pytest.param(Causal(), "zigzag", 132, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_ring_multiplies_what_its_tiles_need(
    mask: Any, order: str, tiles: int, busiest: float, lockstep: float
) -> None:
    # In a process of its own: jax's profiler doesn't start where libtpu is loaded, as other tests do.
    command = [sys.executable, Path(__file__).with_name("count_products.py"), type(mask).__name__, order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert sum(found["operations"]) == tiles * 4 * 512 * 512 * 16
    assert len(found["hops"]) == 8
    assert found["busiest over mean"] == pytest.approx(busiest)
    assert found["lockstep over mean"] == pytest.approx(lockstep)
