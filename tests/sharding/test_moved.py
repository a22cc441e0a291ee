"""What devices hold and lack, against jax's own index maps and a count of elements."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from attnops.sharding.moved import Parts, comparable, lacking, parts_of

SHAPE = (8, 4, 16)


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], devices: Any) -> Mesh:
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


def shardings() -> list[Sharding]:
    devices = jax.devices()
    meshes = [
        mesh_of((2, 4), ("a", "b"), devices),
        mesh_of((2, 4), ("a", "b"), devices[::-1]),
        mesh_of((4, 1), ("a", "b"), devices[2:6]),
    ]
    specs = [P(), P("a", "b"), P(None, "b", "a"), P(("b", "a")), P(("a", "b")), P("b", None, "a")]
    named = [NamedSharding(mesh, spec) for mesh, spec in itertools.product(meshes, specs)]
    return [*named, SingleDeviceSharding(devices[3]), SingleDeviceSharding(devices[0])]


def elements(sharding: Sharding) -> dict[Any, np.ndarray]:
    """{device: which elements it holds}."""
    found = {}
    for device, index in sharding.devices_indices_map(SHAPE).items():
        found[device] = np.zeros(SHAPE, bool)
        found[device][index] = True
    return found


def of(sharding: Sharding) -> Parts:
    found = parts_of(sharding, SHAPE)
    assert found is not None
    return found


@pytest.mark.parametrize("number", range(len(shardings())))
def test_as_jax_says(number: int) -> None:
    """Each sharding by itself, and against every other."""
    target = shardings()[number]
    wanted, parts = elements(target), of(target)
    assert parts.sizes.tolist() == [wanted[device].sum() for device in parts.devices]
    for source in shardings():
        held = elements(source)
        nothing = np.zeros(SHAPE, bool)
        want = [int((wanted[device] & ~held.get(device, nothing)).sum()) for device in parts.devices]
        assert lacking(of(source), parts).tolist() == want


def test_without_devices_positions_are_compared() -> None:
    mesh = mesh_of((2, 4), ("a", "b"), jax.devices())
    source, target = P("b"), P("a", "b")
    abstract = [NamedSharding(mesh.abstract_mesh, spec) for spec in (source, target)]
    real = [NamedSharding(mesh, spec) for spec in (source, target)]
    want = lacking(of(real[0]), of(real[1])).tolist()
    assert lacking(of(abstract[0]), of(abstract[1])).tolist() == want
    mixed = parts_of(real[0], SHAPE, positions=True)
    assert mixed is not None
    assert lacking(mixed, of(abstract[1])).tolist() == want
    assert comparable(real[0], abstract[1])
    assert not comparable(SingleDeviceSharding(jax.devices()[0]), abstract[1])
    assert not comparable(NamedSharding(mesh_of((8,), ("a",), jax.devices()), P()), abstract[1])


def test_scalars_and_what_does_not_divide() -> None:
    mesh = mesh_of((2, 4), ("a", "b"), jax.devices())
    whole, alone = NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[1])
    scalar = [parts_of(sharding, ()) for sharding in (alone, whole)]
    assert scalar[0] is not None
    assert scalar[1] is not None
    assert lacking(scalar[0], scalar[1]).tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert parts_of(NamedSharding(mesh, P("b")), (6,)) is None
