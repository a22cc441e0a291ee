"""default_promotion: other libraries' functions are traced by the rules that they were written for, whatever the caller's."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["default_promotion", "is_strict", "wider"]

_declared = operator.attrgetter("jax_numpy_dtype_promotion")  # missing from jax's types


@contextmanager
def default_promotion() -> Iterator[None]:
    """jax's default promotion of dtypes and ranks.

    A caller's stricter rules are about the caller's code. Under "strict", jax.nn.dot_product_attention itself raises for
    bfloat16.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def wider(first: Any, second: Any) -> np.dtype:
    """The dtype that holds the numbers of both, whatever the caller's promotion allows."""
    with default_promotion():
        return np.dtype(jnp.promote_types(first, second))


def is_strict() -> bool:
    """Whether the caller allows no promotion of dtypes."""
    return bool(_declared(jax.config) == "strict")
