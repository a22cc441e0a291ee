"""Mesh axes that split no work: named, counted against index maps and traced programs, and refused when strict."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from eformer.escale import PartitionAxis
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnops import OperationMetadata, OperationRegistry, ShardingError
from attnops.planning import Plan

# Work is repeated over some of these meshes; tests/planning/test_declared_split.py is about the warning.
pytestmark = pytest.mark.filterwarnings("ignore::attnops.ShardingWarning")

MESHES: tuple[dict[str, int], ...] = (
    {"fsdp": 4, "tp": 2},
    {"fssdp": 2, "tp": 2, "sp": 2},
    {"dp": 2, "sp": 4},
    {"data": 2, "model": 2, "fsdp": 2},
    {"sp": 2, "ring": 4},
    {"tp": 8},
    {"ep": 2, "fsdp": 1, "tp": 3},
)
SIZES = ((1, 4, 4), (4, 4, 2), (6, 8, 1))  # batch, heads, kv heads
CALLS = (("train", 32, 32), ("prefill", 24, 24), ("autoregressive", 1, 64), ("insert", 8, 60))
AXES: tuple[dict[str, Any], ...] = (
    {},
    {"attention_dim_axis": "ep", "query_sequence_axis": ("ring", "sp"), "key_sequence_axis": ("ring", "sp")},
    {"batch_axis": "data", "head_axis": ("tp", "model"), "decode_key_sequence_axis": "fsdp"},
)
STRATEGIES = ("gather", "ring", "ulysses")
ALL = list(itertools.product(MESHES, SIZES, CALLS, AXES, STRATEGIES, ("bthd", "bhtd", "thd")))


def planned(mesh: Any, sizes: Any, call: Any, axes: Any, strategy: str, layout: str, **metadata: Any) -> Plan:
    (batch, heads, kv_heads), (mode, q_len, kv_len) = sizes, call
    batch = 1 if layout == "thd" else batch

    def array(length: int, heads: int) -> jax.ShapeDtypeStruct:
        of = {"b": batch, "t": length, "h": heads, "d": 8}
        return jax.ShapeDtypeStruct(tuple(of[axis] for axis in layout), jnp.float32)

    declared = OperationMetadata(
        mesh=mesh, partition_axis=PartitionAxis(**axes), sequence_parallel=strategy, **metadata
    )
    given: dict[str, Any] = {}
    if layout == "thd":
        given = {
            f"{name}_segment_ids": jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in (("q", q_len), ("kv", kv_len))
        }
    query, key = array(q_len, heads), array(kv_len, kv_heads)
    return OperationRegistry.create("vanilla", declared).plan(
        query, key, key, mode=mode, layout=layout, query_offset=kv_len - q_len, **given
    )


def bounds(plan: Plan, tensor: str, dims: str) -> dict[Any, tuple[Any, ...]]:
    """What each device holds of some dimensions of a tensor, by jax's own index map of its fitted spec."""
    sizes = {axis.name: axis.size for axis in plan.problem.mesh}
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
    fitted = plan.placement.fitted[tensor]
    found = NamedSharding(mesh, fitted.spec).devices_indices_map(fitted.shape)
    layout = plan.problem.layout
    return {device: tuple(str(index[layout.index(d)]) for d in dims if d in layout) for device, index in found.items()}


def copies_by_index_maps(plan: Plan) -> int:
    """Devices for each distinct piece of work: a part of the output, and of the keys where they stay in parts."""
    work = [bounds(plan, "output", "bth")]
    generating = plan.problem.mode in ("__autoregressive__", "__insert__")
    if generating and plan.policy.sequence_parallel != "gather":
        work.append(bounds(plan, "key", "t"))
    pieces = {tuple(part[device] for part in work) for device in work[0]}
    return plan.problem.devices // len(pieces)


def check(case: Any) -> None:
    plan = planned(*case)
    wanted = copies_by_index_maps(plan)
    repeated = plan.placement.repeated
    assert math.prod(axis.size for axis in repeated) == wanted
    assert plan.to_dict()["repeated_work"]["devices"] == wanted
    told = [line for line in plan.explain().splitlines() if line.startswith("repeated")]
    assert [line.split("'")[1] for line in told] == [axis.axis for axis in repeated]
    assert all(
        f"{wanted} devices do the same work" in line and f"({axis.size})" in line
        for line, axis in zip(told, repeated, strict=True)
    )
    if wanted > 1:
        with pytest.raises(ShardingError, match="strict sharding") as error:
            planned(*case, strict=True)
        assert all(f"mesh axis {axis.axis!r} ({axis.size}) splits" in str(error.value) for axis in repeated)


@pytest.mark.parametrize("number", range(0, len(ALL), 37))
def test_as_many_devices_as_index_maps_say(number: int) -> None:
    check(ALL[number])


@pytest.mark.slow
def test_as_many_devices_as_index_maps_say_of_all() -> None:
    for case in ALL:
        check(case)


def local_work(run: Any, plan: Plan, *arrays: Any) -> int:
    """The (query row, head, key) triples of one device times the devices, by the shapes in the traced program's shard_map."""
    traced = jax.make_jaxpr(run)(*arrays).jaxpr
    while not (inner := [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]):
        (eqn,) = [eqn for eqn in traced.eqns if "jaxpr" in eqn.params]
        traced = eqn.params["jaxpr"].jaxpr
    # Behind the constants; a dict of operands is flattened in the order of its names.
    key, query, _ = (v.aval.shape for v in inner[0].params["jaxpr"].invars[-3:])
    keys = key[1] if plan.placement.sequence.strategy == "split_kv" else plan.problem.kv_len
    return math.prod(query[:3]) * keys * plan.problem.devices


