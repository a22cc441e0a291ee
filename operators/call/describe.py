"""describe: turns a call into an AttentionProblem; every shape and dtype is checked here, once per distinct call."""

from __future__ import annotations

import math

import jax

from ...errors import InputError
from ...masks import Mask
from ...planning import AttentionProblem, PlannedOperation
from ...planning.cache.cache_checks import axis_names
from ...planning.quantised import QUANTISED
from ...planning.score_operands import capture_sizes, captured_names, score_rows
from ...planning.sequence.choice import declared_strategy
from ...registry import OperationMetadata
from ...sharding import (
    ATTENTION,
    MeshAxis,
    OperandShape,
    OperandTable,
    axes_of,
    canonical_layout,
    canonical_mode,
    declared_axes,
    resolve_spec,
)
from ...sharding.mesh import AnyMesh
from ..api.declared_config import declared_config
from ..choices.block_choices import block_notes, choice_shape, is_choice, with_query_heads
from ..notes.argument_notes import argument_notes
from ..notes.dtype_notes import width_notes
from ..notes.mask_notes import causal_by_default, default_notes, dense_notes
from ..sequence.manual import of_the_whole, split_by_caller
from .arguments import bound_mask, join_mask
from .arrays import Arrays, shaped
from .call_scores import check_in_shard_map
from .declared import varying_axes
from .options import Options
from .planned_platform import planned_platform
from .shapes import (
    check_dtypes,
    check_key,
    check_offset,
    check_operands,
    check_scales,
    leaf_shape,
    sizes_of,
    with_segments,
)

__all__ = ["describe", "packed"]


def describe(
    operation: type[PlannedOperation],
    metadata: OperationMetadata,
    arrays: Arrays,
    options: Options,
    mesh: AnyMesh | None,
) -> AttentionProblem:
    """Build the problem of a call. Errors: InputError and InputTypeError give the argument, its value, what is wanted and a
    hint."""
    layout = canonical_layout(options.layout)
    shapes = Arrays({name: shaped(name, x) for name, x in arrays.by_name.items()}, arrays.mask_leaves)
    if options.value_columns is not None:
        key = shapes.key
        shapes = shapes.changed(value=jax.ShapeDtypeStruct((*key.shape[:-1], options.value_columns), key.dtype))
    sizes = sizes_of(shapes, layout)
    mode = _mode(options.mode, sizes["q_len"], sizes["kv_len"])
    axes, strategy = axes_of(mesh), declared_strategy(operation, metadata.policy.sequence_parallel)
    rules = metadata.get_shardings(mode, layout, softmax_aux=0 if shapes.softmax_aux is None else shapes.softmax_aux)
    by_caller = split_by_caller(rules, layout, axes, strategy)
    if any(by_caller):
        shapes = of_the_whole(shapes, options, layout, axes, *by_caller)
        sizes = sizes_of(shapes, layout)
    q_len, kv_len = sizes["q_len"], sizes["kv_len"]
    shapes = with_segments(shapes, layout, sizes)
    check_dtypes(shapes, metadata)
    check_scales(shapes, layout)
    table = operation.operands
    if options.score is not None:
        captured = score_rows(options.score, tuple(len(shapes.by_name[n].shape) for n in captured_names(options.score)))
        check_operands(shapes, captured, layout, sizes | capture_sizes(options.score, kv_len))
        manual = [a.name for a in axes if a.kind == "manual" and a.size > 1]
        check_in_shard_map(options.score, captured, shapes, manual, metadata.partition_axis, any(by_caller))
        table = OperandTable(*table, *captured)
    check_operands(shapes, operation.operands, layout, sizes)
    check_offset(options)
    shapes = packed(shapes, layout)

    mask = join_mask(shapes, options, metadata.causal)
    has_offset = options.query_offset is not None or shapes.query_offset is not None
    if not any(by_caller):
        _check_manual_sequence(metadata, axes, q_len, mask, has_offset)
    mask, offset, dynamic = bound_mask(mask, shapes, options, mode, q_len, kv_len)
    structure, leaves = mask.split()
    mask = with_query_heads(structure, sizes)
    slots = [atom for atom in mask.leaves() for _ in atom.parts]
    leaf_shapes = tuple(
        choice_shape(leaf, slot, sizes) if is_choice(leaf.dims) else leaf_shape(leaf.name, leaf.array, leaf.dims, sizes)
        for leaf, slot in zip(leaves, slots, strict=True)
    )

    probability = metadata.dropout_prob if options.dropout_prob is None else options.dropout_prob
    if not 0.0 <= probability < 1.0:
        raise InputError(f"dropout_prob={probability}; wanted a probability in [0, 1).")
    dropping = probability > 0 and not options.deterministic
    if dropping and arrays.dropout_rng is None:
        raise InputError(
            f"dropout_prob={probability} with deterministic=False requires dropout_rng=jax.random.key(...)."
        )
    if dropping:
        check_key(arrays.dropout_rng)
    scale = metadata.softmax_scale if options.softmax_scale is None else options.softmax_scale
    scale = 1 / math.sqrt(sizes["head_dim"]) if scale is None else scale
    if not math.isfinite(scale):
        raise InputError(f"softmax_scale={scale}; wanted a finite number.")
    cap = options.logits_soft_cap
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise InputError(f"logits_soft_cap={cap}; wanted a positive number, or None for no cap.")

    operands = _operands(table, metadata, shapes, mode, layout)
    required = {
        "logits_soft_cap": cap is not None,
        "score": options.score is not None,
        "dropout": dropping,
        "return_weights": options.return_weights,
        "return_lse": options.return_lse,
        "gqa": sizes["kv_heads"] != sizes["heads"],
        "value_dim": sizes["value_dim"] != sizes["head_dim"],
        "dynamic_query_offset": dynamic,
        "quantized_kv": any(x.dtype.name in QUANTISED for x in (shapes.key, shapes.value)),
    }
    required |= {x.operand.feature: True for x in operands if x.operand.feature}
    platform, kind, source = planned_platform(metadata, mesh, arrays)
    config, config_notes = declared_config(operation, metadata, platform)
    vma = any(map(varying_axes, jax.tree.leaves(arrays)))
    nested = [
        "the gradient recomputes the forward pass: called inside a shard_map with check_vma=True over part of the mesh"
    ] * (vma and any(a.splits for a in axes))
    return AttentionProblem(
        operation=operation.name,
        config=config,
        batch=sizes["batch"],
        q_len=q_len,
        kv_len=kv_len,
        q_heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        value_dim=sizes["value_dim"],
        input_dtype=shapes.query.dtype.name,
        key_dtype=shapes.key.dtype.name,
        value_dtype=shapes.value.dtype.name,
        runtime_dtype=(metadata.runtime_dtype or shapes.query.dtype).name,
        softmax_dtype=metadata.runtime_softmax_dtype.name,
        layout=layout,
        mode=mode,
        mask=mask,
        leaves=leaf_shapes,
        features=mask.features() | {name for name, is_required in required.items() if is_required},
        softmax_scale=scale,
        logits_soft_cap=cap,
        score=options.score,
        dropout_prob=probability if dropping else 0.0,
        operands=operands,
        query_offset=offset,
        dynamic_query_offset=dynamic,
        rules=rules,
        declared_axes=declared_axes(metadata.partition_axis),
        mesh=axes,
        platform=platform,
        device_kind=kind,
        platform_source=source,
        vma=vma,
        values_in_key=options.value_columns is not None,
        manual_sequence=by_caller if any(by_caller) else None,
        notes=(
            *config_notes,
            *nested,
            *width_notes(arrays, metadata),
            *dense_notes(leaf_shapes),
            *(default_notes(leaf_shapes, q_len) if causal_by_default(options, metadata.causal) else ()),
            *block_notes(structure, leaves, sizes),
            *argument_notes(
                metadata,
                options,
                arrays,
                shapes,
                mask,
                offset,
                dynamic,
                probability,
                platform,
                source,
                mesh,
                by_caller,
                rules,
            ),
        ),
    )


