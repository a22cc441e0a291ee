"""execute: places the operands, runs the method on each device's part inside shard_map, and places the outputs.

The order is fixed, and keeps a mask right on every mesh: shard, then (inside the method) pad, choose blocks, and
build the mask with the shard's own global offset.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ...masks import And, Blocks, Mask, SegmentIds, Slot
from ...masks.seen_keys import certainly_seen
from ...planning import AttentionProblem, Placement, Plan
from ...sharding import Operand, pin
from ...sharding.mesh import AnyMesh
from ..choices.block_choices import is_choice, of_query_heads
from ..kernels.local_mask import Dropout, LocalMask, dropout_seed
from ..kernels.lse import logsumexp
from ..sequence.gather import gather_sequence, split_output
from ..sequence.manual import local_heads, whole_leaves, without_manual
from ..sequence.split_kv import combined_over_devices
from .arguments import join_mask, run_time_offset
from .arrays import Arrays
from .call_scores import lowered
from .declared import DeclaredOperation
from .describe import packed
from .local import LocalCall, LocalOutput, Ring
from .options import Options
from .sharded_operands import ShardedOperands

__all__ = ["execute"]

_UNROLLED = 8  # steps unrolled by default


def execute(
    operation: DeclaredOperation, plan: Plan, mesh: AnyMesh | None, options: Options, arrays: Arrays
) -> LocalOutput:
    """Run a plan on arrays with its method; traceable. Returns outputs in the caller's layout."""
    method = operation.forward(plan.method or "", plan.config)
    check_vma = operation.implementation(plan.method or "", plan.config).check_vma(plan.config)
    default_causal = operation.metadata.causal  # applies if neither the call nor a mask specifies it
    problem, placement = plan.problem, plan.placement
    operands = _prepare(problem, placement, options, arrays, default_causal, mesh)
    hides_keys = _hides_keys(problem, arrays)
    axes = [a for a in problem.mesh if a.kind != "manual"]
    specs = _specs(operands, placement)

    heads_alone = {x.name for x in problem.operands if x.operand.dims_inside(problem.kernel_layout) == ("heads",)}

    def body(local: ShardedOperands) -> tuple[jax.Array, ...]:
        local = local._replace(
            leaves=whole_leaves(local.leaves, problem, placement),
            operands={
                name: local_heads(x, problem, placement) if name in heads_alone else x
                for name, x in local.operands.items()
            },
        )
        local = gather_sequence(local, placement, problem.kernel_layout)
        call = _local_call(plan, options, local, hides_keys)
        result = combined_over_devices(call, method) if placement.sequence.strategy == "split_kv" else method(call)
        result = split_output(result, placement, problem.kernel_layout)
        return tuple(x for x in result if x is not None)

    names = ["output", *["weights"] * options.return_weights, *["lse"] * options.return_lse]
    if mesh is not None and math.prod(a.size for a in axes) > 1:
        if problem.vma and len(axes) < len(problem.mesh):
            # jax 0.10 and 0.12 can't lower the residuals of a shard_map inside a shard_map with check_vma=True ("already
            # bound by a parent sdy.manual_computation op"); with the forward pass recomputed the inputs are the only ones.
            body = jax.checkpoint(body)
        specs, placed = without_manual((specs, tuple(placement.spec(name) for name in names)), problem)
        operands = jax.tree.map(lambda x, s: pin(x, s, mesh), operands, specs)
        outputs = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=placed,
            axis_names={a.name for a in axes},
            # If an outer shard_map doesn't check its axes, they can't be checked here, where data is sent along them.
            check_vma=check_vma and (problem.vma or problem.manual_sequence is None),
        )(operands)
    else:
        outputs = body(operands)
    named = dict(zip(names, outputs, strict=True))
    if problem.layout == "thd":
        named = {name: x[0] for name, x in named.items()}
    if placement.sequence.gathered_queries:
        named["output"] = pin(named["output"], placement.fitted["output"].spec, mesh)
    return LocalOutput(**named)


