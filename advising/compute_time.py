"""Seconds that one device works on its tiles: the longest of products, a weight's other work, and HBM traffic."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..devices import spec_of_kind
from ..planning import PassSizes, Plan
from ..verify.generations import clock_rate, vector_cycles
from ..verify.tile_counts import matrix_cycles
from ..verify.work import exact_products
from .machine import Machine
from .tiles import visible_blocks

__all__ = ["ComputeTime", "Rate", "compute_time", "rate_of"]

_LANES = 128
_STEP_CYCLES = 50  # per step of the grid: 41 to 64 in the schedules read (benchmarks/results/tpu_static.json)
# Until products and exponentials of a pipelined tile overlap, and after the last product: from tiles of 1024 and of 2048 keys.
_FILL_CYCLES = {"forward": 415, "backward": 200}
# Start and end of a row's sums, in weights: 195 to 280, and 30 to 80, in the same schedules.
_ROW_WEIGHTS = {"forward": 256, "backward": 32, "dkv": 64, "dq": 64}
_EXACT_PASSES = 6  # bfloat16 passes for a full-precision float32 product
# How often code other than a kernel reads or writes its weights in HBM: logits and weights are written and read once each;
# backward also the gradients of the logits and of the weights.
_WEIGHTS_MOVED = {"forward": 4, "backward": 8}


class Rate(NamedTuple):
    """One kernel's cost on one device: seconds of products and of other work per weight, per row of the queries, per tile;
    bytes of HBM per weight, per row of the queries and per key, for one head and batch row."""

    products: float
    vector: float
    row: float
    tile: float
    weight_bytes: float
    row_bytes: float
    key_bytes: float


class ComputeTime(NamedTuple):
    """Seconds by device of the sequence and hop, and what limits them: 'products', 'vector' or 'HBM'."""

    seconds: np.ndarray
    bound: str


def rate_of(machine: Machine, plan: Plan, kernel: PassSizes) -> Rate:
    """From the published rates of the device; see docs/advise.md."""
    problem = plan.problem
    d, dv = problem.head_dim, problem.value_dim
    flops = 2.0 * (kernel.head_dims * d + kernel.value_dims * dv)
    item = jnp.dtype(problem.runtime_dtype).itemsize
    exact = exact_products(plan)
    is_kernel = plan.kind == "platform"
    if machine.cpu is not None:
        cpu = machine.cpu
        return Rate(flops / cpu.flops_per_second, 1 / cpu.weights_per_second, 0.0, cpu.tile_seconds, 0.0, 0.0, 0.0)
    if machine.platform == "tpu":
        clock = clock_rate(machine.kind) * machine.cores
        min_cycles = matrix_cycles(machine.kind, kernel.products, _LANES, _LANES, d, dv) / _LANES**2
        vector = vector_cycles(machine.kind, kernel.products, kernel.block_kv, kernel.pipelined) / clock
        products = min_cycles * (_EXACT_PASSES if exact else 1) / clock
        d, dv = (math.ceil(n / _LANES) * _LANES for n in (d, dv))
        if is_kernel:
            moved = _moved(kernel, item, d, dv, 0 if problem.values_in_key else dv, kernel.heads)
            tile = _STEP_CYCLES + (_FILL_CYCLES[kernel.products] if kernel.pipelined else 0)
            return Rate(products, vector, _ROW_WEIGHTS[kernel.products] * vector, tile / clock, *moved)
        return Rate(products, vector, 0.0, 0.0, *_of_xla(plan, kernel, item))
    assert machine.limits is not None
    products = machine.limits.roofline(flops, 0.0, problem.runtime_dtype, exact)[0]
    spec = spec_of_kind(machine.kind)
    vector = 0.0 if spec is None else 1 / (spec.cores * spec.ex2_a_cycle * spec.clock)
    values = problem.token_dim - problem.head_dim
    moved = _once(kernel, item, d, dv, values, problem.group) if is_kernel else _of_xla(plan, kernel, item)
    return Rate(products, vector, 0.0, 0.0, *moved)


def compute_time(machine: Machine, plan: Plan, kernels: tuple[PassSizes, ...]) -> ComputeTime:
    """All kernels of a pass, one after the other, over all heads and batch rows of a device."""
    problem, local = plan.problem, plan.placement.local
    heads = local.batch * local.q_heads
    chunks = plan.placement.sequence.chunks
    total: np.ndarray | None = None
    bounds: dict[str, float] = {}
    for kernel in kernels:
        blocks, rate = visible_blocks(plan, kernel), rate_of(machine, plan, kernel)
        busy = blocks.weights > 0
        rows, keys = local.q_len * chunks * busy, local.kv_len * chunks * busy
        parts = {
            "products": heads * blocks.weights * rate.products,
            "vector": heads * (blocks.weights * rate.vector + rows * rate.row),
        }
        if machine.cpu is not None:  # one core does both, one after the other
            seconds = heads * (blocks.weights * (rate.products + rate.vector) + blocks.tiles * rate.tile)
        else:
            assert machine.limits is not None
            moved = heads * (blocks.weights * rate.weight_bytes + rows * rate.row_bytes + keys * rate.key_bytes)
            parts["HBM"] = moved * machine.limits.roofline(0.0, 1.0, problem.runtime_dtype, False)[1]
            products = parts["products"] + heads * rows * rate.row
            steps = heads * blocks.tiles * rate.tile
            seconds = np.maximum(np.maximum(products, parts["vector"]) + steps, parts["HBM"])
        total = seconds if total is None else total + seconds
        for name, part in parts.items():
            bounds[name] = bounds.get(name, 0.0) + float(part.sum())
    assert total is not None
    return ComputeTime(total, max(bounds, key=lambda name: bounds[name]))


def _moved(kernel: PassSizes, item: int, d: int, dv: int, values: int, share: int) -> tuple[float, float, float]:
    """HBM traffic of a kernel that fetches tiles at each step: what the fast axis holds is fetched again for every tile of the
    slow one. values: numbers of a value that aren't a part of its key."""
    if kernel.products == "dkv":  # by keys: queries and the output's gradient are fetched with every tile
        return (d + dv) * item / kernel.block_kv, 0.0, 2 * (d + values) * item
    fetched = (d + values) * item / kernel.block_q / share
    if kernel.products == "forward":
        return fetched, (d + dv) * item, 0.0
    sums = 4 * (d + values) if kernel.products == "backward" else 0
    return fetched, (d + dv) * item + 4 * d, float(sums)


def _once(kernel: PassSizes, item: int, d: int, dv: int, values: int, group: int) -> tuple[float, float, float]:
    """HBM traffic if every array moves once: a cache is assumed to hold what is used again."""
    if kernel.products == "forward":
        return 0.0, (d + dv) * item, (d + values) * item / group
    written = 2 if kernel.products in ("backward", "dkv") else 1
    return 0.0, (2 * d + dv) * item, written * (d + values) * item / group


def _of_xla(plan: Plan, kernel: PassSizes, item: int) -> tuple[float, float, float]:
    """Products and softmax are separate programs, with the weights between them in HBM."""
    problem = plan.problem
    wide = jnp.dtype(problem.softmax_dtype).itemsize
    keys = sum(
        size * (problem.itemsize_of(name) if name in problem.quantised else item)
        for name, size in (("key", problem.head_dim), ("value", problem.token_dim - problem.head_dim))
    )
    back = 1 if kernel.products == "forward" else 2
    rows = back * (problem.head_dim + problem.value_dim) * item
    return _WEIGHTS_MOVED[kernel.products] * wide, rows, back * keys / problem.group
