"""What a recurrent call is checked for besides its table: fields that nothing reads, and values that the host knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...errors import InputError
from ...masks.int_arrays import known_values
from ...planning import Policy
from ...registry import OperationMetadata
from ..call.arrays import is_array

__all__ = ["check_values", "unread_fields"]

_COPIED = 1 << 16  # numbers of a device's array that are copied to the host for a check


def unread_fields(metadata: OperationMetadata) -> list[str]:
    """The declared fields of the metadata that only attention reads."""
    plain, default = OperationMetadata(), Policy()
    names = ("runtime_dtype", "runtime_softmax_dtype", "dropout_prob", "softmax_scale", "causal")
    policy = ("kv_heads", "ring_order", "scan_ring_attention")
    changed = [name for name in names if getattr(metadata, name) != getattr(plain, name)]
    return changed + [name for name in policy if getattr(metadata.policy, name) != getattr(default, name)]


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
