"""Which devices a collective of a compiled program connects, and along which mesh axes they lie."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

__all__ = ["axes_along", "device_groups"]

_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\] *\{(.*?)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}")

Groups = tuple[tuple[int, ...], ...]


def device_groups(line: str, devices: int) -> Groups:
    """The groups of devices of an instruction, by their places in the mesh; for a permute, its pairs of distinct devices.

    Errors: ValueError if the text has an unknown form.
    """
    if pairs := _PAIRS.search(line):
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", pairs[0]) if a != b)
    if mesh := _MESH.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        joined = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", mesh[2])]
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        group_size = math.prod(places.shape[axis] for axis in joined)
        return _rows(np.moveaxis(places, joined, range(-len(joined), 0)).reshape(-1, group_size))
    if iota := _IOTA.search(line):
        dims = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else range(len(dims))
        places = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return _rows(places.reshape(int(iota[1]), int(iota[2])))
    if listed := _LISTED.search(line):
        groups = tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
        return groups or (tuple(range(devices)),)  # {} is all devices
    raise ValueError(f"no groups of devices can be read from {line.strip()[:200]!r}.")


def axes_along(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    shape, axes = tuple(sizes.values()), set[str]()
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        axes |= {name for name, along in zip(sizes, places, strict=True) if len(set(along)) > 1}
    return tuple(name for name in sizes if name in axes)


def _rows(places: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in places)
