"""What a recurrent call is checked for besides its table: fields that nothing reads, and values that the host knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InputError
from ...masks.int_arrays import known_values
from ...planning import Policy
from ...registry import OperationMetadata
from ..call.arrays import is_array

__all__ = ["check_values", "unread_fields"]


def unread_fields(metadata: OperationMetadata) -> list[str]:
    """The declared fields of the metadata that only attention reads."""
    plain, default = OperationMetadata(), Policy()
    names = ("runtime_dtype", "runtime_softmax_dtype", "dropout_prob", "softmax_scale", "causal")
    policy = ("kv_heads", "ring_order", "scan_ring_attention")
    changed = [name for name in names if getattr(metadata, name) != getattr(plain, name)]
    return changed + [name for name in policy if getattr(metadata.policy, name) != getattr(default, name)]


def check_values(arrays: Mapping[str, Any], sizes: Mapping[str, int], gate: str, beta: str, beta_max: float) -> None:
    """Refuse values that the host has and that can't be meant. Errors: InputError with the array and its number."""

    def known(name: str) -> np.ndarray | None:
        x = arrays.get(name)
        values = known_values(x) if x is not None and is_array(x) else None
        return None if values is None or not values.size else values.astype(np.float64)

    decay = known("decay") if gate == "log_decay" else None
    if decay is not None and not decay.max() <= 0:
        raise InputError(
            f"decay holds {decay.max():g}; wanted log decays, at most 0. A model's raw gate is declared by gate='raw'."
        )
    strength = known("beta") if beta == "value" else None
    if strength is not None and not (strength.min() >= 0 and strength.max() <= beta_max):
        worst = strength.min() if not strength.min() >= 0 else strength.max()
        raise InputError(
            f"beta holds {worst:g}; wanted 0 to {beta_max:g}. Declare beta_max=2 for a model whose betas go up to 2, or "
            "beta_form='sigmoid' for what a model projects."
        )
    rate = known("A")
    if rate is not None and not rate.max() <= 0:
        raise InputError(f"A holds {rate.max():g}; wanted rates of decay, at most 0: -exp(A_log) of a checkpoint.")
    lengths = known("lengths")
    if lengths is not None and not (lengths.min() >= 0 and lengths.max() <= sizes["q_len"]):
        worst = lengths.min() if lengths.min() < 0 else lengths.max()
        raise InputError(f"lengths holds {worst:g}; wanted 0 to {sizes['q_len']}, the tokens of the call.")
