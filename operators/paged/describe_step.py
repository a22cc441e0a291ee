"""describe_step: turns a step over pages into a PagedProblem; shapes and dtypes are checked here, once per distinct step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...errors import InputError, InputTypeError, RefusedShardingError
from ...masks.page_mask import page_mask
from ...planning.cache.cache_plan import CachePlan
from ...planning.cache.kv_cache import KVCache
from ...planning.notes import note
from ...planning.paged.paged_problem import PagedProblem
from ...planning.score_operands import captured_names, score_rows
from ...registry import OperationMetadata
from ...sharding import OperandShape, axes_of
from ...sharding.mesh import AnyMesh
from ..api.declared_config import declared_config
from ..call.arrays import shaped
from ..call.planned_platform import planned_platform
from ..paged_cache.attend import check_written
from ..paged_cache.known_sizes import known_sizes
from ..paged_cache.stored_tokens import check_token_scale
from .step_arguments import Step, StepArrays
from .step_visibility import check_shapes

__all__ = ["LayerPlace", "describe_step"]

_FLOATS = ("float32", "bfloat16", "float16")


class LayerPlace(NamedTuple):
    """A layer's group, and the layer whose keys it reads, None for its own."""

    group: int
    reads: int | None = None


def describe_step(
    operation: Any,
    metadata: OperationMetadata,
    cache: KVCache,
    place: LayerPlace,
    tokens: tuple[Any, Any, Any],
    step_arrays: StepArrays,
    step: Step,
    mesh: AnyMesh | None,
    arrays: Any,
) -> PagedProblem:
    """Build the problem of a step over layers of one place. operation: a subclass of StepOperation. `tokens` are query, key and
    value, `arrays` all that may determine where it runs.

    Errors: InputError and InputTypeError give the argument, its value, what is wanted and a hint.
    """
    platform, kind, source = planned_platform(metadata, mesh, arrays)
    config, notes = declared_config(operation, metadata, platform)
    plan = cache.plan(mesh, kv_heads=metadata.policy.kv_heads, device_kind=kind or platform).groups[place.group]
    cache = cache.part(place.group, plan.pages)
    # A layer that reads another's keys has none to write, unless it is given some, which is refused by the plan.
    reads_only = place.reads is not None and tokens[1] is None and step.mode != "insert"
    update = str(step.update or ("none" if reads_only else getattr(config, "update", "before")))
    called = operation.token_names
    query, key, value = (None if x is None else shaped(n, x) for n, x in zip(called, tokens, strict=True))
    known_sizes(**dict(zip(called, (query, key, value), strict=True)))
    _check_arrays(step, update, query, key, value, latent=cache.values_in_keys)
    first = query if query is not None else key
    assert first is not None
    count, heads = first.shape[0], cache.kv_heads if query is None else query.shape[1]
    # Inside the caller's own shard_map heads are a device's part; attend checks them against its pages.
    parts = operation.sums_heads or any(axis.kind == "manual" for axis in axes_of(mesh))
    _check_tokens(cache, plan, count, called, (query, key, value), parts=parts)
    if metadata.policy.strict and plan.idle_axes:
        names = ", ".join(f"{axis.name}={axis.size}" for axis in plan.idle_axes)
        raise RefusedShardingError(
            f"strict: {names} of the mesh split nothing of the cache, so their devices do the same work; declare pages_axis, "
            "kv_head_axis or page_sequence_axis for them, or another mesh."
        )
    stored = []
    scales = ("key_scale", step_arrays.key_scale), ("value_scale", step_arrays.value_scale)
    for name, x, (scale_name, token_scale) in zip(called[1:], (key, value), scales, strict=True):
        if x is not None:
            check_token_scale(cache, name, x, token_scale)
            stored += [name] if x.dtype != jnp.dtype(cache.dtype) else []
        elif token_scale is not None:
            raise InputError(f"{scale_name} is given without {name}; wanted both, or neither.")
    if stored:
        notes.append(note("paged.stored_as_given", names=" and ".join(stored), dtype=cache.stored_dtype))
    if step_arrays.sinks is not None and (s := shaped("softmax_aux", step_arrays.sinks)).shape != (heads,):
        raise InputError(f"softmax_aux has shape {s.shape}; wanted [heads] = ({heads},): merge several with logsumexp.")
    check_shapes(step, step_arrays, count)
    scale = metadata.softmax_scale if step.softmax_scale is None else step.softmax_scale
    if scale is None:
        scale = operation.default_scale(cache)
    if not math.isfinite(scale):
        raise InputError(f"softmax_scale={scale}; wanted a finite number.")
    cap = step.logits_soft_cap
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise InputError(f"logits_soft_cap={cap}; wanted a positive number, or None for no cap.")
    input_dtype = cache.dtype if query is None else query.dtype.name
    runtime, softmax, remarks = operation.computed_in(metadata, input_dtype)
    notes += remarks
    if metadata.partition_axis != OperationMetadata().partition_axis:
        notes.append(note("paged.axes_unread"))
    required = {
        "logits_soft_cap": cap is not None,
        "sinks": step_arrays.sinks is not None,
        "score": step.score is not None,
        "selected": step_arrays.selected is not None,
        "draft_tree": step_arrays.draft_tree is not None,
        "spans": step_arrays.spans is not None,
        "prefix_lengths": step_arrays.prefix_lengths is not None,
        "positions": step_arrays.q_positions is not None,
        "return_lse": step.return_lse,
        "gqa": heads != cache.kv_heads,
        "value_dim": cache.value_size != cache.head_dim and not cache.values_in_keys,
        "latent_values": cache.values_in_keys,
        "rope_dtype": cache.rope_size > 0,
        "quantized_kv": cache.quantised is not None,
    }
    table = operation.operands
    return PagedProblem(
        operation=operation.name,
        config=config,
        cache=plan,
        tokens=count,
        q_heads=heads,
        input_dtype=input_dtype,
        key_dtype=cache.dtype if key is None else key.dtype.name,
        value_dtype=cache.dtype if value is None else value.dtype.name,
        runtime_dtype=runtime,
        softmax_dtype=softmax,
        mode=step.mode,
        update=update,
        reads_layer=place.reads,
        max_q_len=step.max_q_len,
        top_k=step.top_k,
        mask=step.mask,
        features=step.mask.features() | {name for name, is_required in required.items() if is_required},
        softmax_scale=scale,
        logits_soft_cap=cap,
        operands=tuple(
            OperandShape(table[name], tuple(x.shape[: len(table[name].dims)]), x.dtype.name)
            for name, x in (
                ("key_scale", step_arrays.key_scale),
                ("value_scale", step_arrays.value_scale),
                ("softmax_aux", step_arrays.sinks),
                ("selected", step_arrays.selected),
                ("index_weights", step_arrays.index_weights),
                ("spans", step_arrays.spans),
                ("prefix_lengths", step_arrays.prefix_lengths),
                ("q_positions", step_arrays.q_positions),
                ("draft_tree", step_arrays.draft_tree),
            )
            if x is not None
        )
        + _captures(step, step_arrays, heads),
        score=step.score,
        mesh=axes_of(mesh),
        platform=platform,
        device_kind=kind,
        platform_source=source,
        notes=tuple(notes) + _causal_notes(step),
    )


