"""Fit the slots of layers that keep states to a mesh: how many there are, where they are, and reasons against them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...errors import shown
from ...sharding import MeshAxis, TensorShape, fit_tensor
from ...sharding.mesh import unused_axes
from ..capability import Reason
from ..notes import Note, note
from .cache_arrays import CacheArray
from .cache_fields import CacheFields
from .cache_target import CacheTarget, state_bytes
from .state_plan import StatePlan

__all__ = ["fit_states"]

_MAX_SLOTS = 2**30


def fit_states(
    cache: CacheFields, shards: int, axes: tuple[MeshAxis, ...], target: CacheTarget, group: tuple[int, int]
) -> StatePlan:
    """The plan of one group of layers with states, the only one of `cache`."""
    plan = StatePlan(
        cache=cache,
        mesh=axes,
        platform=target.platform,
        device_kind=target.kind,
        shards=shards,
        arrays=_arrays(cache, shards, axes, target),
        group=group if group[1] > 1 else None,
        slots=_slots(cache),
    )
    return replace(plan, refused=_refusals(plan, group), notes=tuple(_notes(plan)))


def _slots(cache: CacheFields) -> int:
    """The declared slots, or those of all sequences with their drafts and the snapshots of max_length tokens."""
    declared = cache.groups[0]
    if declared.slots is not None:
        return declared.slots
    every = cache.max_length if declared.snapshots is None else declared.snapshots * cache.page_size
    snapshots = 0 if declared.snapshots is None else cache.max_length // every
    return cache.max_sequences * (declared.slots_per_sequence + snapshots)


def _arrays(cache: CacheFields, shards: int, axes: tuple[MeshAxis, ...], target: CacheTarget) -> tuple[CacheArray, ...]:
    declared, batches = cache.groups[0], cache.pages_axis
    slots, arrays = _slots(cache), []

    def add(
        name: str, spec: PartitionSpec, shape: tuple[int, ...], dims: tuple[str, ...], dtype: str, count: int
    ) -> None:
        size = jnp.dtype(dtype).itemsize
        fitted = fit_tensor(name, spec, TensorShape(shape, size), dims, axes)
        held = state_bytes(fitted, size, target) if dims[:1] == ("slots",) else fitted.local_bytes
        arrays.append(CacheArray(fitted, dtype, count, held))

    for one in declared.states or ():
        heads = [cache.kv_head_axis if at == one.heads_at else None for at in range(len(one.shape))]
        spec, dims = PartitionSpec(batches, *heads), ("slots", *one.dims)
        add(one.label, spec, (slots, *one.shape), dims, one.dtype_in(cache.dtype), cache.layer_count)
    rows, lead = cache.max_sequences // shards, () if batches is None else (batches,)
    of_batch: dict[str, tuple[int, ...]] = {
        "cu_q_lens": (rows + 1,),
        "kv_lens": (rows,),
        "num_seqs": (),
        "read_slots": (rows,),
        "write_slots": (rows, declared.slots_per_sequence),
    }
    for name, shape in of_batch.items():
        dims = (*("shards" for _ in lead), *("sequences", "drafts")[: len(shape)])
        add(name, PartitionSpec(*lead, *(None for _ in shape)), (*(shards for _ in lead), *shape), dims, "int32", 1)
    return tuple(arrays)


def _refusals(plan: StatePlan, group: tuple[int, int]) -> tuple[Reason, ...]:
    """Every reason against the slots."""
    cache, reasons = plan.cache, []
    where = "" if group[1] == 1 else f"group {group[0]}: "
    drops = {
        (drop.axis, drop.reason): (array, drop)
        for array in plan.arrays
        for drop in array.fitted.dropped
        if not drop.harmless
    }
    for array, drop in drops.values():
        text = f"{array.name}, dimension {drop.dim}, axis {drop.axis!r}: {drop.reason}"
        reasons.append(Reason("unfit", drop.dim, text, f"{drop.hint}."))
    if cache.max_sequences % plan.shards:
        text = f"max_sequences={cache.max_sequences} is not divisible by the {plan.shards} shards of {shown(cache.pages_axis)}"
        reasons.append(Reason("max_sequences", "max_sequences", text, f"Make it a multiple of {plan.shards}."))
    if plan.local_slots < plan.slots_per_sequence:
        text = (
            f"{where}{plan.local_slots} slots"
            + (" per shard" if plan.shards > 1 else "")
            + f"; a sequence with {plan.drafts} drafts needs {plan.slots_per_sequence}"
        )
        hint = f"Wanted at least {plan.shards * plan.slots_per_sequence} slots, or fewer drafts."
        reasons.append(Reason("slots", "slots", text, hint))
    if plan.local_slots > _MAX_SLOTS:
        text = f"{where}{plan.local_slots} slots per shard; slot ids are int32"
        reasons.append(Reason("slot_ids", "slots", text, "Declare fewer slots."))
    return tuple(reasons)


def _notes(plan: StatePlan) -> list[Note]:
    """Notes on what is as declared but has a cost."""
    entries: list[Note] = []
    for name in plan.states:
        fitted = plan[name].fitted
        used = {axis for at in range(len(fitted.shape)) for axis in fitted.axes(at)}
        if idle := unused_axes(plan.mesh, used):
            entries.append(note("cache.repeated_states", name=name, axes=[axis.label for axis in idle]))
        if plan[name].device_bytes > fitted.local_bytes:
            share = 1 - fitted.local_bytes / plan[name].device_bytes
            entries.append(note("cache.padded_state", name=name, shape=fitted.local_shape, share=share))
    if plan.sequences < plan.cache.max_sequences:
        entries.append(
            note("cache.few_slots", slots=plan.slots, sequences=plan.sequences, wanted=plan.cache.max_sequences)
        )
    return entries
