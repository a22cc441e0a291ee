"""Which devices a collective of a compiled program connects, and along which mesh axes they lie."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

__all__ = ["axes_along", "device_groups"]

_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, *device_ids=\((.*?\)?)\))? *\{(.*?)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")  # of a mesh's devices: a transposed count, or listed
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
        return _rows(_of_mesh(*mesh.groups()))
    if iota := _IOTA.search(line):
        return _rows(_counted(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])))
    if listed := _LISTED.search(line):
        groups = tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
        return groups or (tuple(range(devices)),)  # {} is all devices
    raise ValueError(f"no groups of devices can be read from {line.strip()[:200]!r}.")


def _of_mesh(axes: str, device_ids: str | None, joined: str) -> np.ndarray:
    """[groups, devices]. axes: 'x'=4,'y'=2. device_ids: [2,2,2]T(1,0,2), or numbers; None if they count up. joined: 'x', or of a
    part of an axis 'x':(parts before)size."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids is not None:
        order = _ORDER.fullmatch(device_ids)
        devices = np.array([int(n) for n in device_ids.split(",")]) if order is None else _counted(order[1], order[2])
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", joined):
        parts[name].append((int(before or 1), int(size or sizes[name])))
    shape, inside = list[int](), list[int]()
    for name, whole in sizes.items():
        done = 1
        for before, size in sorted(parts[name]):
            shape += [before // done, size]
            inside.append(len(shape) - 1)
            done = before * size
        shape.append(whole // done)
    group_size = math.prod(shape[at] for at in inside)
    return np.moveaxis(devices.reshape(shape), inside, range(-len(inside), 0)).reshape(-1, group_size)


def _counted(dims: str, order: str | None) -> np.ndarray:
    """The numbers from 0 in this shape, transposed and then in a row."""
    shape = [int(n) for n in dims.split(",")]
    places = np.arange(math.prod(shape)).reshape(shape)
    return places.transpose([int(n) for n in order.split(",")] if order else range(len(shape))).reshape(-1)


def axes_along(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    shape, axes = tuple(sizes.values()), set[str]()
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        axes |= {name for name, along in zip(sizes, places, strict=True) if len(set(along)) > 1}
    return tuple(name for name in sizes if name in axes)


def _rows(places: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in places)
