"""current_mesh: from jax.set_mesh, `with mesh:`, inside jit, inside shard_map, and nowhere."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attnops.registry import OperationMetadata
from attnops.sharding import current_mesh, virtual_mesh


@pytest.fixture
def mesh():
    return virtual_mesh({"a": 2, "b": 4})


def seen_inside(function, *args):
    """What current_mesh says while `function(body)` is traced."""
    seen = []

    def body(x):
        seen.append(current_mesh())
        return x

    function(body)(*args)
    return seen[0]


def test_none():
    assert current_mesh() is None
    assert seen_inside(jax.jit, 1.0) is None
    assert OperationMetadata().mesh is None


def test_set_mesh(mesh):
    with jax.set_mesh(mesh):
        assert current_mesh() is mesh
        assert OperationMetadata().mesh is mesh
    assert current_mesh() is None


def test_with_mesh(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:` is deprecated by jax, and still used
        manager = mesh
        manager.__enter__()
    try:
        assert current_mesh() is mesh
        assert seen_inside(jax.jit, 1.0) is mesh
        assert OperationMetadata().mesh is mesh
    finally:
        manager.__exit__(None, None, None)
    assert current_mesh() is None


def test_inside_jit(mesh):
    with jax.set_mesh(mesh):
        seen = seen_inside(jax.jit, 1.0)
    assert isinstance(seen, AbstractMesh)
    assert seen.shape == mesh.shape


def test_set_mesh_is_nearer_than_with_mesh(mesh):
    outer = virtual_mesh({"c": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with outer, jax.set_mesh(mesh):
            assert current_mesh() is mesh


def test_the_innermost_mesh_is_in_force(mesh):
    inner = AbstractMesh((8,), ("c",))
    with jax.set_mesh(mesh):
        with jax.sharding.use_abstract_mesh(inner):
            assert current_mesh() == inner
        assert current_mesh() is mesh


@pytest.mark.parametrize("axes", [{"a"}, {"a", "b"}])
@pytest.mark.parametrize("declared", [True, False])
def test_inside_shard_map(mesh, axes, declared):
    def mapped(body):
        if declared:
            return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=axes))
        return jax.jit(jax.shard_map(body, in_specs=P("a"), out_specs=P("a"), axis_names=axes))

    if declared:
        seen = seen_inside(mapped, jnp.arange(8.0))
    else:
        with jax.set_mesh(mesh):
            seen = seen_inside(mapped, jnp.arange(8.0))
    assert isinstance(seen, AbstractMesh)
    assert set(seen.manual_axes) == axes
    assert dict(zip(seen.axis_names, seen.axis_types, strict=True)) == {
        name: AxisType.Manual if name in axes else AxisType.Auto for name in ("a", "b")
    }


def test_the_declared_mesh_beats_the_context(mesh):
    metadata = OperationMetadata(mesh={"tp": 4})
    with jax.set_mesh(mesh):
        assert isinstance(metadata.mesh, Mesh)
        assert metadata.mesh.shape == {"tp": 4}
        assert metadata.replace(mesh=None).mesh is mesh
