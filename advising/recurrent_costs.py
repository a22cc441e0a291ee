"""recurrent_costs: what a planned call of a recurrence costs, by the operations of its chunks and what passes states on."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..planning.recurrent.exchange import ALL_GATHER
from ..planning.recurrent.traffic import maps_of, recurrence_traffic
from ..planning.tables.table_plan import TablePlan
from ..planning.traffic import Need
from .compute_time import ComputeTime
from .costs import PassCost, PlanCosts
from .machine import Machine

__all__ = ["recurrent_costs"]

_BACKWARD = 2  # times the operations of the forward pass: two products for each of its own


def recurrent_costs(plan: TablePlan, machine: Machine, around: tuple[Need, ...] = ()) -> PlanCosts:
    """See PlanCosts. The work is the longer of the chunks' operations and of reading and writing every array once, at the
    published rates."""
    operation: Any = plan.operation
    problem, placement, backward = plan.problem, plan.placement, plan.problem.mode == "__train__"
    results = {"attention_outputs", "state"}
    smooth = {
        x.name for x in problem.operands if x.operand.gradient and jnp.issubdtype(jnp.dtype(x.dtype), jnp.floating)
    }

    def size(names: set[str]) -> int:
        return sum(x.local_bytes for x in placement.tensors if x.tensor in names)

    given, returned, gradients = size({x.name for x in problem.operands}), size(results), size(smooth)
    forward = recurrence_traffic(operation, problem, placement, False)
    flops = operation.flops(plan)
    passes = [PassCost("forward", _work(machine, plan, flops, given + returned), forward.needs, forward.unknown)]
    if backward:
        both = recurrence_traffic(operation, problem, placement, True)
        needs, unknown = (*both.needs[len(forward.needs) :], *around), both.unknown[len(forward.unknown) :]
        work = _work(machine, plan, _BACKWARD * flops, given + returned + gradients)
        passes.append(PassCost("backward", work, needs, unknown))
    ends = (given + returned, returned + gradients) if backward else (given, returned)
    return PlanCosts(tuple(passes), *ends, _held(operation, plan, backward))


def _work(machine: Machine, plan: TablePlan, flops: float, moved: float) -> ComputeTime:
    dtype = plan.problem.input_dtype
    if machine.cpu is not None:
        return ComputeTime(np.array([[flops / machine.cpu.flops_per_second]]), "products")
    assert machine.limits is not None
    products, hbm = machine.limits.roofline(flops, moved, dtype, dtype == "float32")
    return ComputeTime(np.array([[max(products, hbm)]]), "products" if products >= hbm else "HBM")


def _held(operation: Any, plan: TablePlan, backward: bool) -> int:
    """Maps that are exchanged, tokens that are gathered and, for the backward pass, a state for each chunk."""
    problem, placement = plan.problem, plan.placement
    sizes = {axis.name: axis.size for axis in problem.mesh}
    devices, maps = math.prod(sizes[axis] for axis in placement.over), maps_of(operation, placement)
    held = 0
    if placement.strategy == "state":
        held += sum(maps) * (devices if placement.exchange == ALL_GATHER else 2)
    elif placement.over:
        split = (x for x in placement.tensors if "q_len" in x.dims and x.axes(x.dims.index("q_len")))
        held += devices * sum(x.local_bytes for x in split)
    if backward:
        tokens = problem.size["q_len"] // (devices if placement.strategy == "state" else 1)
        held += maps.constant * (tokens // operation.chunk_of(plan.config))
    return held
