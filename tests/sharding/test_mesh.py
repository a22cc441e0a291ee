"""Meshes as names and sizes, as text, and the platform of their devices; real, abstract and described."""

from __future__ import annotations

import json
import math
import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

from attnops.compat import abstract_device
from attnops.errors import ConfigError, ShardingError
from attnops.sharding import (
    MeshAxis,
    axes_of,
    describe_mesh,
    devices_platform,
    mesh_from_dict,
    mesh_to_dict,
    parse_mesh,
    virtual_mesh,
)
from attnops.sharding.mesh import gpu_vendor

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual


def real(sizes, names, kinds=None):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=kinds or (AUTO,) * len(sizes), devices=devices)


def described(platform, kind="some device", sizes=(4, 64), cores=None):
    device = abstract_device(kind=kind, cores=cores, platform=platform)
    return AbstractMesh(sizes, ("fsdp", "tp"), axis_types=(AUTO, AUTO), abstract_device=device)


def round_trip(mesh):
    return mesh_from_dict(json.loads(json.dumps(mesh_to_dict(mesh))))


@pytest.mark.parametrize(
    "mesh",
    [
        real((2, 4), ("fsdp", "tp")),
        real((8,), ("sp",)),
        real((2, 2), ("a", "b"), (EXPLICIT, AUTO)),
        real((2, 1, 4), ("x", "y", "z"), (MANUAL, EXPLICIT, AUTO)),
        AbstractMesh((2, 4), ("fsdp", "tp")),  # could have devices here, and stays without
        AbstractMesh((64, 64), ("fsdp", "tp"), axis_types=(EXPLICIT, AUTO)),
        described("tpu", "TPU v5p", cores=2),
        described("cuda", "NVIDIA H200"),
        described("gpu", "NVIDIA H200"),
        described("rocm", "AMD Instinct MI300X"),
        described("cpu", "cpu", sizes=(2, 2)),
    ],
    ids=str,
)
def test_round_trip_through_json(mesh):
    again = round_trip(mesh)
    assert type(again) is type(mesh)
    assert again == mesh
    assert again.axis_types == mesh.axis_types


def test_names_and_sizes_alone_take_the_devices_that_are_here():
    mesh = mesh_from_dict({"axis_names": ["fsdp", "tp"], "axis_sizes": [2, 4]})
    assert isinstance(mesh, Mesh)
    assert mesh.devices.shape == (2, 4)
    assert mesh.axis_types == (AUTO, AUTO)
    larger = mesh_from_dict({"axis_names": ["tp"], "axis_sizes": [16]})
    assert isinstance(larger, AbstractMesh)
    assert larger.shape == {"tp": 16}


def test_a_file_from_a_pod_is_a_described_mesh_here_and_devices_there():
    data = {"axis_names": ["tp"], "axis_sizes": [4], "platform": "tpu", "device_kind": "TPU v5 lite"}
    mesh = mesh_from_dict(data)
    assert isinstance(mesh, AbstractMesh)
    assert devices_platform(mesh) == ("tpu", "TPU v5 lite")
    # Written again here it isn't marked abstract: on the pod it gets its devices.
    assert "abstract" not in mesh_to_dict(mesh)


NAMES = st.text(st.sampled_from("abcxyz_é "), min_size=1, max_size=6)


@given(st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_round_trip_of_any_abstract_mesh(sizes, data):
    kinds = data.draw(st.lists(st.sampled_from([AUTO, EXPLICIT]), min_size=len(sizes), max_size=len(sizes)))
    platform = data.draw(st.sampled_from([None, "tpu", "gpu", "cuda", "rocm", "cpu"]))
    cores = data.draw(st.sampled_from([None, 1, 2]))
    device = platform and abstract_device(kind=f"{platform} 1", cores=cores, platform=platform)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=tuple(kinds), abstract_device=device)
    assert round_trip(mesh) == mesh


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "wanted one of each per axis"),
        ({"axis_names": ["a"], "axis_sizes": []}, "wanted one of each per axis"),
        ({"axis_names": ["a"], "axis_sizes": [2, 2]}, "wanted one of each per axis"),
        ({"axis_names": ["a"], "axis_sizes": [2], "axis_types": ["auto", "auto"]}, "wanted one of each per axis"),
        ({"axis_names": "ab", "axis_sizes": [2, 2]}, "axis_names='ab'; wanted a list"),
        ({"axis_names": ["a"], "axis_sizes": 2}, "axis_sizes=2; wanted a list"),
        ({"axis_names": ["a", "a"], "axis_sizes": [2, 2]}, "wanted distinct"),
        ({"axis_names": [""], "axis_sizes": [2]}, "non-empty names"),
        ({"axis_names": [["a"]], "axis_sizes": [2]}, "non-empty names"),
        ({"axis_names": ["a"], "axis_sizes": [0]}, "positive integers"),
        ({"axis_names": ["a"], "axis_sizes": [-2]}, "positive integers"),
        ({"axis_names": ["a"], "axis_sizes": [True]}, "positive integers"),
        ({"axis_names": ["a"], "axis_sizes": [2.0]}, "positive integers"),
        ({"axis_names": ["a"], "axis_sizes": ["2"]}, "positive integers"),
        ({"axis_names": ["a"], "axis_sizes": [2], "axis_types": ["automatic"]}, "wanted auto, explicit, manual"),
        ({"axis_names": ["a"], "axis_sizes": [2], "platform": "tqu"}, "Did you mean 'tpu'"),
        ({"axis_name": ["a"], "axis_sizes": [2]}, "Did you mean 'axis_names'"),
    ],
)
def test_a_broken_mesh_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        mesh_from_dict(data)


