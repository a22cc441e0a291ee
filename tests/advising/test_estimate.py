"""The arithmetic of an estimate against values worked out by hand, and its bytes against compiled programs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.advising.cpu_rates import CpuRates
from attnops.advising.estimate import Estimate, estimate
from attnops.advising.machine import Machine, cpu_machine, machine_of
from attnops.advising.tiles import kernels_of_pass, visible_blocks
from attnops.compat import abstract_device
from attnops.planning import Plan
from attnops.sharding import virtual_mesh
from attnops.verify.call import verify_call
from attnops.verify.topology import described_mesh

TWO_AXES = {"query_sequence_axis": ["cp", "sp"], "key_sequence_axis": ["cp", "sp"]}
_SIDES = ("q", "kv", "q_dkv", "kv_dkv")
BLOCKS = {f"block_{side}": 512 for side in _SIDES} | {"use_fused_bwd_kernel": True}
WHOLE = {f"block_{side}_compute": 512 for side in _SIDES}  # a tile is one unit


def _plan(machine: Machine, sizes: dict[str, int], *, length: int, dim: int = 128, **fields: Any) -> Plan:
    call = {name: fields.pop(name) for name in ("mask", "mode") if name in fields}
    kinds = {"tpu": "tpu", "cuda": "gpu", "cpu": "cpu"}
    device = abstract_device(machine.kind, machine.cores, kinds[machine.platform])
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
    heads, kv_heads = fields.pop("heads", (8, 8))
    configs = {"splash": BLOCKS | fields.pop("units", {})} if machine.platform == "tpu" else {}
    name = fields.pop("operation", "splash")
    metadata = OperationMetadata(mesh=mesh, operation_configs=configs, tuning="off", **fields)
    q = jax.ShapeDtypeStruct((2, length, heads, dim), "bfloat16")
    k = jax.ShapeDtypeStruct((2, length, kv_heads, dim), "bfloat16")
    return OperationRegistry.create(name, metadata).plan(q, k, k, **call)


def _live(sizes: dict[str, int], mask: Any, units: Any = WHOLE, **fields: Any) -> np.ndarray:
    """Tiles of 512 by device and hop, of 8192 tokens in sixteen of them."""
    machine = machine_of("v5e:2x4")
    plan = _plan(machine, sizes, length=8192, mask=mask, mode="prefill", units=units, **fields)
    (kernel,) = kernels_of_pass(plan, False)
    assert plan.implementation == "splash.forward_tpu"
    live = visible_blocks(plan, kernel)
    assert live.block_q == live.block_kv == 512
    return live.tiles


def test_tiles_by_device_and_hop() -> None:
    """Causal, 16 x 16 tiles, two rows of them a device: 1+2, 3+4 ... 15+16 with all keys; around a ring the diagonal's three,
    then four from behind; zigzag the same for all."""
    sp = {"sp": 8}
    assert _live(sp, Causal(), sequence_parallel="gather").tolist() == [[n] for n in (3, 7, 11, 15, 19, 23, 27, 31)]
    ring = _live(sp, Causal(), sequence_parallel="ring", ring_order="contiguous")
    assert ring.shape == (8, 8)
    assert ring[:, 0].tolist() == [3] * 8
    assert ring[:, 3].tolist() == [0, 0, 0, 4, 4, 4, 4, 4]
    # In 16 pieces a device has one early, one late: at home both diagonals and the late one's view of the early one.
    zigzag = _live(sp, Causal(), sequence_parallel="ring", ring_order="zigzag")
    assert zigzag.tolist() == [[3] + [2] * 7] * 8
    assert _live(sp, Causal(), sequence_parallel="ulysses").tolist() == [[136]]
    assert _live(sp, Full(), sequence_parallel="ring").tolist() == [[4] * 8] * 8
    # Of 1024 keys back a device sees its own and some of the one before: a hop, the other six fall away.
    window = _live(sp, Causal() & SlidingWindow(1023, 0), sequence_parallel="ring")
    assert window.tolist() == [[3, 0], *[[3, 3]] * 7]
    # Units of 256: a tile on the diagonal leaves out one of its four.
    small = _live(sp, Causal(), dict.fromkeys(WHOLE, 256), sequence_parallel="ring", ring_order="contiguous")
    assert small[:, 0].tolist() == [2.5] * 8
    assert small[:, 3].tolist() == [0, 0, 0, 4, 4, 4, 4, 4]


def test_work_by_hand() -> None:
    """One v5e, all visible, 2 x 8 heads of 4096 tokens, D 128. A weight takes 256 products of 65536 a cycle, 0.0039 cycles, and
    beside them 0.00395, which is more; 4096 rows take as much as 256 weights each, and 64 tiles 50 cycles."""
    machine = machine_of("v5e:1x1")
    (one,) = estimate(_plan(machine, {"fsdp": 1}, length=4096, mask=Full(), mode="prefill"), machine).passes
    cycles = 16 * (0.00395 * (4096 * 4096 + 4096 * 256) + 64 * 50)
    assert one.seconds == pytest.approx(cycles / 1.5e9)
    assert (one.bound, one.waiting, one.sends) == ("vector", 0.0, ())


def test_decoding_is_bound_by_the_cache() -> None:
    """64 rows, one query each against 8192 keys on one H100: keys and values once, at 3.35 TB/s, and little else."""
    machine = machine_of("h100")
    device = abstract_device(machine.kind, machine.cores, "gpu")
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=device)
    q = jax.ShapeDtypeStruct((64, 1, 8, 128), "bfloat16")
    k = jax.ShapeDtypeStruct((64, 8192, 8, 128), "bfloat16")
    plan = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh)).plan(q, k, k, mode="autoregressive")
    (one,) = estimate(plan, machine).passes
    cache = 2 * 64 * 8192 * 8 * 128 * 2 / 3.35e12
    assert one.bound == "HBM"
    assert cache < one.seconds < 1.1 * cache


def test_a_ring_beside_its_work() -> None:
    """Four v5e in a row, K and V of 4096 tokens a hop, 32 MiB at 50 GB/s: the work of a hop is longer, and hides it. That of 512
    tokens is shorter, and the rest of each hop is waited for."""
    machine = machine_of("v5e:1x4")
    fields = {"sequence_parallel": "ring", "mask": Full(), "mode": "prefill"}
    long = estimate(_plan(machine, {"sp": 4}, length=16384, **fields), machine).passes[0]
    (send,) = long.sends
    hop = 2 * 2 * 4096 * 8 * 128 * 2
    assert send.sent_bytes == 3 * hop
    assert send.seconds == pytest.approx(3 * (hop / 5e10 + 1e-6))
    assert send.waited == 0.0
    short = estimate(_plan(machine, {"sp": 4}, length=2048, **fields), machine).passes[0]
    (send,) = short.sends
    hop //= 8
    work = 16 * (0.00395 * (512 * 512 + 512 * 256) + 50) / 1.5e9
    assert send.waited == pytest.approx(3 * (hop / 5e10 + 1e-6 - work))
    assert short.seconds == pytest.approx(4 * work + send.waited)


def test_the_busiest_device_is_waited_for() -> None:
    """Causal and gathered, the last of eight does 31 tiles where the mean does 17."""
    machine = machine_of("v5e:2x4")
    plan = _plan(machine, {"sp": 8}, length=8192, mask=Causal(), mode="prefill", sequence_parallel="gather")
    (one,) = estimate(plan, machine).passes
    rows = 1024 * 256 * 0.00395
    tile = 512 * 512 * 0.00395 + 50
    assert one.waiting / one.work == pytest.approx((31 * tile + rows) / (17 * tile + rows) - 1)


@settings(deadline=None, max_examples=30)
@given(
    way=st.sampled_from(["gather", "ring", "ulysses", "auto"]),
    sizes=st.sampled_from(
        [{"sp": 8}, {"fsdp": 2, "sp": 4}, {"sp": 2, "tp": 4}, {"fsdp": 2, "sp": 2, "tp": 2}, {"tp": 8}]
    ),
    target=st.sampled_from(["v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "h100:8", "h100:2x4", "cpu:8"]),
    train=st.booleans(),
)
def test_terms_add_up(way: str, sizes: dict[str, int], target: str, train: bool) -> None:
    """Every term is a time, they make the whole, and nothing is hidden that wasn't sent."""
    machine = machine_of(target)
    mode = "train" if train else "prefill"
    fields = {"sequence_parallel": way, "mask": Causal(), "mode": mode, "fallback": "allow"}
    plan = _plan(machine, sizes, length=2048, dim=64, **fields)
    if plan.implementation is None:
        return
    found = estimate(plan, machine)
    assert len(found.passes) == 1 + train
    for one in found.passes:
        assert all(term.seconds >= 0 for term in one.terms)
        assert one.seconds == pytest.approx(sum(term.seconds for term in one.terms))
        assert all(0 <= send.waited <= send.seconds for send in one.sends)
    assert found.seconds == sum(one.seconds for one in found.passes)
    assert min(found.argument_bytes, found.output_bytes) > 0 <= found.held_bytes
    assert found.about_bytes - found.held_bytes == found.least_bytes == found.argument_bytes + found.output_bytes


WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "heads and batch": ({"fsdp": 2, "tp": 4}, {}),
    "gather": ({"fsdp": 2, "sp": 4}, {"sequence_parallel": "gather"}),
    "ring": ({"sp": 8}, {"sequence_parallel": "ring", "ring_order": "contiguous"}),
    "zigzag": ({"fsdp": 2, "sp": 4}, {"sequence_parallel": "ring", "ring_order": "zigzag"}),
    "ulysses": ({"sp": 4, "tp": 2}, {"sequence_parallel": "ulysses"}),
    "ulysses_ring": ({"cp": 2, "sp": 4}, {"sequence_parallel": "ulysses_ring", "partition_axis": TWO_AXES}),
}


def _against_the_compiler(mesh: Any, machine: Machine, fields: dict[str, Any], dtype: str) -> tuple[Estimate, Any]:
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, tuning="off", **fields))
    x = jax.ShapeDtypeStruct((4, 1024, 8, 128), dtype)
    arguments = {"query": x, "key": x, "value": x, "mask": Causal()}
    report = verify_call(attend, arguments, "here")
    found = estimate(report.plan, machine)
    for one in report.passes:
        assert (one.failure, one.differences) == (None, ())
    return found, report


@pytest.mark.parametrize(
    "way", ["ring", "ulysses", *(pytest.param(w, marks=pytest.mark.slow) for w in ("gather", "zigzag"))]
)
def test_bytes_of_compiled_programs(way: str) -> None:
    """Operands and results are the compiler's to the byte, and so is what is sent, on eight virtual devices."""
    sizes, fields = WAYS[way]
    found, report = _against_the_compiler(virtual_mesh(sizes), cpu_machine(8, CpuRates()), fields, "float32")
    both = report.passes[1]
    table = 8 * 4  # of the CPU's, which points to the output and three gradients
    assert (found.argument_bytes, found.output_bytes) == (both.argument_bytes, both.output_bytes - table)
    assert found.passes[0].sent_bytes == sum(one.sent_bytes for one in report.passes[0].collectives)
    assert found.sent_bytes == sum(one.sent_bytes for one in both.collectives)
    assert both.peak_bytes >= found.argument_bytes + found.output_bytes


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_programs_for_tpus(way: str) -> None:
    """The same for a described v5e, whose arrays of D 128 have no padding."""
    sizes, fields = WAYS[way]
    found, report = _against_the_compiler(described_mesh("v5e:2x4", sizes), machine_of("v5e:2x4"), fields, "bfloat16")
    both = report.passes[1]
    table = 512  # of a TPU's, which points to the output and three gradients
    assert (found.argument_bytes, found.output_bytes) == (both.argument_bytes, both.output_bytes - table)
    assert found.sent_bytes == sum(one.sent_bytes for one in both.collectives)
    assert report.device.hbm_bytes >= both.peak_bytes >= found.argument_bytes + found.output_bytes
