"""pin and place: where arrays end up on Auto, Explicit, Manual and mixed meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops.sharding import current_mesh, pin, place, virtual_mesh

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
SPECS = [P("a", "b"), P("b"), P(None, "a"), P(("a", "b"), None), P(None, ("b", "a")), P(), P(None, None)]


def mesh_of(*kinds):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)


def shards(array):
    """{device: the part of X that it holds}, which is what a placement is."""
    return {shard.device.id: np.asarray(shard.data).tolist() for shard in array.addressable_shards}


def wanted_shards(mesh, spec):
    return shards(jax.device_put(X, NamedSharding(mesh, spec)))


def _only(spec, name):
    def keep(entry):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return name if name in names else None

    return [keep(entry) for entry in (*spec, None, None)[:2]]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
@pytest.mark.parametrize("context", [True, False])
def test_pin_puts_every_axis_where_the_spec_says(kinds, spec, context):
    mesh = mesh_of(*kinds)
    if kinds[0] is not kinds[1] and any(isinstance(entry, tuple) for entry in spec):
        return  # axes of two types on one dimension: jax decides their order, see the next test
    seen = []

    def body(x):
        y = pin(x, spec, current_mesh() if context else mesh)
        seen.append(jax.typeof(y).sharding.spec)
        return y

    if context:
        with jax.set_mesh(mesh):
            y = jax.jit(body)(X)
    else:
        x = jax.device_put(X, NamedSharding(mesh, P()))  # jit has no other way to learn the devices of Explicit axes
        y = jax.jit(body)(x)
    np.testing.assert_array_equal(y, X)
    assert shards(y) == wanted_shards(mesh, spec)
    # Explicit axes are part of the traced type; Auto axes never are.
    for name, kind in zip("ab", kinds, strict=True):
        assert _only(seen[0], name) == (_only(spec, name) if kind is EXPLICIT else [None, None])


@pytest.mark.parametrize("kinds", [(AUTO, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
def test_a_dimension_split_over_axes_of_two_types(kinds):
    mesh = mesh_of(*kinds)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: pin(x, P(("a", "b"), None), mesh))(X)
    np.testing.assert_array_equal(y, X)
    assert y.sharding.shard_shape(y.shape) == (1, 8)


def test_pin_moves_an_array_that_lies_otherwise():
    for kind in (AUTO, EXPLICIT):
        mesh = mesh_of(kind, kind)
        x = jax.device_put(X, NamedSharding(mesh, P("b", "a")))
        y = jax.jit(lambda x, mesh=mesh: pin(x, P("a", "b"), mesh))(x)
        np.testing.assert_array_equal(y, X)
        assert shards(y) == wanted_shards(mesh, P("a", "b"))


def test_pin_without_a_mesh_is_nothing():
    x = jnp.asarray(X)
    assert pin(x, P("a"), None) is x


def test_pin_leaves_manual_axes_alone():
    mesh = mesh_of(AUTO, AUTO)

    def body(x):
        return pin(x, P("a", "b"), current_mesh())

    def mapped(axes):
        spec = P("a", "b" if "b" in axes else None)
        return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)

    full = str(jax.make_jaxpr(jax.jit(mapped({"a", "b"})))(X))
    assert "sharding_constraint" not in full
    assert "reshard" not in full
    partial = str(jax.make_jaxpr(jax.jit(mapped({"a"})))(X))
    assert partial.count("sharding_constraint") == 1
    for axes in ({"a"}, {"a", "b"}):
        y = jax.jit(mapped(axes))(X)
        np.testing.assert_array_equal(y, X)
        assert shards(y) == wanted_shards(mesh, P("a", "b"))


def test_pin_inside_a_shard_map_over_some_explicit_axes():
    mesh = mesh_of(EXPLICIT, EXPLICIT)

    def body(x):
        return pin(x, P("a", "b"), current_mesh())

    x = jax.device_put(X, NamedSharding(mesh, P("a", None)))
    with jax.set_mesh(mesh):
        y = jax.jit(jax.shard_map(body, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))(x)
    np.testing.assert_array_equal(y, X)
    assert shards(y) == wanted_shards(mesh, P("a", "b"))


def test_place_puts_numpy_and_arrays_from_elsewhere_on_the_mesh():
    mesh = mesh_of(AUTO, AUTO)
    alone = jax.device_put(X, jax.devices()[5])
    half = jax.device_put(X, NamedSharding(virtual_mesh({"c": 4}), P("c")))
    for source in (X, alone, half):
        assert shards(place(source, P("a", "b"), mesh)) == wanted_shards(mesh, P("a", "b"))


def test_place_leaves_what_jit_can_lay_out_itself():
    mesh = mesh_of(AUTO, AUTO)
    free = jnp.asarray(X)
    assert place(free, P("a"), mesh) is free
    there = jax.device_put(X, NamedSharding(mesh, P("b")))
    assert place(there, P("a"), mesh) is there
    other_names = jax.device_put(X, NamedSharding(virtual_mesh({"c": 8}), P("c")))
    assert place(other_names, P("a"), mesh) is other_names


def test_place_moves_between_orders_of_the_same_devices():
    """jit refuses arguments on the same devices in another order, so being on the same set isn't enough."""
    mesh = mesh_of(AUTO, AUTO)
    reordered = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    x = jax.device_put(X, NamedSharding(reordered, P("a", "b")))
    y = jax.jit(lambda x: pin(x, P("a", "b"), mesh))(place(x, P("a", "b"), mesh))
    np.testing.assert_array_equal(y, X)
    assert shards(y) == wanted_shards(mesh, P("a", "b"))
