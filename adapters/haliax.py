"""haliax and levanter: dot_product_attention over named axes with a declared attention. Requires haliax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import ConfigError, InputError, a_type, shown
from ..operators.api.attention import Attention
from .extra import extra
from .front import Declared, attend, declared_attention

with extra("haliax"):
    import haliax as hax

__all__ = ["NamedAttention", "dot_product_attention_for"]

_STRUCTURED = (
    "is_causal",
    "causal_offset",
    "explicit_mask",
    "segment_ids",
    "sliding_window",
)  # levanter's AttentionMask


def dot_product_attention_for(declared: Declared, **metadata: Any) -> NamedAttention:
    """levanter's dot_product_attention, run by the declared attention.

    declared: an Attention, a Declaration, its dict, or the path of its JSON file. metadata: fields of OperationMetadata that
    replace the file's, such as mesh. Errors: ConfigError for "enabled": false, and for results that a framework has no place for.
    """
    attention = declared_attention(declared, metadata)
    if not attention.enabled:
        raise ConfigError('the declaration says "enabled": false; keep the dot_product_attention that you have.')
    return NamedAttention(attention)


class _Axes(NamedTuple):
    """What the axes of a call's operands are: batch, KV heads, query heads of a group, and the last ones."""

    batch: tuple[Any, ...]
    heads: tuple[Any, ...]
    groups: tuple[Any, ...]
    queries: Any
    keys: Any
    key_dim: Any
    value_dim: Any

    @property
    def query_heads(self) -> tuple[Any, ...]:
        return (*self.heads, *self.groups)


@dataclass(frozen=True, eq=False)
class NamedAttention:
    """A declared attention over named axes, with levanter's signature; `attention.plans` holds the plans of the calls."""

    attention: Attention

    def __call__(
        self,
        QPos: Any,
        KPos: Any,
        Key: Any,
        query: hax.NamedArray,
        key: hax.NamedArray,
        value: hax.NamedArray,
        mask: Any = None,
        bias: hax.NamedArray | None = None,
        attention_dtype: Any = None,
        precision: Any = None,
        use_flash: bool | None = None,
        attn_backend: Any = None,
        flash_block_size: int | None = None,
        dropout: float = 0.0,
        *,
        logits_soft_cap: float | None = None,
        scaling_factor: float | None = None,
        inference: bool = True,
        prng: jax.Array | None = None,
    ) -> hax.NamedArray:
        """Attend along KPos; the result has the query's axes, with the value's own axis in place of Key.

        An axis in query, key and value is one of heads if it comes after QPos in the query, or directly before it and isn't the
        first; any other is a batch axis. An axis that only the query has groups query heads. mask: a boolean NamedArray, or
        levanter's AttentionMask. bias is added to the logits. Errors: InputError for axes, ConfigError for what the declaration
        decides or can't express.
        """
        _check_choices(attention_dtype, precision, use_flash, attn_backend, flash_block_size)
        if bias is not None and logits_soft_cap is not None:
            raise ConfigError(
                "bias with logits_soft_cap: levanter adds the bias before the cap, attnops after it; wanted one of them."
            )
        axes = _axes(QPos, KPos, Key, query, key, value)
        raw = [_raw(x, axes.batch, *rest) for x, *rest in (
            (query, (axes.queries,), axes.query_heads, (axes.key_dim,)),
            (key, (axes.keys,), axes.heads, (axes.key_dim,)),
            (value, (axes.keys,), axes.heads, (axes.value_dim,)),
        )]  # fmt: skip
        call = _masked(mask, axes)
        result = attend(
            self.attention,
            *raw,
            layout="bthd",
            bias=None if bias is None else _cells(bias, axes, "bias"),
            softmax_scale=None if scaling_factor is None else float(scaling_factor),
            logits_soft_cap=logits_soft_cap,
            dropout_prob=dropout,
            dropout_rng=prng,
            deterministic=inference,
            **call,
        )
        output = result.output.reshape(
            *(axis.size for axis in (*axes.batch, axes.queries, *axes.query_heads, axes.value_dim))
        )
        named = hax.named(output, (*axes.batch, axes.queries, *axes.query_heads, axes.value_dim))
        return named.rearrange(tuple(axes.value_dim if axis.name == axes.key_dim.name else axis for axis in query.axes))


