"""StepOperation: what every operation over the pages of a declared KV cache does: plans its steps, prepares and runs them."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any, ClassVar

import jax
from jax.sharding import get_abstract_mesh

from ...errors import InputError, ShardingWarning, warn_caller
from ...masks.int_arrays import known_values
from ...planning import Policy, Reason, plan
from ...planning.cache.kv_cache import KVCache
from ...planning.notes import note
from ...planning.paged.page_reads import page_reads
from ...planning.paged.paged_plan import PagedPlan
from ...planning.paged.paged_problem import PagedProblem
from ...planning.paged.step_operands import RESULTS_OF_STEPS, STEP_OPERANDS
from ...planning.paged.steps import STEPS
from ...planning.repeated import named_axes
from ...planning.tune_cache import cache_generation
from ...registry import OperationMetadata
from ...sharding import Operand, describe_mesh
from ...sharding.mesh import AnyMesh
from ..call.current_device import current_device
from ..call.declared import DeclaredOperation, signature
from ..call.program import Program, attention
from ..choices.bounded_cache import BoundedCache
from ..paged_cache.attend import check_longest, default_scale
from ..paged_cache.batch import RaggedBatch
from ..paged_cache.check_visibility import check_visibility
from ..paged_cache.insert import check_step
from ..paged_cache.join_shards import check_mesh
from ..paged_cache.state import CacheState, alone
from .describe_step import LayerPlace, describe_step
from .run_step import StepInputs, run_step
from .step_arguments import Step, StepArrays
from .step_reasons import step_reasons

__all__ = ["POLICY_OF_SEQUENCES", "StepOperation"]

POLICY_OF_SEQUENCES = ("sequence_parallel", "ring_order", "scan_ring_attention")  # that steps don't read

_wide = operator.attrgetter("jax_enable_x64")  # decides the dtype of a float64 array
_prepared: BoundedCache[PagedPlan] = BoundedCache(512)  # for all operations: equal ones share their plans


class StepOperation(DeclaredOperation):
    """Base class of operations over the pages of a declared KV cache. A subclass has the call, the plan and its text."""

    keys_in = "pages"
    planner = STEPS
    operands = STEP_OPERANDS
    results: ClassVar[tuple[Operand, ...]] = RESULTS_OF_STEPS
    # The names of the arrays by token, of which the last two are written to the pages.
    token_names: ClassVar[tuple[str, str, str]] = ("query", "key", "value")
    # Whether the heads of the query are summed over, so that none of them are split.
    sums_heads: ClassVar[bool] = False

    @classmethod
    def default_scale(cls, cache: KVCache) -> float:
        """The scale of the logits if none is declared."""
        return default_scale(cache)

    @classmethod
    def computed_in(cls, metadata: OperationMetadata, input_dtype: str) -> tuple[str, str, list[str]]:
        """(the dtype of queries, that of the softmax or the scores, notes on what isn't read)."""
        notes: list[str] = []
        runtime = input_dtype if metadata.runtime_dtype is None else metadata.runtime_dtype.name
        if runtime != input_dtype:
            notes.append(note("paged.cast", given=input_dtype, runtime=runtime))
        if metadata.dropout_prob > 0:
            notes.append(note("dropout.serving", probability=metadata.dropout_prob))
        for name in POLICY_OF_SEQUENCES:
            if (declared := getattr(metadata.policy, name)) != getattr(Policy(), name):
                notes.append(note("paged.policy_unread", name=name, value=declared))
        return runtime, metadata.runtime_softmax_dtype.name, notes

    # -- the steps of a call ------------------------------------------------------------------------------------------

    def _run(
        self,
        state: CacheState,
        layer: int,
        batch: RaggedBatch,
        tokens: tuple[Any, Any, Any],
        step: Step,
        step_arrays: StepArrays,
    ) -> tuple[PagedPlan, tuple[Any, ...]]:
        """(the plan, what `run_program` returns, whose last is the whole state) of a step."""
        layer_state = alone(state, layer, batch)
        pages, place = layer_state.only_pages, _place(state.cache, int(layer))
        mesh = self._mesh()
        arrays = (*tokens, *step_arrays.flat, pages, batch)
        request = (
            self,
            mesh,
            current_device(jax.tree.leaves(arrays)) if mesh is None else get_abstract_mesh(),
            state.cache,
            place,
            step,
            cache_generation(),
            _wide(jax.config),
            *map(signature, (*tokens, *step_arrays.flat)),
        )
        decided = _prepared.find(request)
        if decided is None:
            decided = self._prepare(state.cache, place, tokens, step_arrays, step, mesh, arrays)
            _prepared.put(request, decided)
        _check_pages(decided, state, pages, mesh)
        query, key, value = tokens
        counted = key if query is None else query
        layer_state = replace(layer_state, cache=state.cache.part(place.group, decided.cache.pages))
        check_step(layer_state, 0, batch, counted, debug=False, writes=decided.problem.update != "none")
        check_longest(batch, step.max_q_len, debug=False)
        check_visibility(batch, step_arrays, layer_state.cache.window_tokens, debug=False)
        # One layer, so that all layers of a group share a program.
        program = Program(self, decided, mesh, step.debug)
        *results, after = attention(program, StepInputs(layer_state, batch, query, key, value, step_arrays))
        return decided, (*results, state.with_layer(layer, after.only_pages))

    def _planned(
        self,
        declared: KVCache,
        layer: int | None,
        batch: RaggedBatch | None,
        tokens: tuple[Any, Any, Any],
        step: Step,
        step_arrays: StepArrays,
    ) -> PagedPlan:
        """The plan of a step that doesn't run."""
        if layer is None and len(declared.groups) > 1:
            raise InputError(
                f"the cache's layers are in {len(declared.groups)} groups; specify the step's layer, such as layer=0."
            )
        place = _place(declared, 0 if layer is None else layer)
        mesh = self._mesh()
        decided = self._plan(declared, place, tokens, step_arrays, step, mesh, (*tokens, *step_arrays.flat))
        has_values = batch is not None and all(known_values(x) is not None for x in jax.tree.leaves(batch))
        by_value = {"selected", "spans", "prefix_lengths"}  # on which the pages that are read depend
        if not has_values or by_value & decided.problem.features:
            return decided
        return replace(decided, reads=page_reads(decided.problem, batch))

    def _plan(
        self,
        cache: KVCache,
        place: LayerPlace,
        tokens: tuple[Any, Any, Any],
        step_arrays: StepArrays,
        step: Step,
        mesh: AnyMesh | None,
        arrays: Any,
    ) -> PagedPlan:
        problem = describe_step(type(self), self.metadata, cache, place, tokens, step_arrays, step, mesh, arrays)
        decided: PagedPlan = plan(type(self), problem, self.metadata.policy)
        return decided

    def _prepare(
        self,
        cache: KVCache,
        place: LayerPlace,
        tokens: tuple[Any, Any, Any],
        step_arrays: StepArrays,
        step: Step,
        mesh: AnyMesh | None,
        arrays: Any,
    ) -> PagedPlan:
        decided = self._ready(self._plan(cache, place, tokens, step_arrays, step, mesh, arrays), arrays, mesh)
        axes = named_axes(self.metadata.partition_axis)
        idle = tuple(f"{a.name}={a.size}" for a in decided.cache.idle_axes if a.name not in axes)
        if idle:
            _warn_of_idle(self.name, idle)
        return decided

    def run_program(self, program: Program, inputs: StepInputs) -> Any:
        """Run a planned step; traceable."""
        return run_step(program, inputs)

    # -- what planning uses ------------------------------------------------------------------------------------------

    @classmethod
    def reasons_against(cls, method: str, problem: PagedProblem) -> tuple[Reason, ...]:
        """Every reason against a method: missing features, rules that fail, the layout that a name stands for."""
        runs = cls.implementation(method)
        reasons = step_reasons(problem, method, runs.capability.consumes, cls.name, cls.cache_layout)
        reasons += runs.reasons(problem)
        config = runs.declared(problem.config)
        reasons += [r for rule in runs.capability.rules if (r := rule.check(problem, config)) is not None]
        return tuple(reasons)


def _place(cache: KVCache, layer: int) -> LayerPlace:
    group, source = cache.group_of(layer), cache.layer_read(layer)
    return LayerPlace(group, None if source == layer else source)


def _check_pages(decided: PagedPlan, state: CacheState, pages: Any, mesh: AnyMesh | None) -> None:
    """Refuse a state made for a different mesh than the one in force."""
    if mesh is not None and any(axis.kind == "manual" for axis in decided.problem.mesh):
        return  # inside the caller's own shard_map: these are a device's parts
    planned_shape = decided.cache.pages_array.fitted.shape
    check_mesh(state, decided.cache)
    if pages.key.shape != planned_shape:
        raise InputError(
            f"the state's pages have shape {pages.key.shape}; on the mesh {describe_mesh(decided.problem.mesh)} they are "
            f"{planned_shape}: make the state with init(cache, mesh) of the operation's mesh and kv_heads policy."
        )


@functools.lru_cache(maxsize=256)
def _warn_of_idle(name: str, axes: tuple[str, ...]) -> None:
    warn_caller(
        f"{name}: {', '.join(axes)} of the mesh split nothing of the cache: all their devices do the same work. Declare "
        "pages_axis, kv_head_axis or page_sequence_axis of the cache for them. strict=True refuses such steps.",
        ShardingWarning,
    )
