"""Operation: a name, a config class and forward methods; describe -> plan -> place -> run -> return.

A subclass defines `forward_native`, which runs anywhere, and `forward_tpu`, `forward_gpu`, `forward_cuda`, `forward_hopper`,
`forward_blackwell`, `forward_rocm`, `forward_cpu` only where there is something better. Each is declared with @implementation.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import jax
from jax.sharding import Mesh, get_abstract_mesh

from ...call_arguments import CallArguments, CallArray
from ...errors import MaskWarning, ShardingWarning, warn_caller
from ...planning import Plan, plan
from ...planning.calls import CALLS
from ...planning.repeated import RepeatedAxis, repeated_lines, unintended_repeats
from ...planning.sequence.choice import declared_strategy
from ...planning.tune_cache import cache_generation
from ...registry import OperationMetadata
from ...sharding import MeshAxis, place
from ...sharding.mesh import AnyMesh
from ..choices.bounded_cache import BoundedCache
from ..notes.mask_notes import causal_by_default, hides_later_keys, value_notes
from ..notes.placement_notes import moved_notes
from .arguments import split_arguments
from .arrays import Arrays
from .call_devices import explain_devices
from .call_values import checked_values
from .current_device import current_device
from .declared import DeclaredOperation, signature
from .describe import describe
from .local import LocalOutput
from .options import Options, takes_call_arguments
from .output import AttentionOutput
from .program import Program, attention
from .same_arguments import explained

__all__ = ["Operation"]


class _Prepared(NamedTuple):
    """What is decided for a call before its arrays' values are read. devices: where committed arrays are moved, if at all.
    unsplit: mesh axes of the batch that split nothing of the call, but could split calls that jax.vmap maps."""

    plan: Plan
    program: Program
    devices: Mesh | None
    unsplit: tuple[MeshAxis, ...]


# For all operations: equal ones share their plans. Compiled programs are in jax's own cache.
_prepared: BoundedCache[_Prepared] = BoundedCache(1024)
_warned_calls: BoundedCache[bool] = BoundedCache(1024)  # operations and axes of which a warning was given
_wide = operator.attrgetter("jax_enable_x64")  # includes what a context manager has set; missing from jax's types


class Operation(DeclaredOperation):
    """Base class of attention operations. `Operation(metadata)(query, key, value, ...)` runs one."""

    planner = CALLS
    convention = "attnops"

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        declared_strategy(type(self), self.metadata.policy.sequence_parallel)  # raises for a contradiction

    # -- calling -----------------------------------------------------------------------------------------------------

    @takes_call_arguments
    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]
    ) -> AttentionOutput:
        """Attend.

        Shapes: query [batch, q, heads, dim], key [batch, kv, kv_heads, dim], value [batch, kv, kv_heads, value_dim] in
        layout bthd; bhtd swaps time and heads; thd drops the batch. See docs/semantics.md for every argument.
        Errors: InputError, InputTypeError (bad arguments), ShardingError (strict specs), RefusedError (nothing can run
        it). Warns FallbackWarning once per distinct problem where the platform's own method refuses, ShardingWarning once per
        operation and mesh axis where devices repeat work though a split is declared, and MaskWarning once per distinct problem
        where `causal`, by default, hides keys that an array mask shows.
        """
        arrays, options = split_arguments(query, key, value, call, self.operands)
        if call:
            arrays = checked_values(arrays, options, self.operands)
        mesh = self._mesh()
        leaves = [*arrays.by_name.values(), *arrays.mask_leaves]
        # Everything that planning and its checks read; jax itself caches compiled programs.
        call_key = (
            self,
            mesh,
            current_device(leaves) if mesh is None else get_abstract_mesh(),
            options,
            _wide(jax.config),
            cache_generation(),
            *(arrays.by_name if call else ()),  # the names; without keywords those of query, key and value
            *map(signature, leaves),
            None if mesh is None else tuple(map(_place, leaves)),
        )
        prepared = _prepared.find(call_key)
        if prepared is None:
            prepared = self._prepare(arrays, options, mesh)
            _prepared.put(call_key, prepared)
        decided, program, devices, unsplit = prepared
        if unsplit and isinstance(arrays.query, jax.core.Tracer):
            decided, arrays = self._watched(decided, arrays, unsplit)
        if devices is not None:
            arrays = _on_devices(arrays, decided, devices)
        try:
            result = attention(program, arrays)
        except ValueError as error:
            explain_devices(arrays, error)
            _mapped_batch().explain_mapped_rows(self.name, error)
            raise
        return AttentionOutput(result.output, result.weights, result.lse, plan=decided)

    @takes_call_arguments
    def plan(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> Plan:
        """Return the plan of the same call, made from arrays or ShapeDtypeStructs; nothing runs.

        A plan of kind 'refused' is returned, not raised.
        """
        arrays, options = split_arguments(query, key, value, call, self.operands)
        arrays, mesh = checked_values(arrays, options, self.operands), self._mesh()
        decided = self._plan(arrays, options, mesh)
        # Not in describe: a plan is cached for all calls of its shapes, whatever their values and devices.
        notes = value_notes(decided.notes, decided.problem, arrays.mask_leaves)
        notes += moved_notes(decided, arrays, mesh)
        if notes != decided.notes:
            decided = replace(decided, notes=notes)
        unsplit = _mapped_batch().unsplit_batch_axes(decided)
        if unsplit and isinstance(arrays.query, jax.core.Tracer):
            decided, _ = self._watched(decided, arrays, unsplit)
        return decided

    explain = explained(plan)

    # -- the steps of a call -----------------------------------------------------------------------------------------

    def _plan(self, arrays: Arrays, options: Options, mesh: AnyMesh | None) -> Plan:
        operation = type(self)
        decided = plan(operation, describe(operation, self.metadata, arrays, options, mesh), self.metadata.policy)
        return decided if mesh is None else replace(decided, mesh=mesh)

    def _prepare(self, arrays: Arrays, options: Options, mesh: AnyMesh | None) -> _Prepared:
        decided = self._ready(self._plan(arrays, options, mesh), arrays, mesh)
        unintended = unintended_repeats(decided.placement.repeated, self.metadata.partition_axis)
        if unintended:
            _warn_of_repeats(self.name, unintended)
        problem = decided.problem
        if causal_by_default(options, self.metadata.causal) and hides_later_keys(problem, arrays.mask_leaves[0]):
            _warn_of_causal(self.name, tuple(arrays.mask_leaves[0].shape))
        program = Program(self, decided, mesh, options)
        notes = moved_notes(decided, arrays, mesh)
        if notes:
            decided = replace(decided, notes=(*decided.notes, *notes))
        devices = mesh if isinstance(mesh, Mesh) else None
        return _Prepared(decided, program, devices, _mapped_batch().unsplit_batch_axes(decided))

    def run_program(self, program: Program, arrays: Arrays) -> LocalOutput:
        """Run a planned call; traceable."""
        from .execute import execute  # with all that runs a call, which a plan doesn't need

        decided: Any = program.plan
        return execute(self, decided, program.mesh, program.options, arrays)  # type: ignore[arg-type]

    def _watched(self, decided: Plan, arrays: Arrays, axes: tuple[MeshAxis, ...]) -> tuple[Plan, Arrays]:
        """A traced call's plan with a note of what jax.vmap maps, and its arrays, which warn if that isn't split over `axes`."""
        query, mapped = _mapped_batch().watch_mapped(arrays.query, self.name, axes)
        note = _mapped_batch().mapped_note(decided.problem, axes, mapped)
        return replace(decided, notes=(*decided.notes, note)) if note else decided, arrays.changed(query=query)


def _mapped_batch() -> Any:
    """The module, which defines a primitive: jax.extend, where that is, comes with Pallas."""
    from . import mapped_batch

    return mapped_batch


@functools.lru_cache(maxsize=1024)
def _warn_of_causal(name: str, shape: tuple[int, ...]) -> None:
    warn_caller(
        f"{name}: the array mask {list(shape)} shows queries later keys, but causal hides them: it is the metadata's default and "
        "applies to arrays. Pass causal=False if the array is the whole mask, or causal=True if both apply.",
        MaskWarning,
    )


def _warn_of_repeats(name: str, repeated: tuple[RepeatedAxis, ...]) -> None:
    key = name, tuple((axis.axis, axis.cause) for axis in repeated)  # prompts of many lengths give one warning
    if _warned_calls.find(key) is not None:
        return
    lines = "\n".join(f"  {line}" for line in repeated_lines(repeated))
    warn_caller(
        f"{name}: devices of the mesh repeat each other's work.\n{lines}\nDeclare strict=True to refuse such calls.",
        ShardingWarning,
    )
    _warned_calls.put(key, True)


def _place(x: Any) -> Any:
    """What a plan's notes say about where an array is: its sharding, if it was specified."""
    if isinstance(x, jax.core.Tracer):
        return jax.typeof(x).sharding
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def _concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _on_devices(arrays: Arrays, decided: Plan, mesh: Mesh) -> Arrays:
    """Move concrete arrays that were committed to other devices to the mesh's, laid out as the plan requires."""
    if not any(_concrete(x) and x.committed for x in jax.tree.leaves(arrays)):
        return arrays

    def put(name: str, x: Any) -> Any:
        return place(x, decided.placement.call_spec(name, x.shape), mesh) if _concrete(x) else x

    moved = {name: put(name, x) for name, x in arrays.by_name.items()}
    # The mask argument's own arrays come first among those of the whole mask.
    leaves = zip(decided.problem.leaves, arrays.mask_leaves, strict=False)
    return Arrays(moved, tuple(put("mask" if leaf.name == "mask" else "", x) for leaf, x in leaves))
