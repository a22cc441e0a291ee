"""What planned calls send is what their declared strategies have to send; and a program that sends other things is told."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from attnops import Causal, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.planning import Plan
from attnops.planning.traffic import Need, Traffic, min_traffic
from attnops.sharding import virtual_mesh
from attnops.verify.call import verify_call
from attnops.verify.collectives import Collective
from attnops.verify.differences import differences
from attnops.verify.report import TargetReport
from attnops.verify.topology import described_mesh

TWO_AXES = {"query_sequence_axis": ["cp", "sp"], "key_sequence_axis": ["cp", "sp"]}
IDS = jax.ShapeDtypeStruct((4, 512), jnp.int32)
SINKS = jax.ShapeDtypeStruct((8,), jnp.float32)
BIAS = jax.ShapeDtypeStruct((1, 8, 512, 512), jnp.float32)
NARROW_BIAS = jax.ShapeDtypeStruct((1, 8, 512, 512), jnp.bfloat16)
RING = {"sequence_parallel": "ring"}
CELLS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any], int]] = {
    # mesh, metadata, call, kv heads
    "heads and batches": ({"fsdp": 4, "tp": 2}, {}, {}, 8),
    "one kv head, copied": ({"fsdp": 2, "tp": 4}, {}, {}, 1),
    "two kv heads, copied": ({"fsdp": 2, "tp": 4}, {}, {}, 2),
    "gather": ({"fsdp": 2, "sp": 4}, {}, {}, 8),
    "gather, ids and sinks": ({"fsdp": 2, "sp": 4}, {}, {"q_segment_ids": IDS, "softmax_aux": SINKS}, 8),
    "gather, bias": ({"fsdp": 2, "sp": 2, "tp": 2}, {}, {"bias": BIAS}, 8),
    "gather, narrow bias": ({"fsdp": 2, "sp": 2, "tp": 2}, {}, {"bias": NARROW_BIAS}, 8),
    "ring": ({"sp": 8}, RING | {"ring_order": "contiguous"}, {}, 8),
    "ring of two": ({"sp": 2, "fsdp": 4}, RING | {"ring_order": "contiguous"}, {}, 8),
    "ring, a window": ({"sp": 8}, RING, {"mask": Causal() & SlidingWindow(100, 0)}, 8),
    "ring, lse": ({"sp": 4}, RING | {"ring_order": "contiguous"}, {"return_lse": True}, 8),
    "zigzag": ({"fsdp": 2, "sp": 4}, RING | {"scan_ring_attention": True}, {}, 8),
    "zigzag, ids, sinks and lse": (
        {"fsdp": 2, "sp": 4},
        RING | {"scan_ring_attention": True},
        {"q_segment_ids": IDS, "softmax_aux": SINKS, "return_lse": True},
        8,
    ),
    "zigzag of two, copied heads": ({"sp": 2, "tp": 4}, RING, {}, 2),
    "ulysses": ({"sp": 4, "tp": 2}, {"sequence_parallel": "ulysses"}, {}, 8),
    "ulysses, lse": ({"sp": 4, "fsdp": 2}, {"sequence_parallel": "ulysses"}, {"return_lse": True}, 4),
    "ulysses_ring": (
        {"cp": 2, "sp": 2, "tp": 2},
        {"sequence_parallel": "ulysses_ring", "partition_axis": TWO_AXES},
        {},
        8,
    ),
    "keys split alone, in training": (
        {"fsdp": 2, "sp": 4},
        RING | {"partition_axis": {"query_sequence_axis": None}},
        {},
        8,
    ),
    "a split cache": ({"fsdp": 2, "sp": 4}, {}, {"mode": "autoregressive"}, 8),
    "a split cache, split queries": (
        {"fsdp": 2, "sp": 4},
        {"partition_axis": {"decode_query_sequence_axis": "sp"}},
        {"mode": "insert"},
        8,
    ),
}
OFTEN = {
    "gather, ids and sinks",
    "ring, a window",
    "one kv head, copied",
    "ring of two",
    "ulysses_ring",
    "a split cache",
    "a split cache, split queries",
}


def _report(cell: str, dtype: str, on: str | None) -> TargetReport:
    sizes, fields, call, kv_heads = CELLS[cell]
    mesh = virtual_mesh(sizes) if on is None else described_mesh(on, sizes)
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, tuning="off", **fields))
    q_len = 8 if "split cache" in cell else 512
    q = jax.ShapeDtypeStruct((4, q_len, 8, 64), dtype)
    k = jax.ShapeDtypeStruct((4, 512, kv_heads, 64), dtype)
    return verify_call(attend, {"query": q, "key": k, "value": k, **call}, on or "here")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cell", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CELLS])
def test_virtual_devices_send_what_is_needed(cell: str, dtype: str) -> None:
    report = _report(cell, dtype, None)
    expected_unknown = CELLS[cell][3] == 2 or "alone" in cell
    for one in report.passes:
        assert (one.failure, one.differences) == (None, ())
        assert bool(one.unknown) == (expected_unknown and one.name != "forward")
    assert report.passed


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.slow
@pytest.mark.parametrize("cell", [n for n, (sizes, *_) in CELLS.items() if sizes != {"sp": 4}])
def test_described_tpus_send_what_is_needed(cell: str) -> None:
    report = _report(cell, "bfloat16", "v5e:2x4")
    assert report.passed, [one.differences or one.failure for one in report.passes]


def test_needs_by_hand() -> None:
    """Eight devices, 512 tokens, 8 heads of 64 in float32: a device's part of K is 4 x 64 x 8 x 64 x 4 = 524288 bytes."""
    part = 524288
    sizes, fields, _, _ = CELLS["ring"]
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=sizes, tuning="off", **fields))
    x = jax.ShapeDtypeStruct((4, 512, 8, 64), jnp.float32)
    forward, both = (min_traffic(attend.plan(x, x, x), backward) for backward in (False, True))
    assert forward.needs == (
        Need("collective-permute", 7 * part, "key around the ring", axes=("sp",), step="ring"),
        Need("collective-permute", 7 * part, "value around the ring", axes=("sp",), step="ring"),
    )
    # Back: the keys again, their gradients at every step and once more, which is home.
    assert sum(need.sent_bytes for need in both.needs) == (14 + 14 + 16) * part
    gathered = OperationRegistry.create("splash", OperationMetadata(mesh=sizes, tuning="off"))
    needs = min_traffic(gathered.plan(x, x, x), True).needs
    assert [(need.kind, need.sent_bytes) for need in needs] == [("all-gather", 7 * part)] * 2 + [
        ("reduce-scatter", 7 * part)
    ] * 2
    head_split = OperationRegistry.create("splash", OperationMetadata(mesh={"fsdp": 4, "tp": 2}, tuning="off"))
    assert min_traffic(head_split.plan(x, x, x), True) == Traffic(())