@pytest.mark.parametrize(
    ("mesh", "batch", "q_len", "strategy", "copies"),
    [
        ({"fssdp": 2, "tp": 2}, 4, 32, "gather", 2),
        ({"fsdp": 4, "tp": 2}, 1, 32, "gather", 4),
        ({"fsdp": 2, "sp": 4}, 2, 32, "ring", 1),
        ({"fssdp": 2, "sp": 4}, 2, 32, "ulysses", 2),
        ({"fsdp": 2, "sp": 4}, 2, 1, "gather", 4),
        ({"fsdp": 2, "sp": 4}, 2, 1, "ring", 1),
    ],
)
def test_as_much_work_as_the_program_has(
    mesh: dict[str, int], batch: int, q_len: int, strategy: str, copies: int
) -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, sequence_parallel=strategy))
    q, k = (jax.ShapeDtypeStruct((batch, n, 4, 8), jnp.float32) for n in (q_len, 32))
    plan = attend.plan(q, k, k)
    done = local_work(lambda *x: attend(*x).attention_outputs, plan, q, k, k)
    assert done == copies * batch * q_len * 4 * 32
    assert plan.to_dict()["repeated_work"]["devices"] == copies


def x(batch: int = 2, q_len: int = 32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, q_len, 4, 8), jnp.float32)


def test_why_and_the_mend() -> None:
    def lines(mesh: dict[str, int], batch: int = 2, **metadata: Any) -> list[str]:
        plan = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, **metadata)).plan(*[x(batch)] * 3)
        assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
        return [line.partition("  ")[2] for line in plan.explain().splitlines() if line.startswith("repeated")]

    (misspelt,) = lines({"fssdp": 2, "tp": 2})
    assert misspelt.startswith("mesh axis 'fssdp' (2) splits nothing: 2 devices do the same work; no tensor")
    assert "Did you mean 'fsdp'?" in misspelt
    # 'fsdp' is there already, and is declared
    assert "Did you mean" not in "".join(lines({"fssdp": 2, "fsdp": 2}))
    (one_row,) = lines({"fsdp": 4, "tp": 2}, batch=1)
    assert "4 devices do the same work; batch of query: 1 is not divisible by fsdp=4. Choose sizes" in one_row
    first, second = lines({"data": 2, "tp": 2, "ep": 2})
    assert "'data' (2) splits nothing: with 'ep' (2), 4 devices do the same work" in first
    assert "'ep' (2) splits nothing: with 'data' (2), 4 devices do the same work" in second
    (head_dim,) = lines({"ep": 2}, partition_axis=PartitionAxis(attention_dim_axis="ep"))
    assert "'ep' (2) splits query, output as declared, but no work: 2 devices do the same work" in head_dim
    assert lines({"fsdp": 2, "tp": 4}) == []
    assert lines({"fsdp": 1, "anything": 1}) == []


def test_a_cache_that_is_gathered() -> None:
    def plan(strategy: str, **metadata: Any) -> Plan:
        declared = OperationMetadata(mesh={"fsdp": 2, "sp": 4}, sequence_parallel=strategy, **metadata)
        return OperationRegistry.create("vanilla", declared).plan(x(q_len=1), x(), x())

    (axis,) = plan("gather").placement.repeated
    assert (axis.axis, axis.size, axis.splits) == ("sp", 4, ("key", "value"))
    assert "sequence_parallel='auto' or 'ring'" in axis.hint
    assert plan("ring", strict=True).placement.repeated == ()
    with pytest.raises(ShardingError, match="4 devices do the same work"):
        plan("gather", strict=True)


def test_manual_axes_are_the_callers() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "fssdp"), axis_types=(AxisType.Auto,) * 3)
    attend = OperationRegistry.create("vanilla")
    found = []

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"data"})
    def model(x: jax.Array) -> jax.Array:
        found.append(attend.plan(x, x, x).placement.repeated)
        return x

    jax.eval_shape(jax.jit(model), x())
    assert [[axis.axis for axis in repeated] for repeated in found] == [["fssdp"]]


def test_a_packed_row_is_split_by_no_batch_axis() -> None:
    tokens = jax.ShapeDtypeStruct((32, 4, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh={"fsdp": 2, "sp": 2}))
    plan = attend.plan(tokens, tokens, tokens, q_segment_ids=ids, layout="thd")
    assert [axis.axis for axis in plan.placement.repeated] == ["fsdp"]
    assert "Did you mean" not in plan.placement.repeated[0].hint  # of 'dp': it is named, for a batch


def test_strict_judges_the_strategy_that_is_chosen() -> None:
    """A split cache whose outputs are merged repeats no work, though gathering it would."""
    axis = PartitionAxis(decode_key_sequence_axis="sp", decode_query_sequence_axis=None)
    query, cache = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (1, 64))
    for strategy, refused in (("auto", False), ("gather", True)):
        metadata = OperationMetadata(mesh={"sp": 4}, partition_axis=axis, strict=True, sequence_parallel=strategy)
        operation = OperationRegistry.create("vanilla", metadata)
        if not refused:
            assert not operation.plan(query, cache, cache).placement.repeated
            continue
        with pytest.raises(ShardingError, match="devices do the same work"):
            operation.plan(query, cache, cache)