def _prepare(
    problem: AttentionProblem,
    placement: Placement,
    options: Options,
    arrays: Arrays,
    default_causal: bool,
    mesh: AnyMesh | None,
) -> ShardedOperands:
    """Bring the arrays into canonical form."""
    dtype = jnp.dtype(problem.runtime_dtype)
    heads_at = problem.kernel_layout.index("h")
    kv_len = arrays.key.shape[problem.layout.index("t")]

    def tensor(name: str, x: jax.Array) -> jax.Array:
        x = jnp.asarray(x) if name in problem.quantised else jnp.asarray(x, dtype)
        return x[None] if problem.layout == "thd" else x

    operands = {row.name: tensor(row.name, arrays.by_name[row.name]) for row in problem.required}
    if placement.kv_repeat > 1:
        # On Explicit axes a split dimension can't be repeated: its heads are gathered first.
        whole_heads = PartitionSpec(*(None if i == heads_at else axes for i, axes in enumerate(placement.spec("key"))))
        for name in operands.keys() - {"query"}:
            operands[name] = jnp.repeat(pin(operands[name], whole_heads, mesh), placement.kv_repeat, axis=heads_at)
    for operand in problem.operands:
        array = arrays.by_name[operand.name]
        if operand.name == "softmax_aux":
            operands["softmax_aux"] = _one_sink_a_head(array, problem, mesh)
        elif operand.name in problem.scales:
            operands[operand.name] = _scale(array, kv_len, problem, placement, mesh)
        else:
            operands[operand.name] = _as_inside(operand.operand, jnp.asarray(array), problem, placement, mesh)
    packed_arrays = packed(_paired_segments(arrays), problem.layout)
    joined = join_mask(packed_arrays, options, default_causal)
    _, leaves = joined.split()
    offset = (
        run_time_offset(joined, arrays, options, problem.batch, problem.q_len, problem.kv_len)
        if problem.dynamic_query_offset
        else None
    )
    return ShardedOperands(
        operands,
        tuple(
            of_query_heads(jnp.asarray(leaf.array), whole_leaf.shape)
            if is_choice(leaf.dims)
            else jnp.asarray(leaf.array)
            for leaf, whole_leaf in zip(leaves, problem.leaves, strict=True)
        ),
        offset,
        dropout_seed(arrays.dropout_rng) if problem.dropout_prob > 0 else None,
    )


def _as_inside(
    operand: Operand, x: jax.Array, problem: AttentionProblem, placement: Placement, mesh: AnyMesh | None
) -> jax.Array:
    """An array in the kernel's layout and its dtype there, with kv heads that are repeated like those of key and value."""
    inside = operand.dims_inside(problem.kernel_layout)
    x = x.astype(problem.dtype_inside(operand))
    if len(operand.dims_in(problem.layout)) < len(inside):
        x = x[None]
    if placement.kv_repeat > 1 and "kv_heads" in inside and x.shape[inside.index("kv_heads")] > 1:
        at = inside.index("kv_heads")
        spec = PartitionSpec(*(None if i == at else axes for i, axes in enumerate(placement.spec(operand.name))))
        x = jnp.repeat(pin(x, spec, mesh), placement.kv_repeat, axis=at)
    return x


def _paired_segments(arrays: Arrays) -> Arrays:
    q, kv = arrays.q_segment_ids, arrays.kv_segment_ids
    if (q is None) == (kv is None):
        return arrays
    both = kv if q is None else q
    return arrays.changed(q_segment_ids=both, kv_segment_ids=both)


def _one_sink_a_head(sinks: jax.Array, problem: AttentionProblem, mesh: AnyMesh | None) -> jax.Array:
    """Merge several sinks of a head into one: the sum of exp(s) is exp(logsumexp(s)), exactly and differentiably."""
    sinks = jnp.asarray(sinks, jnp.dtype(problem.softmax_dtype))
    if sinks.ndim == 2:
        sinks = logsumexp(sinks)
    group = problem.q_heads // sinks.shape[0]
    return sinks if group == 1 else jnp.repeat(pin(sinks, PartitionSpec(None), mesh), group)


def _scale(
    scale: jax.Array, kv_len: int, problem: AttentionProblem, placement: Placement, mesh: AnyMesh | None
) -> jax.Array:
    """A scale as float32 [batch, kv heads, kv], with its heads repeated like those of its tensor."""
    scale = jnp.squeeze(jnp.asarray(scale, jnp.float32), -1)
    scale = scale[None] if problem.layout == "thd" else scale
    scale = scale if problem.layout == "bhtd" else scale.swapaxes(1, 2)
    scale = jnp.broadcast_to(scale, (problem.batch, problem.kv_heads, kv_len))
    if placement.kv_repeat == 1:
        return scale
    batch = placement.spec("key")[0]
    return jnp.repeat(pin(scale, PartitionSpec(batch, None, None), mesh), placement.kv_repeat, axis=1)


def _specs(operands: ShardedOperands, placement: Placement) -> Any:
    """Specs in the same tree as the operands."""
    specs: Any = ShardedOperands
    return specs(
        operands={name: placement.spec(name) for name in operands.operands},
        leaves=tuple(placement.spec(f"leaf{i}") for i in range(len(operands.leaves))),
        **{
            name: None if getattr(operands, name) is None else placement.spec(name)
            for name in ("query_offset", "dropout_seed")
        },
    )