@pytest.mark.parametrize(
    ("text", "sizes"), [("tp=4", {"tp": 4}), ("fsdp=2,tp=4", {"fsdp": 2, "tp": 4}), (" a=1 , b=12 ", {"a": 1, "b": 12})]
)
def test_parse_mesh(text, sizes):
    assert parse_mesh(text) == sizes
    assert list(parse_mesh(text)) == list(sizes)  # the order of axes is part of a mesh


@pytest.mark.parametrize(
    "text", ["", "tp", "tp=", "=4", "tp=0", "tp=-1", "tp=two", "tp=2;fsdp=2", "tp=2,", "tp=1.5", "2=tp"]
)
def test_text_that_is_no_mesh_shows_the_form(text):
    with pytest.raises(ShardingError, match="wanted a mesh such as fsdp=2,tp=4"):
        parse_mesh(text)


def test_an_axis_twice_in_text():
    with pytest.raises(ShardingError, match="names the axis 'tp' twice"):
        parse_mesh("tp=2,tp=2")


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), st.integers(1, 10**6), min_size=1))
def test_parse_mesh_reads_what_describe_mesh_writes(sizes):
    assert parse_mesh(describe_mesh(axes_of(sizes))) == sizes


def test_virtual_mesh():
    mesh = virtual_mesh({"fsdp": 2, "tp": 2})
    assert mesh.shape == {"fsdp": 2, "tp": 2}
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert mesh.axis_types == (AUTO, AUTO)
    assert virtual_mesh({"tp": 8}, explicit=True).axis_types == (EXPLICIT,)
    with pytest.raises(ShardingError, match=r"needs 16 devices, but there are 8.*device_count=16"):
        virtual_mesh({"fsdp": 2, "tp": 8})


@pytest.mark.parametrize("sizes", [{}, {"tp": 0}, {"tp": -4}, {"tp": 2.0}, {"tp": True}])
def test_virtual_mesh_wants_positive_integers(sizes):
    with pytest.raises(ShardingError, match="wanted"):
        virtual_mesh(sizes)


def test_axes_and_description():
    assert axes_of(None) == ()
    assert axes_of({"a": 2, "b": 1}) == (MeshAxis("a", 2), MeshAxis("b", 1))
    mesh = AbstractMesh((2, 3, 4), ("a", "b", "c"), axis_types=(AUTO, EXPLICIT, MANUAL))
    assert axes_of(mesh) == (MeshAxis("a", 2, "auto"), MeshAxis("b", 3, "explicit"), MeshAxis("c", 4, "manual"))
    assert describe_mesh(mesh) == "a=2,b=3(explicit),c=4(manual)"
    assert describe_mesh(None) == "none"


def test_the_platform_of_real_devices():
    assert devices_platform(virtual_mesh({"tp": 2})) == ("cpu", "cpu")
    assert devices_platform(virtual_mesh({"tp": 2}).abstract_mesh) == ("cpu", "cpu")
    assert devices_platform(None) is None
    assert devices_platform(AbstractMesh((2,), ("tp",))) is None


@pytest.mark.parametrize(
    ("platform", "kind", "want"),
    [
        ("tpu", "TPU v5p", "tpu"),
        ("cpu", "cpu", "cpu"),
        ("cuda", "NVIDIA H200", "cuda"),
        ("rocm", "AMD Instinct MI300X", "rocm"),
        ("gpu", "NVIDIA H200", "cuda"),  # what jax calls a GPU in an abstract mesh, as under jit
        ("gpu", "AMD Instinct MI300X", "rocm"),
        ("gpu", "GPU of a kind", "gpu"),
    ],
)
def test_the_platform_of_described_devices(platform, kind, want):
    assert devices_platform(described(platform, kind)) == (want, kind)


@pytest.mark.parametrize(
    ("platform", "version", "want"),
    [
        ("gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("gpu", "PJRT C API\nrocm 60300", "rocm"),
        ("gpu", "something", "gpu"),
        ("cpu", "cuda", "cpu"),
        ("tpu", "", "tpu"),
    ],
)
def test_gpu_vendor_by_the_runtime(platform, version, want):
    assert gpu_vendor(platform, types.SimpleNamespace(platform_version=version)) == want