def _check_choices(dtype: Any, precision: Any, use_flash: Any, backend: Any, block_size: Any) -> None:
    if dtype is not None and jnp.dtype(dtype) != jnp.float32:
        raise ConfigError(
            f"attention_dtype={shown(str(jnp.dtype(dtype)))}; wanted None or float32, in which the softmax is. Hint: declare "
            "metadata.softmax_dtype."
        )
    if precision is not None and precision != jax.lax.Precision.DEFAULT:
        raise ConfigError(f"precision={shown(precision)}; wanted None. Hint: declare metadata.precision.")
    if getattr(backend, "name", None) == "DEFAULT":
        backend = None
    for name, value in (("use_flash", use_flash), ("attn_backend", backend), ("flash_block_size", block_size)):
        if value is not None:
            raise ConfigError(f"{name}={shown(value)}; leave it None: the declaration decides what runs.")


def _axes(QPos: Any, KPos: Any, Key: Any, query: Any, key: Any, value: Any) -> _Axes:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, hax.NamedArray):
            raise InputError(f"{name} is {a_type(x)}; wanted a haliax.NamedArray.")
    queries, keys, key_dim = _axis("QPos", QPos, query), _axis("KPos", KPos, key), _axis("Key", Key, query)
    if queries.name == keys.name:
        raise InputError(
            f"QPos and KPos are both {shown(keys.name)}; wanted two names. Hint: rename the axis of key and value."
        )
    names = [{axis.name for axis in x.axes} for x in (query, key, value)]
    value_axes = [axis for axis in value.axes if axis.name not in names[0] | {keys.name}]
    if key_dim.name in names[2]:
        value_axes.append(_axis("Key", key_dim.name, value))
    if len(value_axes) != 1:
        raise InputError(
            f"value has axes {_text(value.axes)}; wanted one beside {_text((keys,))} and those of the query."
        )
    (value_dim,) = value_axes
    last = {queries.name, keys.name, key_dim.name, value_dim.name}
    shared = [axis for axis in query.axes if axis.name in names[1] & names[2] - last]
    at = query.axes.index(queries)
    after = [axis for axis in shared if query.axes.index(axis) > at]
    before = [axis for axis in shared if 0 < query.axes.index(axis) < at]
    heads = after or before[-1:]
    groups = [axis for axis in query.axes if axis.name not in names[1] | names[2] | last]
    for name, x in (("key", key), ("value", value)):
        extra_axes = [axis for axis in x.axes if axis.name not in names[0] | last]
        if extra_axes or any(query.axis_size(axis.name) != axis.size for axis in x.axes if axis in shared):
            raise InputError(
                f"{name} has axes {_text(x.axes)}, query has {_text(query.axes)}; wanted those of the query."
            )
        missing = [axis for axis in shared if axis.name not in {a.name for a in x.axes}]
        if missing or x.axis_size(keys.name) != keys.size:
            raise InputError(f"{name} has axes {_text(x.axes)}; wanted {_text((*shared, keys))} among them.")
    batch = tuple(axis for axis in shared if axis not in heads)
    return _Axes(batch, tuple(heads), tuple(groups), queries, keys, key_dim, value_dim)


def _axis(name: str, selector: Any, x: Any) -> Any:
    if isinstance(selector, tuple | list):
        if len(selector) != 1:
            raise InputError(f"{name} is {len(selector)} axes; wanted one. Hint: flatten them with flatten_axes.")
        (selector,) = selector
    axis_name = getattr(selector, "name", selector)
    selected = next((axis for axis in x.axes if axis.name == axis_name), None)
    if selected is None:
        raise InputError(f"{name}={shown(axis_name)} isn't among the axes {_text(x.axes)}.")
    return selected


