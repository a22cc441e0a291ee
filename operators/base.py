"""Operation: a name, a config class and forward methods; describe -> plan -> place -> run -> return.

A subclass writes `forward_native`, which runs anywhere, and `forward_tpu`, `forward_gpu`, `forward_cuda`,
`forward_rocm`, `forward_cpu` only where there is something better. Each is declared with @implementation.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Never

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, get_abstract_mesh

from ..errors import ConfigError, FallbackWarning, InputError, InputTypeError
from ..masks import Mask
from ..registry import (
    AttentionProblem,
    OperationMetadata,
    Placement,
    Plan,
    PlannedOperation,
    plan,
)
from ..registry.other_names import takes_no_more
from ..sharding import current_mesh, describe_mesh, devices_platform, place
from ..sharding.mesh import AnyMesh
from .arguments import Arrays, Options, refuse_arguments, split_arguments
from .call_devices import explain_devices
from .describe import describe, varying_axes
from .execute import execute
from .local import LocalOutput
from .mask_notes import value_notes
from .output import AttentionOutput

__all__ = ["Operation"]

_CACHED_CALLS = 512
_warned: set[AttentionProblem] = set()
_warn_lock = threading.Lock()


class Operation(PlannedOperation):
    """Base class of attention operations. `Operation(metadata)(query, key, value, ...)` runs one."""

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        if metadata is not None and not isinstance(metadata, OperationMetadata):
            raise ConfigError(
                f"{type(self).__name__}({type(metadata).__name__}): wanted an OperationMetadata; make one with "
                "OperationMetadata(...), .from_config(config) or .from_json(text)."
            )
        self.metadata = OperationMetadata() if metadata is None else metadata
        self._calls: dict[Any, tuple[Plan, Callable[[Arrays], LocalOutput], Mesh | None]] = {}

    # -- calling -----------------------------------------------------------------------------------------------------

    @takes_no_more
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | jax.Array | None = None,
        bias: jax.Array | None = None,
        causal: bool | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        q_segment_ids: jax.Array | None = None,
        kv_segment_ids: jax.Array | None = None,
        kv_lengths: jax.Array | None = None,
        query_offset: int | jax.Array | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        softmax_aux: jax.Array | None = None,
        key_scale: jax.Array | None = None,
        value_scale: jax.Array | None = None,
        dropout_prob: float | None = None,
        dropout_rng: jax.Array | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
        return_lse: bool = False,
        mode: str | None = None,
        layout: str = "bthd",
        **unknown: Never,
    ) -> AttentionOutput:
        """Attend.

        Shapes: query [batch, q, heads, dim], key [batch, kv, kv_heads, dim], value [batch, kv, kv_heads, value_dim] in
        layout bthd; bhtd swaps time and heads; thd drops the batch. See docs/semantics.md for every argument.
        Errors: InputError, InputTypeError (bad arguments), ShardingError (strict specs), RefusedError (nothing can run
        it). Warns FallbackWarning once per distinct problem where the platform's own method refuses.
        """
        if unknown:
            refuse_arguments(unknown)
        arrays, options = split_arguments(
            query, key, value, mask=mask, bias=bias, causal=causal, sliding_window=sliding_window,
            q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids, kv_lengths=kv_lengths, query_offset=query_offset,
            softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, softmax_aux=softmax_aux, key_scale=key_scale,
            value_scale=value_scale, dropout_prob=dropout_prob, dropout_rng=dropout_rng, deterministic=deterministic,
            return_weights=return_weights, return_lse=return_lse, mode=mode, layout=layout,
        )  # fmt: skip
        mesh = self._mesh()
        signature = (mesh, options, *(_signature(x) for x in arrays[:-1]), *(_signature(x) for x in arrays.mask_leaves))
        found = self._calls.get(signature)
        if found is None:
            found = self._prepare(arrays, options, mesh)
            if len(self._calls) >= _CACHED_CALLS:
                self._calls.clear()
            self._calls[signature] = found
        decided, run, devices = found
        if devices is not None:
            arrays = _on_devices(arrays, decided.placement, devices)
        try:
            result = run(arrays)
        except ValueError as error:
            explain_devices(arrays, error)
            raise
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise InputTypeError(
                f"{decided.implementation} has no forward-mode derivative (jax.jvp, jax.jacfwd) on this route; use reverse "
                "mode, or 'vanilla' with operation_configs={'vanilla': {'path': 'plain'}}."
            ) from error
        return AttentionOutput(result.output, result.weights, result.lse, plan=decided)

    @takes_no_more
    def plan(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        causal: bool | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        q_segment_ids: Any = None,
        kv_segment_ids: Any = None,
        kv_lengths: Any = None,
        query_offset: Any = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        softmax_aux: Any = None,
        key_scale: Any = None,
        value_scale: Any = None,
        dropout_prob: float | None = None,
        dropout_rng: Any = None,
        deterministic: bool = True,
        return_weights: bool = False,
        return_lse: bool = False,
        mode: str | None = None,
        layout: str = "bthd",
        **unknown: Never,
    ) -> Plan:
        """Return the plan of the same call, made from arrays or ShapeDtypeStructs; nothing runs.

        A plan of kind 'refused' is returned, not raised.
        """
        if unknown:
            refuse_arguments(unknown)
        arrays, options = split_arguments(
            query, key, value, mask=mask, bias=bias, causal=causal, sliding_window=sliding_window,
            q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids, kv_lengths=kv_lengths, query_offset=query_offset,
            softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, softmax_aux=softmax_aux, key_scale=key_scale,
            value_scale=value_scale, dropout_prob=dropout_prob, dropout_rng=dropout_rng, deterministic=deterministic,
            return_weights=return_weights, return_lse=return_lse, mode=mode, layout=layout,
        )  # fmt: skip
        decided = self._plan(arrays, options, self._mesh())
        problem = decided.problem
        # Not in describe: a call's plan is kept for all calls of its shapes, whatever values come.
        notes = value_notes(decided.notes, problem.mask, arrays.mask_leaves, problem.q_len, problem.kv_len)
        return decided if notes == decided.notes else replace(decided, notes=notes)

    def explain(self, query: Any, key: Any, value: Any, **call: Any) -> str:
        """Return the plan of the same call as text. Takes what `plan` takes; an unknown argument is a TypeError there."""
        return self.plan(query, key, value, **call).explain()

    # -- the way of a call -------------------------------------------------------------------------------------------

    def _mesh(self) -> AnyMesh | None:
        """The caller's manual mesh if this runs inside a shard_map, else the declared mesh, else the context's.

        Where the declared mesh and that of jax.set_mesh are the same but for their axis types, the context's is in force:
        jax takes no other inside it.
        """
        current = current_mesh()
        declared = self.metadata.declared_mesh
        if declared is None or current is None:
            return current if declared is None else declared
        if isinstance(current, AbstractMesh) and current.manual_axes:
            return current
        same = declared.axis_names == current.axis_names and declared.axis_sizes == current.axis_sizes
        kinds = {devices_platform(m) for m in (declared, current)} - {None}
        return current if same and len(kinds) <= 1 and not get_abstract_mesh().empty else declared

    def _plan(self, arrays: Arrays, options: Options, mesh: AnyMesh | None) -> Plan:
        return plan(describe(type(self), self.metadata, arrays, options, mesh), self.metadata.policy)

    def _prepare(
        self, arrays: Arrays, options: Options, mesh: AnyMesh | None
    ) -> tuple[Plan, Callable[[Arrays], LocalOutput], Mesh | None]:
        decided = self._plan(arrays, options, mesh).require()
        self._warn(decided)
        tracing = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arrays)):
            raise InputTypeError("a ShapeDtypeStruct has no values to attend with; pass arrays, or call plan().")
        if isinstance(mesh, AbstractMesh) and not mesh.manual_axes and not tracing:
            raise InputError(
                f"mesh {describe_mesh(mesh)} has no devices, so this can be planned and lowered but not run; give a Mesh of "
                "devices."
            )
        context, problem = get_abstract_mesh(), decided.problem
        if mesh is not None and not context.empty and not context.manual_axes and problem.devices > 1:
            ours = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
            if (ours.axis_names, ours.axis_sizes) != (context.axis_names, context.axis_sizes):
                raise InputError(
                    f"declared mesh {describe_mesh(mesh)}, but the context's (jax.set_mesh) is {describe_mesh(context)}, and "
                    "jax takes no other inside it; declare none, or the same."
                )
        if not tracing and mesh is None and not _here(problem.platform):
            raise InputError(
                f"planned for {problem.platform} (from {problem.platform_source}), but this process runs on "
                f"{jax.default_backend()}; leave that out to run here, or plan() it and lower it for {problem.platform}."
            )
        run = jax.jit(partial(execute, self, decided, mesh, options))
        return decided, run, mesh if isinstance(mesh, Mesh) else None

    def _warn(self, decided: Plan) -> None:
        if decided.kind != "fallback" or decided.policy.fallback != "warn":
            return
        with _warn_lock:
            if decided.problem in _warned:
                return
        warnings.warn(
            f"{decided.implementation} runs instead of the platform's own method.\n{decided.refusal()}\n"
            "Declare fallback='allow' to accept this, fallback='error' to forbid it.",
            FallbackWarning,
            stacklevel=4,
        )
        with _warn_lock:
            _warned.add(decided.problem)  # afterwards: a warning that was made an error is raised each time


def _here(platform: str) -> bool:
    """Whether this process's default devices are of a platform."""
    return jax.default_backend() == ("gpu" if platform in ("cuda", "rocm") else platform)


def _signature(x: Any) -> Any:
    """What a plan can depend on of an array: shape and dtype; inside shard_map also the axes over which it varies."""
    if x is None:
        return None
    if isinstance(x, jax.core.Tracer):
        return x.shape, x.dtype, varying_axes(x)
    if isinstance(x, np.ndarray):
        return x.shape, jax.dtypes.canonicalize_dtype(x.dtype)  # depends on jax_enable_x64
    shape = getattr(x, "shape", None)  # of what is no array, it may be anything, and describe refuses it
    return shape if type(shape) is tuple else type(x), getattr(x, "dtype", None)


def _concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _on_devices(arrays: Arrays, placement: Placement, mesh: Mesh) -> Arrays:
    """Move concrete arrays that were committed to other devices to the mesh's, laid out as they are wanted there."""
    if not any(_concrete(x) and x.committed for x in jax.tree.leaves(arrays)):
        return arrays

    def put(name: str, x: Any) -> Any:
        return place(x, placement.given(name, x.shape), mesh) if _concrete(x) else x

    moved = {name: put(name, x) for name, x in arrays._asdict().items() if name != "mask_leaves"}
    return Arrays(**moved, mask_leaves=tuple(put("", x) for x in arrays.mask_leaves))
