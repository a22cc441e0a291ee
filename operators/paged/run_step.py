"""run_step: what a planned step over pages does; equal steps of all layers share its program."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ...masks.page_mask import page_mask
from ...planning import PlannedOperation
from ..call.program import Program
from ..paged_cache.attend import attend
from ..paged_cache.batch import RaggedBatch
from ..paged_cache.insert import insert
from ..paged_cache.paged_call import PagedSizes
from ..paged_cache.state import CacheState
from .step_arguments import StepArrays

__all__ = ["StepInputs", "run_step"]


class StepInputs(NamedTuple):
    """The arrays of a step of one layer, which is the state's only one."""

    state: CacheState
    batch: RaggedBatch
    query: Any
    key: Any
    value: Any
    step_arrays: StepArrays


def written_when(operation: type[PlannedOperation], plan: Any) -> Literal["before", "fused", "none"]:
    """When a plan's tokens are written: 'fused' only if its method does that for such a step."""
    problem = plan.problem
    if problem.update != "fused":
        return "none" if problem.update == "none" else "before"
    writes = operation.capability(plan.method or "").writes_pages and not plan.runs.written_first(problem)
    return "fused" if writes else "before"


def run_step(program: Program, inputs: StepInputs) -> tuple[jax.Array | None, jax.Array | None, CacheState]:
    """(output, lse, the state after); traceable. The program's options are whether to check values (debug)."""
    plan, debug = program.plan, bool(program.options)
    state, batch, query, key, value, arrays = inputs
    problem, config = plan.problem, plan.config
    scales = {"key_scale": arrays.key_scale, "value_scale": arrays.value_scale}
    if problem.mode == "insert":
        return None, None, insert(state, 0, batch, key, value, **scales, debug=debug)
    mask = page_mask(problem.mask)
    assert mask is not None  # otherwise nothing would run it
    result = attend(
        state,
        0,
        batch,
        jnp.asarray(query, problem.runtime_dtype),
        key,
        value,
        **scales,
        update=written_when(type(program.operation), plan),
        mesh=program.mesh,
        kv_heads=plan.policy.kv_heads,
        softmax_scale=problem.softmax_scale,
        causal=mask.causal,
        sliding_window=mask.window,
        chunk_size=mask.chunk,
        logits_soft_cap=problem.logits_soft_cap,
        sinks=arrays.sinks,
        score=problem.score,
        captures=arrays.captures,
        selected=arrays.selected,
        draft_tree=arrays.draft_tree,
        spans=arrays.spans,
        prefix_lengths=arrays.prefix_lengths,
        q_positions=arrays.q_positions,
        max_q_len=problem.max_q_len,
        debug=debug,
        method=getattr(program.operation, plan.method or ""),
        platform=problem.platform,
        sizes=PagedSizes(**{name: getattr(config, name) for name in PagedSizes._fields if hasattr(config, name)}),
        check_vma=program.operation.capability(plan.method or "").check_vma,
    )
    return result.output, result.lse, result.state