def test_another_program_differs() -> None:
    traffic = Traffic((Need("all-gather", 7e6, "key"),))
    assert differences(traffic, (Collective("all-gather", 1, 8_000_000, 8, False),)) == ()
    twice = (Collective("all-gather", 2, 8_000_000, 8, False), Collective("all-reduce", 1, 1_000_000, 8, True))
    assert differences(traffic, twice) == (
        "all-gather: 14000000 bytes sent per device, 7000000 needed",
        "all-reduce: 1750000 bytes sent per device, 0 needed",
    )
    assert differences(traffic, ()) == ("all-gather: 0 bytes sent per device, 7000000 needed",)
    assert differences(Traffic(traffic.needs, ("nobody knows",)), twice) == ()


def test_a_plan_says_what_each_pass_sends() -> None:
    """A ring of 4 over 1 x 512 tokens: 3 of 4 parts of a bfloat16 key and value, and zigzag's halves of q, k, v and output."""
    x = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.bfloat16)
    part = 512 // 4 * 8 * 64 * 2

    def planned(**metadata: object) -> Plan:
        declared = OperationMetadata(mesh=AbstractMesh((4,), ("sp",)), backend="tpu", **metadata)
        return OperationRegistry.create("splash", declared).plan(x, x, x)

    contiguous = planned(sequence_parallel="ring", ring_order="contiguous")
    assert contiguous.to_dict()["sends"]["forward"] == {"bytes": 2 * 3 * part, "unknown": []}
    assert f"forward {2 * 3 * part / 1024:.1f} KiB per device (collective-permute)" in str(contiguous)
    zigzag = planned(sequence_parallel="ring").to_dict()["sends"]
    assert zigzag["forward"]["bytes"] == 2 * 3 * part + 4 * part
    for plan in (contiguous, planned()):
        whole = min_traffic(plan, True).sent_bytes
        assert sum(one["bytes"] for one in plan.to_dict()["sends"].values()) == whole
    one = OperationRegistry.create("splash", OperationMetadata(backend="tpu")).plan(x, x, x)
    assert one.to_dict()["sends"] == {}
    assert "sends" not in str(one)
