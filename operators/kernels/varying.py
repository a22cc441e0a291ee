"""Inside a shard_map with check_vma=True a loop's first value must vary over the same mesh axes as its results."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ...compat import varies_over

__all__ = ["alike", "vary", "varying"]


def varying(tree: Any) -> frozenset[str]:
    """Mesh axes over which any of these arrays is known to vary."""
    return frozenset().union(*(varies_over(x) for x in jax.tree.leaves(tree)))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The same array, marked as varying over these axes too."""
    missing = tuple(sorted(axes - varies_over(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def alike(tree: Any) -> Any:
    """Make all arrays vary over the same axes. The gradient of this cast sums over the axes that it added."""
    axes = varying(tree)
    return jax.tree.map(lambda x: vary(x, axes), tree) if axes else tree