def _operands(
    table: OperandTable, metadata: OperationMetadata, shapes: Arrays, mode: str, layout: str,
) -> tuple[OperandShape, ...]:  # fmt: skip
    """The optional operands of a call, in the order of the operation's table. A spec is declared for an operation's own."""
    operands = []
    for operand in table.part("operands"):
        array = shapes.by_name.get(operand.name)
        if not operand.optional or array is None:
            continue
        is_extra = operand.name not in ATTENTION
        spec = resolve_spec(metadata.partition_axis, operand.split_dims(layout), mode) if is_extra else None
        operands.append(OperandShape(operand, tuple(array.shape), array.dtype.name, spec))
    return tuple(operands)


def packed(arrays: Arrays, layout: str) -> Arrays:
    """Give the segment ids of a thd call their batch dimension of 1; leave all others unchanged."""
    if layout != "thd":
        return arrays

    def batched(x: object) -> object:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        return x[None]  # type: ignore[index]

    return arrays.changed(q_segment_ids=batched(arrays.q_segment_ids), kv_segment_ids=batched(arrays.kv_segment_ids))


def _mode(mode: str | None, q_len: int, kv_len: int) -> str:
    if mode is None:
        mode = "autoregressive" if q_len == 1 and kv_len != 1 else "train"
    return canonical_mode(mode)


def _check_manual_sequence(
    metadata: OperationMetadata, axes: tuple[MeshAxis, ...], q_len: int, mask: Mask, has_offset: bool
) -> None:
    """Raise where the position of the caller's own shard in the sequence is unknown."""
    rules = metadata.partition_axis
    names = {n for entry in (rules.query_sequence_axis, rules.key_sequence_axis) for n in axis_names(entry)}
    manual = [a.name for a in axes if a.kind == "manual" and a.size > 1 and a.name in names]
    if manual and mask.needs_offset and not has_offset and q_len != 1:
        raise InputError(
            f"the sequence axis {'+'.join(manual)} is Manual here (this runs inside your own shard_map), so the position of the "
            f"local queries isn't known and the mask {mask.describe()} depends on it; pass query_offset, or "
            "declare sequence_parallel='ring' or 'ulysses', which count this axis in."
        )