def _index(axes: tuple[str, ...], problem: AttentionProblem) -> tuple[int | jax.Array, int]:
    """(index of this device among the shards over `axes`, number of shards)."""
    sizes = {a.name: a.size for a in problem.mesh}
    index: int | jax.Array = 0
    for name in axes:
        index = index * sizes[name] + jax.lax.axis_index(name)
    return index, math.prod(sizes[name] for name in axes)


def _hides_keys(problem: AttentionProblem, arrays: Arrays) -> bool:
    """Whether some key of the whole problem may be hidden from every query."""
    if problem.dynamic_query_offset or problem.symbolic:
        return True
    mask, offset = problem.mask, problem.query_offset or 0
    parts = mask.conjuncts()
    segment_slots = [part for part in parts if isinstance(part, Slot) and part.kind == SegmentIds.kind]
    shared = (arrays.q_segment_ids is None) != (arrays.kv_segment_ids is None)
    if shared and len(segment_slots) == 1 and problem.q_len == problem.kv_len:
        # A key has the id of its own query, which sees it if the rest of the mask lets it.
        rest = And([part for part in parts if part is not segment_slots[0]])
        places = np.arange(problem.kv_len, dtype=np.int32)
        return not (rest.is_static and np.all(rest.test(places, places + np.int32(offset), places)))
    visible = certainly_seen(mask, problem.q_len, problem.kv_len, query_offset=offset)
    return visible is None or not visible.all()


def _of_heads(mask: Mask, shard: int | jax.Array, count: int) -> Mask:
    """The mask of this device's heads, if it has layouts per head."""
    return mask.map_leaves(
        lambda atom: atom.from_head(shard * count, count) if isinstance(atom, Blocks) and atom.heads > 1 else atom
    )


def _local_call(plan: Plan, options: Options, local: ShardedOperands, hides_keys: bool) -> LocalCall:
    problem, placement = plan.problem, plan.placement
    split, scan = placement.sequence, plan.policy.scan_ring_attention
    ring = None
    if split.ring_axes:
        # An unrolled program grows with the steps; XLA:CPU overlaps nothing and keeps the buffers of each step.
        looped = problem.platform == "cpu" or len(split.steps) > _UNROLLED if scan is None else scan
        ring = Ring(split.ring_axes, split.ring_size, split.steps, looped, split.zigzag, split.full_chunk_pairs)
    # A device's own lengths; a kernel may receive them in pieces.
    q_len, kv_len = (n * split.chunks for n in (placement.local.q_len, placement.local.kv_len))
    shard, shards = _index(placement.q_axes, problem)
    k_start: int | jax.Array = 0
    if split.strategy == "split_kv":
        k_start = _index(split.axes, problem)[0] * kv_len
    q_start = shard * q_len
    offset = local.query_offset if problem.dynamic_query_offset else problem.query_offset
    mask = problem.mask.merge(local.leaves) if local.leaves else problem.mask
    if placement.head_axes:
        mask = _of_heads(mask, _index(placement.head_axes, problem)[0], placement.local.q_heads)

    def starts() -> tuple[Any, Any]:  # the device's first batch row and query head
        batch, head = (_index(axes, problem)[0] for axes in (placement.batch_axes, placement.head_axes))
        return batch * placement.local.batch, head * placement.local.q_heads

    dropout = None
    if local.dropout_seed is not None:
        dropout = Dropout(local.dropout_seed, problem.dropout_prob, *starts(), q_start, k_start)
    operands = local.operands
    local_mask = LocalMask(mask, q_start, q_len, kv_len, offset, k_start, hides_keys)
    score, captures = lowered(problem, operands, local_mask, problem.kv_len if ring is not None else kv_len)
    if score is not None and "function" in score.names:
        local_mask = local_mask.placed(*starts())
    return LocalCall(
        query=operands["query"],
        key=operands["key"],
        value=operands["key"][..., : problem.value_dim] if problem.values_in_key else operands["value"],
        bias=operands.get("bias"),
        sinks=operands.get("softmax_aux"),
        key_scale=operands.get("key_scale"),
        value_scale=operands.get("value_scale"),
        further={name: operands[name] for name in problem.own_operands},
        score=score,
        captures=captures,
        mask=local_mask,
        dropout=dropout,
        layout=problem.kernel_layout,
        softmax_scale=problem.softmax_scale,
        logits_soft_cap=problem.logits_soft_cap,
        softmax_dtype=jnp.dtype(problem.softmax_dtype),
        return_weights=options.return_weights,
        return_lse=options.return_lse,
        config=plan.config,
        route=plan.route,
        problem=problem,
        placement=placement,
        q_shard=shard,
        q_shards=shards,
        ring=ring,
    )
