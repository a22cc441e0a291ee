"""What a recurrent call is checked for besides its table: sizes that don't fit, and values that the host knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from ...errors import InputError, InputTypeError, nearest, shown
from ...masks.int_arrays import known_values
from ...planning.recurrent.step_operands import CONV_ROWS
from ..call.arrays import is_array

__all__ = ["check_convolutions", "check_sizes", "check_values", "option_value", "without_gradient"]

_DTYPES = ("float32", "bfloat16", "float16")
_COPIED = 1 << 16  # numbers of a device's array that are copied to the host for a check


def check_sizes(sizes: Mapping[str, int], shapes: Mapping[str, Any]) -> None:
    """Refuse dims of 0, heads that don't make groups, and floats that aren't computed with. Errors: InputError."""
    for name, x in shapes.items():
        if not np.issubdtype(x.dtype, np.integer) and x.dtype.name not in _DTYPES:
            raise InputError(f"{name} is {x.dtype}; wanted one of {', '.join(_DTYPES)}.")
    if empty := sorted(name for name, size in sizes.items() if size == 0 and name != "history"):
        raise InputError(f"{', '.join(empty)}: 0; wanted at least 1.")
    if "kv_heads" in sizes and sizes["heads"] % sizes["kv_heads"]:
        raise InputError(
            f"{sizes['heads']} heads of values over {sizes['kv_heads']} of queries and keys; wanted a multiple of them."
        )


def check_convolutions(arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse convolutions of a step that lack an array, that are of one token, or whose windows aren't in the tokens' dtype.
    Errors: InputError."""
    weight, _, window = CONV_ROWS
    for name in [one for one in arrays if one.endswith(CONV_ROWS)]:
        of = next(name.removesuffix(f"_{end}") for end in CONV_ROWS if name.endswith(end))
        if missing := [one for end in (weight, window) if (one := f"{of}_{end}") not in arrays]:
            raise InputError(
                f"{name} and no {', '.join(missing)}; wanted both for a convolution of {of}, or none of its arrays."
            )
        if name.endswith(window) and arrays[name].dtype != arrays[of].dtype:
            raise InputError(
                f"{name} is {arrays[name].dtype}; wanted {arrays[of].dtype}, as {of}, whose last tokens it holds."
            )
    if "width" in sizes and sizes["width"] < 2:
        raise InputError(f"convolutions of width {sizes['width']}; wanted at least 2 tokens.")


def check_values(
    arrays: Mapping[str, Any], sizes: Mapping[str, int], gate: str, beta: str, beta_max: float, *, steps: bool = False
) -> None:
    """Refuse values that the host has and that can't be meant. steps: whether dt counts as it is given. Errors: InputError with
    the array and its number."""

    def known(name: str) -> tuple[float, float] | None:
        """The least and the greatest value, NaN if it has one; None if the host doesn't know them."""
        x = arrays.get(name)
        if x is None or not is_array(x) or (isinstance(x, jax.Array) and x.size > _COPIED):
            return None
        values = known_values(x)
        if values is not None and "lengths" in arrays:
            values = values[~np.isnan(values)]  # tokens that don't count may hold NaN
        return None if values is None or not values.size else (float(values.min()), float(values.max()))

    decay = known("decay") if gate == "log_decay" else None
    if decay is not None and not decay[1] <= 0:
        raise InputError(
            f"decay holds {decay[1]:g}; wanted log decays, at most 0. A model's raw gate is declared by gate='raw'."
        )
    strength = known("beta") if beta == "value" else None
    if strength is not None and not (strength[0] >= 0 and strength[1] <= beta_max):
        worst = strength[0] if not strength[0] >= 0 else strength[1]
        raise InputError(
            f"beta holds {worst:g}; wanted 0 to {beta_max:g}. Declare beta_max=2 for a model whose betas go up to 2, or "
            "beta_form='sigmoid' for what a model projects."
        )
    rate = known("A")
    if rate is not None and not rate[1] <= 0:
        raise InputError(f"A holds {rate[1]:g}; wanted rates of decay, at most 0: -exp(A_log) of a checkpoint.")
    step = known("dt") if steps and "dt_bias" not in arrays else None
    if step is not None and not step[0] >= 0:
        raise InputError(
            f"dt holds {step[0]:g}; wanted steps of at least 0. Declare dt_softplus=True for what a model projects."
        )
    lengths = known("lengths")
    if lengths is not None and not (lengths[0] >= 0 and lengths[1] <= sizes["q_len"]):
        worst = lengths[0] if lengths[0] < 0 else lengths[1]
        raise InputError(f"lengths holds {worst:g}; wanted 0 to {sizes['q_len']}, the tokens of the call.")


def option_value(name: str, value: Any, kind: type, known: tuple[str, ...]) -> Any:
    """A static argument of a type, None for none; known: what one of type str may be. Errors: InputError and InputTypeError."""
    if value is None:
        return None
    accepted: Any = (int, float, np.integer, np.floating) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise InputTypeError(f"{name}={shown(value)}; wanted a {kind.__name__}.")
    if kind is float and not (np.isfinite(value) and value > 0):
        raise InputError(f"{name}={shown(value)}; wanted a finite number above 0.")
    if kind is str and value not in known:
        raise InputError(f"{name}={shown(value)}; wanted {' or '.join(map(repr, known))}." + nearest(value, known))
    return kind(value)


@jax.custom_jvp
def without_gradient(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of a step over slots, which has no gradient. Errors: InputError where they are differentiated."""
    return arrays


def _refuse(*_: object) -> NoReturn:
    raise InputError(
        "a step over slots was differentiated; wanted a call outside jax.grad: serving has no gradient. Train with the whole "
        "call, such as gated_delta_rule, or put jax.lax.stop_gradient around the arguments."
    )


without_gradient.defjvp(_refuse)
