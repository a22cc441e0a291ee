"""One process of several: trains the layer and decodes through attnops on a mesh over all processes.

Run by test_processes.py: process_compute.py COORDINATOR COUNT ID RESULT AXIS_TYPE CASE...
"""

from __future__ import annotations

import faulthandler
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import process_layer as layer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnops import Causal, OperationMetadata, OperationRegistry, check_processes


class Case(NamedTuple):
    """A mesh, whose outermost axis crosses the border between processes, and what is declared."""

    mesh: dict[str, int]
    fields: dict[str, Any]
    strategy: str  # that has to be in force
    zigzag: bool = False


_SP_OUTSIDE = {"sp": 2, "fsdp": 2, "tp": 2}
_TWO_AXES = {"partition_axis": {"query_sequence_axis": ["cp", "sp"], "key_sequence_axis": ["cp", "sp"]}}
CASES = {
    "gather": Case(_SP_OUTSIDE, {"sequence_parallel": "gather"}, "gather"),
    "ring": Case({"sp": 4, "tp": 2}, {"sequence_parallel": "ring", "ring_order": "contiguous"}, "ring"),
    "zigzag_of_two": Case(_SP_OUTSIDE, {"sequence_parallel": "ring"}, "ring", True),
    "zigzag": Case({"sp": 4, "tp": 2}, {"sequence_parallel": "ring"}, "ring", True),
    "ulysses": Case(_SP_OUTSIDE, {"sequence_parallel": "ulysses"}, "ulysses"),
    "ulysses_ring": Case(
        {"cp": 2, "sp": 2, "tp": 2}, {"sequence_parallel": "ulysses_ring", **_TWO_AXES}, "ulysses_ring", True
    ),
    "data": Case({"fsdp": 4, "tp": 2}, {}, ""),  # the gradients are what crosses
}
DECODED = ("gather", "zigzag", "zigzag_of_two")


def put(array: Any, mesh: Mesh, *spec: str) -> jax.Array:
    """A global array, of which each process makes its own part."""
    array = np.asarray(array)
    axes = [tuple(a for a in axis.split() if a in mesh.axis_names) for axis in spec]
    spec = tuple(axis[0] if len(axis) == 1 else axis or None for axis in axes)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: array[i])


def whole(array: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def train(case: Case, metadata: OperationMetadata, mesh: Mesh) -> dict[str, np.ndarray]:
    attend, drawn = OperationRegistry.create("vanilla", metadata), layer.draw()
    x, wanted = (put(v, mesh, "fsdp", "cp sp") for v in (drawn.x, drawn.wanted))
    weights = {name: put(w, mesh) for name, w in drawn.weights.items()}
    shapes = [(layer.BATCH, layer.LENGTH, *shape[1:]) for shape in layer.SHAPES.values()]
    plan = attend.plan(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), mask=Causal())
    split = plan.placement.sequence
    assert (split.strategy, split.zigzag) == (case.strategy, case.zigzag), split

    def loss_of(weights: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btw,whd->bthd", x, weights[name]) for name in layer.SHAPES)
        heads = attend(q, k, v, mask=Causal()).attention_outputs
        return 0.5 * ((jnp.einsum("bthd,hdw->btw", heads, weights["output"]) - wanted) ** 2).mean()

    @jax.jit
    def step(weights: Any, x: jax.Array, wanted: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, wanted)
        return loss, jax.tree.map(lambda w, d: w - layer.RATE * d, weights, gradients)

    losses = []
    for _ in range(layer.STEPS):
        loss, weights = step(weights, x, wanted)
        losses.append(float(loss))
    return {"losses": np.array(losses), **{name: whole(w) for name, w in weights.items()}}


def decode(metadata: OperationMetadata, mesh: Mesh) -> np.ndarray:
    attend, drawn = OperationRegistry.create("vanilla", metadata), layer.draw_cache()
    cache = [put(drawn[name], mesh, "fsdp", "sp", "tp") for name in ("key_cache", "value_cache")]
    positions = np.arange(layer.CACHE)[None, :, None, None]

    @jax.jit
    def step(cache: Any, lengths: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        here = positions == lengths[:, None, None, None]
        cache = [jnp.where(here, new, c) for c, new in zip(cache, (key, value), strict=True)]
        out = attend(query, *cache, kv_lengths=lengths + 1, causal=False, mode="autoregressive")
        return out.attention_outputs, cache

    outputs = []
    for token in range(layer.TOKENS):
        query, key, value = (put(drawn[name][token], mesh) for name in ("query", "key", "value"))
        out, cache = step(cache, put(drawn["lengths"] + token, mesh), query, key, value)
        outputs.append(whole(out))
    return np.stack(outputs)


def main(coordinator: str, count: int, process: int, result: str, kind: str, *cases: str) -> None:
    faulthandler.dump_traceback_later(140 * count, exit=True)
    jax.distributed.initialize(coordinator, count, process, initialization_timeout=30, heartbeat_timeout_seconds=60)
    check_processes(agree={"cases": cases, "kind": kind})
    found: dict[str, np.ndarray] = {}
    for name in cases:
        case, sizes = CASES[name], CASES[name].mesh
        types = (AxisType[kind.capitalize()],) * len(sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        owners = [frozenset(d.process_index for d in part.flat) for part in mesh.devices]
        assert mesh.size == jax.device_count()
        assert len(set(owners)) > 1, "the outermost axis stays within a process"
        metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", **case.fields)
        check_processes(mesh, {name: metadata})
        found |= {f"{name}.{key}": value for key, value in train(case, metadata, mesh).items()}
        if name in DECODED:
            found[f"{name}.decoded"] = decode(metadata, mesh)
    np.savez(result, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
