"""AttnShardingRules: ten PartitionSpecs, generated from the table of operands and the mesh axes of its dims."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ..errors import InputError
from .modes import GENERATION, canonical_layout, canonical_mode
from .operands import ATTENTION, RESULTS
from .partition_axis import (
    AXIS_FIELDS,
    NOT_GIVEN,
    AnyPartitionAxis,
    PartitionAxis,
    eformers_axis,
    is_not_given,
    registered_axes,
)

__all__ = ["AttnShardingRules", "declared_axes", "resolve_rules", "resolve_spec", "tensor_dims"]


class AttnShardingRules(NamedTuple):
    """The PartitionSpecs of all tensors of an attention operation, for one mode and one layout.

    `query3d` is a query of one token, [batch, heads, head_dim]. `softmax_aux` is None if no sinks are declared.
    """

    query3d: PartitionSpec
    query: PartitionSpec
    key: PartitionSpec
    value: PartitionSpec
    bias: PartitionSpec
    mask: PartitionSpec
    output: PartitionSpec
    q_segment_ids: PartitionSpec
    kv_segment_ids: PartitionSpec
    softmax_aux: PartitionSpec | None


# dimension -> (eformer's semantic axis, attribute of PartitionAxis, its attribute while generating)
_SEMANTIC: dict[str, tuple[str, str, str]] = {
    "batch": ("__BATCH__", "batch_axis", "decode_batch_axis"),
    "q_len": ("__QUERY_LENGTH__", "query_sequence_axis", "decode_query_sequence_axis"),
    "kv_len": ("__KV_LENGTH__", "key_sequence_axis", "decode_key_sequence_axis"),
    "heads": ("__HEAD__", "head_axis", "decode_head_axis"),
    "kv_heads": ("__KV_HEAD__", "kv_head_axis", "decode_kv_head_axis"),
    "head_dim": ("__HEAD_DIM__", "attention_dim_axis", "decode_attention_dim_axis"),
    "kv_head_dim": ("__KV_HEAD_DIM__", "attention_kv_dim_axis", "decode_attention_kv_dim_axis"),
    "value_dim": ("__KV_HEAD_DIM__", "attention_kv_dim_axis", "decode_attention_kv_dim_axis"),
    "bias_heads": ("__BIAS_HEAD_SEQ__", "bias_head_sequence_axis", "bias_head_sequence_axis"),
    "bias_kv_len": ("__BIAS_KV_SEQ__", "bias_key_sequence_axis", "bias_key_sequence_axis"),
}


def tensor_dims(tensor: str, layout: str, *, qkv_mni_sharding: bool = False, aux_ndim: int = 1) -> tuple[str, ...]:
    """Return the names of a tensor's dimensions in a layout, such as ('batch', 'q_len', 'heads', 'head_dim')."""
    layout = canonical_layout(layout)
    match tensor:
        case "query3d":
            return ("batch", "heads", "head_dim")
        case "mask":
            return ("batch", "", "q_len", "bias_kv_len")
        case "softmax_aux":
            return ("heads", "")[:aux_ndim]
    dims = (RESULTS[tensor] if tensor in RESULTS else ATTENTION[tensor]).split_dims(layout)
    if qkv_mni_sharding and tensor in ("key", "value"):
        return tuple({"kv_heads": "heads", "kv_head_dim": "head_dim"}.get(dim, dim) for dim in dims)
    return dims


def resolve_spec(partition_axis: AnyPartitionAxis, dims: Iterable[str], mode: str) -> PartitionSpec:
    """The spec of an array over these dims in a mode. A dim that no mesh axis splits, such as '', has None."""
    mode, registered = canonical_mode(mode), registered_axes()
    return PartitionSpec(
        *(_mesh_axes(partition_axis, dim, mode, registered) if dim in _SEMANTIC else None for dim in dims)
    )


def resolve_rules(
    partition_axis: AnyPartitionAxis,
    mode: str,
    layout: str = "bthd",
    *,
    qkv_mni_sharding: bool = False,
    aux_ndim: int = 0,
) -> AttnShardingRules:
    """Resolve the ten specs of a mode and a layout.

    `qkv_mni_sharding` splits K and V by the query's head axes. `aux_ndim` is the rank of the sinks: 0 (none), 1
    ([heads]) or 2 ([heads, sinks]). Errors: InputError for an unknown mode or layout or another rank.
    """
    mode, layout = canonical_mode(mode), canonical_layout(layout)
    if aux_ndim not in (0, 1, 2):
        raise InputError(f"softmax_aux has {aux_ndim} dimensions; wanted [heads], [heads, sinks] or [kv_heads, sinks].")

    def spec(tensor: str) -> PartitionSpec:
        dims = tensor_dims(tensor, layout, qkv_mni_sharding=qkv_mni_sharding, aux_ndim=aux_ndim)
        return resolve_spec(partition_axis, dims, mode)

    return AttnShardingRules(
        **{t: spec(t) for t in AttnShardingRules._fields[:-1]},
        softmax_aux=spec("softmax_aux") if aux_ndim else None,
    )


def _mesh_axes(
    partition_axis: AnyPartitionAxis, dim: str, mode: str, registered_axes: Mapping[str, Any]
) -> str | tuple[str, ...] | None:
    semantic, attribute, generation_attribute = _SEMANTIC[dim]
    registered = registered_axes.get(semantic)
    if registered is not None:
        # The user has replaced this axis for the whole process, so eformer must resolve it. It treats a rule of None as
        # an unknown axis unless it is in a tuple, and returns nested tuples if a rule names several attributes.
        generation_rule = registered["generation_axis_rule"] if mode in GENERATION else NOT_GIVEN
        if registered["axis_rule"] is None and is_not_given(generation_rule):
            return None
        composite: Any = (semantic,)
        axes: Any = eformers_axis(partition_axis).resolve_axis([composite], mode)[0]
    else:
        # Read the attribute directly: resolve_axis of eformer 0.0.101 treats `decode_*_axis=None` as not given and falls
        # back to the training axis, so that a decode query of length 1 would be split over the sequence axis.
        # tests/sharding/test_rules.py shows the upstream behaviour.
        axes = getattr(partition_axis, generation_attribute if mode in GENERATION else attribute)
    names = _flat(axes)
    return None if not names else names[0] if len(names) == 1 else names


def declared_axes(partition_axis: AnyPartitionAxis) -> frozenset[str]:
    """The mesh axes that a partition axis names for attention because it was told to, not by default.

    The attribute of a dimension follows from the five `*_parallel_axis` fields. An attribute that differs from what they
    give was declared, and so were those of the five that differ from their own defaults.
    """
    try:
        return _declared_axes(partition_axis)
    except TypeError:  # axes of a class that isn't hashable
        return _declared_axes.__wrapped__(partition_axis)


@functools.lru_cache(maxsize=256)
def _declared_axes(partition_axis: AnyPartitionAxis) -> frozenset[str]:
    default = PartitionAxis()
    parallel = [name for name in AXIS_FIELDS if name.endswith("_parallel_axis")]
    changed = {name: value for name in parallel if (value := getattr(partition_axis, name)) != getattr(default, name)}
    derived = PartitionAxis(**changed)
    attributes = {name for _, *both in _SEMANTIC.values() for name in both}
    values = [value for name in attributes if (value := getattr(partition_axis, name)) != getattr(derived, name)]
    return frozenset(name for value in (*values, *changed.values()) for name in _flat(value))


def _flat(axes: Any) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(name for part in axes for name in _flat(part))
