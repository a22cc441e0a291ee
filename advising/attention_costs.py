"""attention_costs: what a planned call of attention costs, by the tiles that its mask leaves and what its strategy sends."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp

from ..planning import Plan
from ..planning.placed_tensors import all_axes, axes_by_dim, placed_tensors, sent_itemsize
from ..planning.traffic import Need, min_traffic
from .compute_time import compute_time
from .costs import PassCost, PlanCosts
from .machine import Machine
from .tiles import kernels_of_pass

__all__ = ["attention_costs"]


@functools.lru_cache(maxsize=64)
def attention_costs(plan: Plan, machine: Machine, around: tuple[Need, ...]) -> PlanCosts:
    """See PlanCosts. around: what the backward pass sends besides, for projections around the call."""
    backward, steps = plan.problem.mode == "__train__", len(plan.placement.sequence.steps) or 1
    forward = min_traffic(plan, False)
    work = compute_time(machine, plan, kernels_of_pass(plan, False))
    passes = [PassCost("forward", work, forward.needs, forward.unknown, steps)]
    if backward:
        both = min_traffic(plan, True)
        rest, unknown = (*both.needs[len(forward.needs) :], *around), both.unknown[len(forward.unknown) :]
        work = compute_time(machine, plan, kernels_of_pass(plan, True))
        passes.append(PassCost("backward", work, rest, unknown, steps))
    return PlanCosts(tuple(passes), *_operands(plan, backward), _strategy_bytes(plan, machine, backward))


def _operands(plan: Plan, backward: bool) -> tuple[int, int]:
    """Bytes of (arguments, results) per device; for both passes with the outputs' gradients and all others."""
    problem, placement = plan.problem, plan.placement
    sizes = {axis.name: axis.size for axis in problem.mesh}
    inputs = outgoing = gradients = 0
    for tensor in placed_tensors(problem, placement):
        bytes_ = tensor.call_bytes(sizes)
        inputs += bytes_
        gradients += bytes_ if tensor.gradient else 0
    parts = math.prod(sizes[a] for a in all_axes(axes_by_dim(placement.spec("output"), 4)))
    outgoing += math.prod(problem.shape_of("output")) * problem.itemsize_of("output") // parts
    if "return_lse" in problem.features:
        wide = jnp.dtype(problem.softmax_dtype).itemsize
        split = math.prod(sizes[a] for a in all_axes(axes_by_dim(placement.spec("lse"), 3)))
        outgoing += problem.batch * problem.q_heads * problem.q_len * wide // split
    return (inputs + outgoing, outgoing + gradients) if backward else (inputs, outgoing)


def _strategy_bytes(plan: Plan, machine: Machine, backward: bool) -> int:
    """Bytes that the strategy holds besides operands and results: gathered keys, keys received around a ring, exchanged
    tensors; backward the gradients of these too, around a ring in float32."""
    problem, split, local = plan.problem, plan.placement.sequence, plan.placement.local
    item = sent_itemsize(problem.runtime_dtype, machine.platform == "cpu")
    width, rows = problem.token_dim, local.batch * local.q_heads * local.q_len * split.chunks
    keys = local.batch * local.kv_heads * local.kv_len * split.chunks * width
    size = 0
    if split.gathers:
        size += keys * item
    if split.head_axes:
        size += keys * item + rows * problem.head_dim * item
    if split.ring_axes:
        size += keys * item
    if backward and split.strategy:
        size += keys * (4 if split.ring_axes else item)
    if plan.route is not None and plan.route.whole:
        size += local.batch * local.q_heads * local.q_len * local.kv_len * jnp.dtype(problem.softmax_dtype).itemsize
    return size
