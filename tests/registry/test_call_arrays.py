"""A plan's bytes are those of the call's arrays, each in its own dtype; a large one is on the one screen."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from attnops import Blocks, Causal, Dense, Lengths, OperationMetadata, OperationRegistry, Positions
from attnops.compat import abstract_device
from attnops.planning import Plan
from attnops.planning.placed_tensors import placed_tensors
from attnops.planning.text import bytes_text

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 64, 4, 2, 16


def _arrays(dtype: str, other: str, kv: str) -> dict[str, Any]:
    """Every array that a call can have: `other` is the dtype of bias, sinks and scales, `kv` of key and value."""
    zeros = lambda *shape, dtype=dtype: jnp.zeros(shape, dtype)  # noqa: E731
    found = {
        "query": zeros(BATCH, LENGTH, HEADS, DIM),
        "key": zeros(BATCH, LENGTH, KV_HEADS, DIM, dtype=kv),
        "value": zeros(BATCH, LENGTH, KV_HEADS, DIM, dtype=kv),
        "bias": zeros(1, HEADS, LENGTH, LENGTH, dtype=other),
        "softmax_aux": zeros(HEADS, dtype=other),
        "q_segment_ids": zeros(BATCH, LENGTH, dtype="int8"),
        "kv_segment_ids": zeros(BATCH, LENGTH, dtype="int16"),
        "kv_lengths": zeros(BATCH, dtype="int16"),
    }
    if kv == "int8":
        found |= {
            "key_scale": zeros(BATCH, LENGTH, KV_HEADS, 1, dtype=other),
            "value_scale": zeros(1, 1, KV_HEADS, 1, dtype=other),
        }
    return found


@pytest.mark.parametrize(
    ("dtype", "other", "kv"),
    [
        *((a, b, a) for a, b in itertools.product(("float32", "bfloat16", "float16"), repeat=2)),
        ("bfloat16", "float32", "int8"),
        ("float32", "bfloat16", "int8"),
        ("bfloat16", "float32", "float8_e4m3fn"),
    ],
)
@pytest.mark.parametrize("runtime", [None, "float32"])
def test_bytes_are_those_of_the_arrays(dtype: str, other: str, kv: str, runtime: str | None) -> None:
    arrays = _arrays(dtype, other, kv)
    metadata = OperationMetadata(runtime_dtype=runtime, fallback="allow")
    attend = OperationRegistry.create("vanilla", metadata)
    call = {name: x for name, x in arrays.items() if name not in ("query", "key", "value")}
    given = [arrays[name] for name in ("query", "key", "value")]
    options: dict[str, Any] = {"return_lse": True, "return_weights": True, "causal": False}
    plan = attend.plan(*given, **call, **options)
    told = plan.to_dict()["tensors"]
    results = jax.eval_shape(lambda *x: tuple(attend(*x, **call, **options)), *given)
    arrays |= dict(zip(("output", "weights", "lse"), results, strict=True))
    for name, x in arrays.items():
        assert told[name]["device_bytes"] == x.size * x.dtype.itemsize, name
        assert told[name]["dtype"] == x.dtype.name, name
    assert {name for name, one in told.items() if one["device_bytes"] is not None} == {*arrays, "query3d"}
    assert told["bias"]["inside_bytes"] == arrays["bias"].nbytes
    operands = {tensor.name: tensor for tensor in placed_tensors(plan.problem, plan.placement)}
    assert {name: one.call_bytes({}) for name, one in operands.items()} == {
        name: x.nbytes for name, x in arrays.items() if name in operands
    }


MASKS: dict[str, Any] = {
    "dense": lambda: Dense(np.ones((BATCH, HEADS, LENGTH, LENGTH), bool)) & Dense(np.ones((1, 1, 1, LENGTH), bool)),
    "positions": lambda: Positions(*np.zeros((2, BATCH, LENGTH), np.int32), left=5),
    "blocks": lambda: Blocks(jnp.zeros((BATCH, KV_HEADS, 8, 3), jnp.int16), 8, 8) & Causal(),
    "lengths": lambda: Lengths(np.zeros(BATCH, np.int8)) & Causal(),
}


@pytest.mark.parametrize("name", MASKS)
def test_bytes_of_a_masks_arrays(name: str) -> None:
    mask = MASKS[name]()
    x, kv = (jax.ShapeDtypeStruct((BATCH, LENGTH, heads, DIM), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
    told = OperationRegistry.create("vanilla").plan(x, kv, kv, mask=mask).to_dict()["tensors"]
    for leaf in mask.split()[1]:
        size = np.asarray(leaf.array).nbytes
        size *= HEADS // KV_HEADS if name == "blocks" else 1  # a kv head's choice is repeated for its group
        assert told[leaf.name]["device_bytes"] == size


def _tpu(**sizes: int) -> AbstractMesh:
    device = abstract_device("TPU v5 lite", 1, "tpu")
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


def _long(mesh: AbstractMesh | None, dtype: str, **call: Any) -> Plan:
    x = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    metadata = OperationMetadata(mesh=mesh, **({} if mesh is not None else {"backend": "tpu"}))
    bias = jax.ShapeDtypeStruct((1, 8, 4096, 4096), dtype)
    return OperationRegistry.create("splash", metadata).plan(x, x, x, bias=bias, **call)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 2**29), ("bfloat16", 2**28)])
def test_the_largest_array_is_on_the_one_screen(dtype: str, size: int) -> None:
    plan = _long(None, dtype)
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("arrays ")]
    assert f"bias {bytes_text(size)}" in line
    assert ("float32" in line) == (dtype == "float32")
    assert bytes_text(size + 4 * 2**23) in line  # with query, key, value and output
    split = _long(_tpu(fsdp=2, tp=4), dtype)
    (line,) = [line for line in split.explain().splitlines() if line.startswith("specs") and "bias" in line]
    assert bytes_text(size) in line  # as declared: on each device
    assert f"P(-, tp, -, -), {bytes_text(size // 4)}" in line  # inside
    assert split.to_dict()["tensors"]["bias"]["inside_bytes"] == size // 4


def test_arrays_without_declared_specs_are_on_the_one_screen_if_they_are_large() -> None:
    x = jax.ShapeDtypeStruct((2, 512, 8, 64), jnp.bfloat16)
    two = Dense(jax.ShapeDtypeStruct((2, 8, 512, 512), bool)) & Dense(jax.ShapeDtypeStruct((2, 8, 512, 512), bool))
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=_tpu(fsdp=2)))
    text = attend.plan(x, x, x, mask=two & Lengths(jax.ShapeDtypeStruct((2,), jnp.int32))).explain()
    assert "mask_2" in text
    assert "kv_lengths:" not in text
    returned = attend.plan(x, x, x, return_weights=True, return_lse=True)
    (line,) = [line for line in returned.explain().splitlines() if line.startswith("specs") and "weights" in line]
    assert bytes_text(1 * 8 * 512 * 512 * 4) in line  # half of the batch, in the softmax dtype
    assert "lse:" not in returned.explain()


def test_where_the_heads_of_a_bias_are_split_is_told_once() -> None:
    changes = "\n".join(_long(_tpu(fsdp=2, tp=4), "float32").placement.changes)
    assert "bias: heads split over tp to follow the query heads, declared unsplit" in changes
    axes = {"bias_head_sequence_axis": "tp"}
    x = jax.ShapeDtypeStruct((1, 64, 8, 128), jnp.bfloat16)
    declared = OperationMetadata(mesh=_tpu(fsdp=2, tp=4), partition_axis=axes)
    bias = jax.ShapeDtypeStruct((1, 8, 64, 64), jnp.float32)
    plan = OperationRegistry.create("splash", declared).plan(x, x, x, bias=bias)
    assert not any("bias" in change for change in plan.placement.changes)
    assert "inside P" not in plan.explain()


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 4)])
def test_the_bias_takes_vmem_in_the_dtype_that_the_kernel_gets(dtype: str, itemsize: int) -> None:
    """Two blocks of 1024 x 1024 take 4 MiB less in bfloat16, by the compiler's count; a float16 bias comes as float32."""
    x = jax.ShapeDtypeStruct((1, 2048, 4, 128), jnp.bfloat16)
    sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), 1024)
    metadata = OperationMetadata(mesh=_tpu(fsdp=1), operation_configs={"splash": sizes})
    attend = OperationRegistry.create("splash", metadata)
    counted = []
    for bias in (None, jax.ShapeDtypeStruct((1, 4, 2048, 2048), dtype)):
        plan = attend.plan(x, x, x, bias=bias)
        assert plan.runs is not None
        counted.append(plan.runs.memory(plan.problem, plan.placement, plan.config))
    for kernel, parts in counted[0].items():
        assert sum(counted[1][kernel].values()) - sum(parts.values()) == 2 * 1024 * 1024 * itemsize
