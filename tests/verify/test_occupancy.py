"""How many blocks a multiprocessor holds: values worked out by hand from NVIDIA's rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops.devices import gpu_specs
from attnops.verify.gpu.occupancy import occupancy

# By hand. Registers: a warp gets registers x 32, rounded up to 256; a quarter of the warps lies in each quarter, of 16384.
CASES = {
    # gpu, registers, threads, shared bytes: blocks, warps, bound
    # 32 x 32 = 1024 a warp, 16 warps a quarter, 64 in all, 32 of a block; 2048 / 1024 threads
    "full": ("h100", 32, 1024, 0, 2, 64, ("registers", "threads")),
    # 168 x 32 = 5376 a warp, 3 a quarter, 12 in all, 8 of a block; (98304 + 1024) fits 233472 twice
    "registers": ("h100", 168, 256, 98304, 1, 8, ("registers",)),
    # 128 x 32 = 4096, 4 a quarter, 16 in all: 4 blocks of 4 warps; 73728 = 72 KiB and 1 KiB fit 164 KiB twice
    "shared memory": ("a100", 128, 128, 73728, 2, 8, ("shared memory",)),
    # the same on an H100: 228 KiB hold three
    "more shared memory": ("h100", 128, 128, 73728, 3, 12, ("shared memory",)),
    # 16 x 32 = 512, 32 a quarter, 128 in all; 2048 / 32 = 64 blocks by threads, and 32 at most; a block of one warp takes the
    # room of four: 128 / 4 = 32
    "blocks": ("a100", 16, 32, 0, 32, 32, ("registers", "blocks")),
    # 33 x 32 = 1056 rounds up to 1280: 12 a quarter, 48 in all, 6 blocks of 8; 8 by threads
    "rounded registers": ("b200", 33, 256, 0, 6, 48, ("registers",)),
    # 255 x 32 = 8160 rounds to 8192: 2 a quarter, 8 in all, of a block of 8 warps one
    "most registers": ("b200", 255, 256, 0, 1, 8, ("registers",)),
    # 8192 a warp, 8 warps in all; a block of 5 takes the room of 8
    "warps dealt to four": ("b200", 255, 160, 0, 1, 5, ("registers",)),
    # 227 KiB and 1 KiB are all that there is
    "all of the shared memory": ("h100", 32, 128, 232448, 1, 4, ("shared memory",)),
    # more than a block may have
    "too much": ("a100", 32, 128, 200000, 0, 0, ("shared memory",)),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case: str) -> None:
    gpu, registers, threads, shared, blocks, warps, bound = CASES[case]
    found = occupancy(gpu_specs()[gpu], registers, threads, shared)
    assert (found.blocks, found.warps, found.most_warps, found.bound) == (blocks, warps, 64, bound)


@given(
    st.sampled_from(("a100", "h100", "h200", "b200")),
    st.integers(1, 255),
    st.integers(1, 1024),
    st.integers(0, 232448),
)
def test_what_is_held_fits(gpu: str, registers: int, threads: int, shared: int) -> None:
    spec = gpu_specs()[gpu]
    found = occupancy(spec, registers, threads, shared)
    warps = -(-threads // 32)
    assert found.blocks * (shared + 1024) <= spec.shared_bytes_a_core
    assert found.warps * registers * 32 <= 65536
    assert found.warps == found.blocks * warps <= found.most_warps
    assert found.blocks <= 32
    assert found.bound
    less = occupancy(spec, max(1, registers - 8), threads, shared // 2)
    assert less.blocks >= found.blocks