def _raw(x: Any, *groups: Sequence[Any]) -> jax.Array:
    """The array with its axes in this order; batch axes stay apart, the axes of any other group become one."""
    batch, *merged = groups
    ordered = x.rearrange(tuple(axis.name for group in groups for axis in group)).array
    return ordered.reshape(
        *(axis.size for axis in batch), *(math.prod(axis.size for axis in group) for group in merged)
    )


def _masked(mask: Any, axes: _Axes) -> dict[str, Any]:
    """The arguments of a call that a mask stands for."""
    if mask is None or isinstance(mask, hax.NamedArray):
        return {} if mask is None else {"mask": _cells(mask, axes, "mask")}
    if not all(hasattr(mask, name) for name in _STRUCTURED):
        raise InputError(f"mask is {a_type(mask)}; wanted a boolean haliax.NamedArray or levanter's AttentionMask.")
    call: dict[str, Any] = {"causal": mask.is_causal}
    if mask.causal_offset is not None and not mask.is_causal:
        raise InputError("mask.causal_offset with is_causal=False; wanted is_causal=True, or no offset.")
    if mask.sliding_window is not None:
        if mask.causal_offset is not None:
            raise ConfigError(
                "mask.sliding_window with causal_offset: levanter counts the window from the unshifted query; wanted one of them."
            )
        call["sliding_window"] = (mask.sliding_window - 1, 0)
    if mask.is_causal or mask.sliding_window is not None:
        offset = mask.causal_offset
        call["query_offset"] = 0 if offset is None else _rows(offset, axes.batch, ())
    if mask.explicit_mask is not None:
        call["mask"] = _cells(mask.explicit_mask, axes, "mask.explicit_mask")
    if mask.segment_ids is not None:
        ids = mask.segment_ids if isinstance(mask.segment_ids, tuple) else (mask.segment_ids, mask.segment_ids)
        keys = ids[1].rename({axes.queries.name: axes.keys.name}) if _has(ids[1], axes.queries) else ids[1]
        call["q_segment_ids"] = _rows(ids[0], axes.batch, (axes.queries,))
        call["kv_segment_ids"] = _rows(keys, axes.batch, (axes.keys,))
    return call


def _has(x: Any, axis: Any) -> bool:
    return axis.name in {other.name for other in x.axes}


def _cells(x: Any, axes: _Axes, name: str) -> jax.Array:
    """A mask or bias as an array that broadcasts to [batch ..., heads, q, kv]. Absent axes get length 1 if that is possible."""
    groups = [*((axis,) for axis in axes.batch), axes.query_heads, (axes.queries,), (axes.keys,)]
    axis_names = {axis.name for group in groups for axis in group}
    unknown = [axis for axis in x.axes if axis.name not in axis_names]
    if unknown:
        raise InputError(f"{name} has axes {_text(x.axes)}; wanted some of {', '.join(sorted(axis_names))}.")
    shape: list[int] = []
    ordered: list[Any] = []
    for group in groups:
        present = [axis for axis in group if _has(x, axis)]
        for axis in group if present else ():
            ordered.append(axis)
            x = x if _has(x, axis) else x.broadcast_axis(axis)
        shape.append(math.prod(axis.size for axis in group) if present else 1)
    return x.rearrange(tuple(axis.name for axis in ordered)).array.reshape(shape)


def _rows(x: Any, batch: tuple[Any, ...], trailing: tuple[Any, ...]) -> jax.Array:
    """Integers for each row, [batch, ...], with the batch axes merged as a call's are."""
    if not isinstance(x, hax.NamedArray):
        x = hax.named(jnp.asarray(x), ())
    for axis in (*batch, *trailing):
        x = x if _has(x, axis) else x.broadcast_axis(axis)
    ordered = x.rearrange(tuple(axis.name for axis in (*batch, *trailing))).array
    return ordered.reshape(math.prod(axis.size for axis in batch), *(axis.size for axis in trailing))


def _text(axes: Sequence[Any]) -> str:
    return "(" + ", ".join(f"{axis.name}={axis.size}" for axis in axes) + ")"
