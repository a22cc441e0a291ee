"""Tables by distance in place of those by bucket: what a thread would compute for each pair, XLA computes for each distance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....scores.steps import Lookup, Steps

__all__ = ["by_distance"]

_MOST = 4096  # numbers of a head's table by distance: 16 KB of a multiprocessor's cache


@dataclass(frozen=True)
class _Ahead:
    """How many keys after the first that a table by distance knows."""

    before: int

    def __call__(self, q: Any, kv: Any) -> Any:
        return kv - q + self.before


def by_distance(steps: Steps, arrays: tuple[jax.Array, ...]) -> tuple[Steps, tuple[jax.Array, ...]]:
    """The same with tables by distance instead of those by bucket of a distance: a kernel has no bucket to compute. Keys beyond a
    table's ends have the numbers there."""
    made, found = list(steps.steps), list(arrays)
    for number, step in enumerate(steps.steps):
        if not isinstance(step, Lookup) or step.reach is None or sum(step.reach) >= _MOST:
            continue
        before, after = step.reach
        distances = jnp.arange(-before, after + 1, dtype=np.int32)
        index = step.index(jnp.zeros_like(distances), distances)
        found[step.reads[0]] = jnp.take(arrays[step.reads[0]], index, axis=1, mode="clip")
        made[number] = replace(step, index=_Ahead(before))
    return replace(steps, steps=tuple(made)), tuple(found)
