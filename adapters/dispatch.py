"""Helpers for a dispatcher with its own call form: logical axes, parts of a softmax, block sizes. Requires only jax."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import ConfigError, InputError, InputTypeError, a_type, nearest, shown
from ..operators.call.arrays import is_array
from ..operators.splash import SplashConfig
from ..planning import OperationConfig
from ..sharding import PartitionAxis

__all__ = ["max_and_sum", "partition_axis_from_rules", "splash_config_from"]

_TRAINING = (
    "batch_axis", "query_sequence_axis", "key_sequence_axis", "head_axis", "kv_head_axis", "attention_dim_axis",
    "attention_kv_dim_axis",
)  # fmt: skip
_FIELDS = (*_TRAINING, *(f"decode_{name}" for name in _TRAINING), "bias_head_sequence_axis", "bias_key_sequence_axis")
# The maximum that stands for a row without keys: finite, so that differences aren't NaN.
_NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)


def partition_axis_from_rules(
    rules: Mapping[str, Any] | Iterable[tuple[str, Any]], names: Mapping[str, str | None]
) -> PartitionAxis:
    """The PartitionAxis of logical axis rules as in flax and MaxText: (logical name, a mesh axis, several, or None).

    names: the logical name of each field, such as {"batch_axis": "activation_batch", "head_axis": "heads"}. A field that is
    missing or None isn't split. Exceptions: a decode_* field follows its training field, and decode_query_sequence_axis is None.
    Errors: ConfigError for an unknown field or logical name, and for a name here whose rules differ.
    """
    axes_by_rule: dict[str, list[tuple[str, ...] | None]] = {}
    for rule in rules.items() if isinstance(rules, Mapping) else rules:
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            raise ConfigError(f"rule {shown(rule)}; wanted (logical name, mesh axis, a tuple of them, or None).")
        axes = _axes(*rule)
        if axes not in axes_by_rule.setdefault(rule[0], []):
            axes_by_rule[rule[0]].append(axes)
    mesh_axes: dict[str, Any] = dict.fromkeys((*_TRAINING, "bias_head_sequence_axis", "bias_key_sequence_axis"))
    for field, name in names.items():
        if field not in _FIELDS:
            raise ConfigError(
                f"{shown(field)} isn't a PartitionAxis field that attention reads; wanted {', '.join(_FIELDS)}."
                + nearest(field, _FIELDS)
            )
        if name is not None and name not in axes_by_rule:
            raise ConfigError(
                f"{field}={shown(name)}, but no rule has that name; wanted one of {', '.join(map(str, axes_by_rule))}."
                + nearest(name, axes_by_rule)
            )
        if name is not None and len(axes_by_rule[name]) > 1:
            several = ", ".join(map(shown, axes_by_rule[name]))
            raise ConfigError(
                f"{field}={shown(name)} has {len(axes_by_rule[name])} rules, {several}; which one applies would "
                "depend on the other dimensions of a tensor. Hint: keep one of them."
            )
        mesh_axes[field] = None if name is None else axes_by_rule[name][0]
    for field in _TRAINING:
        if field != "query_sequence_axis":
            mesh_axes.setdefault(f"decode_{field}", mesh_axes[field])
    mesh_axes.setdefault("decode_query_sequence_axis", None)
    return PartitionAxis(**mesh_axes)


def _axes(logical: Any, axes: Any) -> tuple[str, ...] | None:
    parts = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if (
        not isinstance(logical, str)
        or not isinstance(parts, tuple | list)
        or not all(isinstance(x, str) for x in parts)
    ):
        raise ConfigError(f"rule {shown((logical, axes))}; wanted (logical name, mesh axis, a tuple of them, or None).")
    return tuple(parts) or None


def max_and_sum(
    lse: Float[Array, "batch heads q"], layout: str = "bthd"
) -> tuple[Float[Array, ...], Float[Array, ...]]:
    """(max, sum) for a dispatcher that merges parts of a softmax, to go with the output of a call with return_lse=True.

    Shapes: both [batch, q, heads, 1] in layout bthd, [batch, heads, q, 1] in bhtd, so that they broadcast with the output. For
    parts (out, max, sum) such a dispatcher computes sum_i(exp(max_i - m) out_i) / sum_i(exp(max_i - m) sum_i), where m is the
    greatest max. attnops' outputs are already divided by their sums: the log-sum-exp stands for the max, and 1 for the sum. A
    row without keys has output 0 and a large negative number here, which never produces NaN.
    """
    if not is_array(lse) or lse.ndim != 3 or not jnp.issubdtype(lse.dtype, jnp.floating):
        got = f"{lse.dtype}{list(lse.shape)}" if is_array(lse) else a_type(lse)
        raise InputTypeError(
            f"lse is {got}; wanted floats [batch, heads, q], as returned by a call with return_lse=True."
        )
    if layout not in ("bthd", "bhtd"):
        raise InputError(f"layout={shown(layout)}; wanted 'bthd' or 'bhtd'.")
    lowest = jnp.asarray(max(_NOTHING, 0.7 * float(jnp.finfo(lse.dtype).min)), lse.dtype)
    row_max = jnp.maximum(lse, jax.lax.stop_gradient(lowest))
    row_max = (row_max.swapaxes(1, 2) if layout == "bthd" else row_max)[..., None]
    return row_max, jnp.ones_like(row_max)


def splash_config_from(blocks: Any, *, prefix: str = "", ignore: Collection[str] = (), **fields: Any) -> SplashConfig:
    """The SplashConfig of block sizes held in another form: jax's BlockSizes, a dict of its names, a config with a prefix.

    prefix: selects attributes or keys that begin with it, as in MaxText's sa_block_q; all other names are skipped. Without a
    prefix every name must be a field. ignore: names, without the prefix, to skip. Layouts may be enums or upper case. fields:
    other fields of SplashConfig, such as kernel="jax". Errors: ConfigError for names that SplashConfig doesn't have, for names
    in ignore that don't occur or that it has, and if nothing has the prefix.
    """
    if isinstance(blocks, Mapping):
        block_fields = dict(blocks)
    elif isinstance(blocks, OperationConfig):
        return SplashConfig.coerce(blocks).with_fields(fields)
    else:
        names = getattr(blocks, "__dataclass_fields__", None) or getattr(blocks, "_fields", None) or vars(blocks)
        block_fields = {name: getattr(blocks, name) for name in names if not name.startswith("_")}
    config = {n.removeprefix(prefix): _plain(value) for n, value in block_fields.items() if n.startswith(prefix)}
    for name in ignore:
        if name not in config or name in SplashConfig.model_fields:
            why = "is a field of SplashConfig" if name in config else f"isn't among {', '.join(config) or 'no names'}"
            raise ConfigError(f"ignore={shown(name)}, which {why}; remove it from ignore.")
        del config[name]
    if prefix and not config:
        raise ConfigError(f"no name begins with {shown(prefix)}; got {', '.join(map(str, block_fields)) or 'nothing'}.")
    twice = [name for name in fields if name in config]
    if twice:
        raise ConfigError(f"{', '.join(twice)}: specified in the block sizes and as fields; specify it once.")
    return SplashConfig.coerce(config | fields)


def _plain(value: Any) -> Any:
    value = value.name if isinstance(value, enum.Enum) else value
    return value.lower() if value in ("HEAD_DIM_MINOR", "SEQ_MINOR") else value
