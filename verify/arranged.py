"""arranged: described devices as a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..errors import ShardingError

__all__ = ["arranged"]


def arranged(devices: Sequence[Any], sizes: Mapping[str, int] | None, target: str) -> Mesh:
    """Arrange the devices of a target as a mesh of these sizes; by default one axis 'fsdp' of all of them.

    Errors: ShardingError when the sizes don't multiply to the number of devices.
    """
    sizes = {"fsdp": len(devices)} if sizes is None else dict(sizes)
    if math.prod(sizes.values()) != len(devices):
        got = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ShardingError(
            f"mesh {got} has {math.prod(sizes.values())} devices and {target} {len(devices)}; wanted sizes that multiply to "
            f"{len(devices)}."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    try:  # neighbours on an axis are neighbours on the chips, as on a real machine
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=list(devices))
    except (NotImplementedError, ValueError, AssertionError):  # jax finds no order for the shape
        ordered: np.ndarray = np.asarray(devices).reshape(tuple(sizes.values()))
        return Mesh(ordered, tuple(sizes), axis_types=kinds)
