"""Which part of an array each device holds under a sharding, and what it lacks for another sharding."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .fit import axes_at

__all__ = ["Parts", "comparable", "lacking", "parts_of"]


class Parts(NamedTuple):
    """The part of an array on each device: start and end along each dimension, integers [devices, dims].

    `devices` are those of the mesh, or their positions in it if it has none.
    """

    devices: tuple[Any, ...]
    begin: np.ndarray
    end: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Elements on each device."""
        return (self.end - self.begin).prod(axis=1)


def comparable(source: Sharding, target: NamedSharding) -> bool:
    """Whether the devices of the two can be matched: both have devices, or both have the same mesh axes."""
    if not (_abstract(source) or _abstract(target)):
        return True
    return isinstance(source, NamedSharding) and dict(source.mesh.shape) == dict(target.mesh.shape)


def parts_of(sharding: Sharding, shape: tuple[int, ...], *, positions: bool = False) -> Parts | None:
    """The part on each device; None if the shape doesn't divide. With `positions`, devices are numbered instead of named."""
    if not isinstance(sharding, NamedSharding):
        indices = sharding.devices_indices_map(shape)
        ends = [[part.indices(length)[:2] for part, length in zip(i, shape, strict=True)] for i in indices.values()]
        bounds = np.array(ends, np.int64).reshape(len(indices), len(shape), 2)
        return Parts(tuple(indices), bounds[..., 0], bounds[..., 1])
    sizes = dict(sharding.mesh.shape)
    count = math.prod(sizes.values())
    at = dict(zip(sizes, np.unravel_index(np.arange(count), tuple(sizes.values())), strict=True))
    begin = np.zeros((count, len(shape)), np.int64)
    end = np.tile(np.array(shape, np.int64), (count, 1))
    for dim, length in enumerate(shape):
        number, pieces = np.zeros(count, np.int64), 1
        for axis in axes_at(sharding.spec, dim):
            number, pieces = number * sizes[axis] + at[axis], pieces * sizes[axis]
        if length % pieces:
            return None
        begin[:, dim] = number * (length // pieces)
        end[:, dim] = begin[:, dim] + length // pieces
    named = positions or isinstance(sharding.mesh, AbstractMesh)
    return Parts(tuple(range(count)) if named else tuple(np.ravel(sharding.mesh.devices)), begin, end)


def lacking(source: Parts, target: Parts) -> np.ndarray:
    """The number of elements that each device of the target needs but doesn't hold, integers [devices]."""
    row_of = {device: row for row, device in enumerate(source.devices)}
    rows = np.array([row_of.get(device, -1) for device in target.devices])
    both = np.minimum(source.end[rows], target.end) - np.maximum(source.begin[rows], target.begin)
    return target.sizes - np.where(rows < 0, 0, both.clip(min=0).prod(axis=1))


def _abstract(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
