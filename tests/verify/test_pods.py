"""Llama-3 70B's attention and its whole layer, 128k tokens, compiled for 256 chips that aren't here. Minutes a cell."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "pods.py"
GIB = 1 << 30
HBM = {"v5p": 95.9 * GIB, "v5e": 16 * GIB}
# As benchmarks/results/pods.json has it.
FITS = {
    ("gather", "v5p"): True,
    ("gather", "v5e"): False,
    ("ring", "v5p"): True,
    ("ring", "v5e"): True,
    ("ulysses_ring", "v5p"): True,
    ("ulysses_ring", "v5e"): True,
    ("ring, heads over 8", "v5p"): True,
    ("ring, heads over 8", "v5e"): False,
}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")]


def _compiled(cell: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--cell", cell], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("generation", HBM)
@pytest.mark.parametrize("way", ["ring, heads over 8", "ulysses_ring"])
def test_attention_sends_what_it_has_to(way: str, generation: str) -> None:
    found = _compiled(f"attention/{way}/256/{generation}")
    assert found["implementation"] == "splash.forward_tpu"
    for name in ("forward", "forward and backward"):
        assert (found[name]["failure"], found[name]["differences"]) == (None, [])
        assert found[name]["peak_bytes"] < HBM[generation]
    # 32 devices around the ring: of K and V, each 131072 tokens of 8 heads over 8 devices, 31/32.
    if way == "ring, heads over 8":
        assert generation == "v5e" or found["forward"]["overlapped"]
        of_keys = 2 * 131072 * 128 * 2 * 31 / 32
        in_order = 2 * (8 + 1) * 131072 * 128 * 2 / 32  # query and output of 8 heads, key and value of one
        assert found["forward"]["sent_bytes"] == {"collective-permute": pytest.approx(of_keys + in_order, rel=1e-9)}


def test_ulysses_alone_has_too_few_heads() -> None:
    found = _compiled("attention/ulysses/256/v5p")
    assert "the 8 kv heads of a device don't divide over the 256 devices of sp" in found["refused"]
    assert "'ulysses_ring' on two mesh axes" in found["refused"]


@pytest.mark.parametrize(("way", "generation"), FITS)
def test_the_layer_fits_or_not(way: str, generation: str) -> None:
    found = _compiled(f"layer/{way}/256/{generation}")
    if FITS[way, generation]:
        assert found["failure"] is None
        assert found["peak_bytes"] < HBM[generation]
    else:
        assert found["failure"]["memory"] == "hbm"