def _captures(step: Step, step_arrays: StepArrays, heads: int) -> tuple[OperandShape, ...]:
    """The score's arrays. Errors: InputError for another shape than their dims have."""
    if step.score is None:
        return ()
    captures = [shaped(name, x) for name, x in zip(captured_names(step.score), step_arrays.captures, strict=True)]
    table = score_rows(step.score.structure(), tuple(len(x.shape) for x in captures))
    sizes = {"heads": heads, **dict(size for capture in step.score.captures() for size in capture.sizes)}
    operands = []
    for row, x in zip(table, captures, strict=True):
        wanted = tuple(sizes.get(dim, n) for dim, n in zip(row.dims, x.shape, strict=False))
        single = 1 if row.broadcasts else None
        if len(x.shape) != len(row.dims) or any(n not in (w, single) for n, w in zip(x.shape, wanted, strict=True)):
            raise InputError(f"{row.name} has shape {x.shape}; wanted [{', '.join(row.dims)}] = {wanted}.")
        operands.append(OperandShape(row, tuple(x.shape), x.dtype.name))
    return tuple(operands)


def _check_arrays(step: Step, update: str, query: Any, key: Any, value: Any, *, latent: bool) -> None:
    check_written(update, key, value, latent=latent)
    if query is None and step.mode != "insert":
        raise InputError(f"query is None in mode {step.mode!r}; pass it, or mode='insert' to only write.")
    if step.mode == "insert" and update == "none":
        raise InputError("mode 'insert' writes, but update is 'none'; wanted 'before'.")


def _check_tokens(
    cache: KVCache,
    plan: CachePlan,
    count: int,
    names: tuple[str, str, str],
    tokens: tuple[Any, Any, Any],
    *,
    parts: bool,
) -> None:
    """Check shapes and dtypes of the token arrays; heads may be as declared or as stored."""
    heads = {cache.kv_heads, plan.stored_heads}
    query = tokens[0]
    for name, x, dim in zip(names, tokens, (cache.head_dim, cache.head_dim, cache.value_size), strict=True):
        if x is None:
            continue
        if len(x.shape) != 3 or x.shape[2] != dim:
            raise InputError(f"{name} has shape {x.shape}; wanted [tokens, heads, {dim}], as the cache declares.")
        if x.shape[0] != count:
            raise InputError(f"{name} has {x.shape[0]} tokens and the query {count}; wanted the same number.")
        if x is not query and not parts and x.shape[1] not in heads:
            raise InputError(f"{name} has {x.shape[1]} heads; wanted {cache.kv_heads}, the cache's kv_heads.")
    if query is not None and query.dtype.name not in _FLOATS:
        raise InputTypeError(f"{names[0]} is {query.dtype}; wanted one of {', '.join(_FLOATS)}.")
    if query is not None and not parts and query.shape[1] % plan.stored_heads:
        stored = "" if plan.kv_repeat == 1 else f", each stored {plan.kv_repeat} times"
        raise InputError(
            f"{names[0]} has {query.shape[1]} heads; wanted a multiple of the cache's {cache.kv_heads} kv heads{stored}."
        )
    if cache.max_tokens is not None and count > cache.max_tokens:
        raise InputError(
            f"{count} tokens in a step, but the cache declares max_tokens={cache.max_tokens}; split the step, or declare more."
        )
    if count % plan.shards:
        raise InputError(f"{count} tokens for {plan.shards} shards of pages; wanted a multiple, for equal shards.")


def _causal_notes(step: Step) -> tuple[str, ...]:
    """A mask that isn't causal sees keys that later tokens of the same step wrote: noted, because it is rarely intended."""
    mask = page_mask(step.mask)
    if mask is None or mask.causal or step.max_q_len == 1 or step.mode == "insert":
        return ()
    return (note("paged.not_causal"),)
