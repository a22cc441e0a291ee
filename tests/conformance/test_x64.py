"""With jax_enable_x64 on: arrays of 32 and 16 bits keep their dtypes, and routes give the reference's answer and gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from . import cases, harness

OFTEN = {
    ("vanilla.forward_native", "everything", "float32"),
    ("vanilla.forward_native blockwise", "bias", "float32"),
    ("vanilla.forward_native blockwise", "segment_ids", "float64"),
    ("vanilla.forward_native decode", "cache", "float32"),
    ("splash.forward_tpu", "segment_ids", "float32"),
    ("flash_attn2.forward_cuda", "segment_ids", "float32"),
}
NAMES = ("everything", "bias", "segment_ids", "cache", "sinks_several", "kv_lengths", "int8_kv")
OF_EXTERNAL = ("segment_ids", "sinks_several", "kv_lengths")
CASES = [
    pytest.param(
        *(which, name, dtype),
        marks=[
            *([] if (which, name, dtype) in OFTEN else [pytest.mark.slow]),
            *harness.needed(which),
        ],
        id=f"{which}-{name}-{dtype}",
    )
    for which in harness.RUNNABLE
    for name in NAMES
    for dtype in ("float32", "float64")
    if which not in harness.KERNELS or name in OF_EXTERNAL
    if dtype == "float32" or which.startswith("vanilla")
]


@pytest.mark.parametrize(("which", "name", "dtype"), CASES)
def test_with_64_bits(which: str, name: str, dtype: str) -> None:
    implementation = harness.RUNNABLE[which]
    case = cases.build(name, "bthd")
    with jax.enable_x64(True):
        attend = implementation.make(dtype)
        tensors = harness.draw(case, dtype)
        plan = attend.plan(*harness.handed_over(case, tensors, dtype, "bthd"), **case.call)
        if plan.implementation is None:
            pytest.skip("refused, as without 64 bits")
        got = harness.run(attend, case, tensors, dtype, "bthd")
    assert got.dtype == jnp.dtype(dtype)
    published = implementation.capability.tolerance[dtype]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("which", "fields", "call"),
    [
        ("vanilla.forward_native", {"sequence_parallel": "ring", "scan_ring_attention": True}, {}),
        pytest.param("vanilla.forward_native", {"sequence_parallel": "ulysses"}, {}, marks=SLOW),
        pytest.param("vanilla.forward_native", {"sequence_parallel": "ring"}, {"mode": "insert"}, marks=SLOW),
        pytest.param("splash.forward_tpu", {"sequence_parallel": "ring"}, {}, marks=SLOW),
    ],
    ids=["ring", "ulysses", "split_kv", "ring-splash"],
)
def test_a_split_sequence_with_64_bits(which: str, fields: dict[str, Any], call: dict[str, Any]) -> None:
    case = cases.build("segment_ids", "bthd", cases.Sizes(length=160, kv_heads=4))
    case.call |= call
    tensors = harness.draw(case, "float32")
    implementation = harness.RUNNABLE[which]
    with jax.enable_x64(True):
        mesh = jax.make_mesh((4,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
        got = harness.run(implementation.make("float32", mesh, **fields), case, tensors, "float32", "bthd")
    assert got.dtype == jnp.float32
    published = implementation.capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)
