"""plan.draw: the parts that devices hold are those that jax gives them, and what is sent is what the placement says."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

from attnops import Attention, Causal, OperationMetadata, OperationRegistry, Plan, ShardingError
from attnops.compat import abstract_device
from attnops.drawing import DevicePicture
from attnops.sharding import virtual_mesh


def pod(sizes: dict[str, int]) -> AbstractMesh:
    device = abstract_device("TPU v5p", 2, "tpu")
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), abstract_device=device)


def planned(mesh: Any, batch: int = 4, tokens: int = 256, heads: int = 8, kv_heads: int = 4, **metadata: Any) -> Plan:
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, **metadata))
    query = jax.ShapeDtypeStruct((batch, tokens, heads, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, tokens, kv_heads, 64), jnp.bfloat16)
    return attend.plan(query, key, key, mask=Causal())


def held(picture: DevicePicture, name: str) -> dict[int, tuple[slice, ...]]:
    """What each device holds of a tensor, as slices."""
    (tensor,) = [tensor for tensor in picture.tensors if name in tensor.names]
    return {
        number: tuple(
            slice(*map(int, dim.range(part).split(":"))) for dim, part in zip(tensor.dims, parts, strict=True)
        )
        for number, parts in zip(picture.ids, tensor.device_parts, strict=True)
    }


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tp": 2, "sp": 2}, {"sp": 2, "tp": 4}, {"tp": 2, "fsdp": 4}, {"fsdp": 2, "oops": 4}], ids=str
)
def test_devices_hold_what_jax_gives_them(sizes: dict[str, int]) -> None:
    mesh = virtual_mesh(sizes)
    plan = planned(mesh)
    picture = plan.draw()
    for name in ("query", "key", "output"):
        sharding = plan.named_shardings()[name]
        assert isinstance(sharding, NamedSharding)
        shape = plan.placement.fitted[name].shape
        wanted = sharding.devices_indices_map(shape)
        found = held(picture, name)
        for device, slices in wanted.items():
            whole = tuple(slice(*s.indices(n)[:2]) for s, n in zip(slices, shape, strict=True))
            assert found[device.id] == whole


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["fsdp", "dp", "tp", "sp", "oops"]), st.sampled_from([1, 2, 3, 4, 8]), min_size=1),
    st.sampled_from([1, 2, 6, 8]),
    st.sampled_from(["auto", "gather", "ring"]),
)
def test_every_mesh_can_be_drawn(sizes: dict[str, int], batch: int, strategy: str) -> None:
    plan = planned(pod(sizes), batch=batch, sequence_parallel=strategy, fallback="allow")
    picture = plan.draw()
    text = picture.text()
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    root = ET.fromstring(picture.svg())
    assert root.get("role") == "img"
    count = math.prod(sizes.values())
    assert len(picture.ids) == count
    for tensor in picture.tensors:
        # Together the devices hold all of it, each part as often.
        parts = [tuple(parts) for parts in tensor.device_parts]
        assert set(parts) == set(itertools.product(*(range(dim.parts) for dim in tensor.dims)))
        assert {parts.count(part) for part in parts} == {tensor.copies}
    for one in picture.sent:
        assert sorted(itertools.chain(*one.groups)) == list(range(count))


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_every_tensor_is_drawn(layout: str) -> None:
    def struct(dtype: str, **sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in layout), dtype)

    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=pod({"fsdp": 2, "tp": 2, "sp": 2})))
    query, key = struct("float32", b=4, t=64, h=8, d=16), struct("int8", b=4, t=64, h=4, d=16)
    rows = 1 if layout == "thd" else 4
    ids = jax.ShapeDtypeStruct((64,) if layout == "thd" else (4, 64), jnp.int32)
    extras = {
        "key_scale": struct("float32", b=4, t=64, h=4, d=1),
        "value_scale": struct("float32", b=1, t=1, h=4, d=1),
        "bias": jax.ShapeDtypeStruct((rows, 8, 64, 64), jnp.float32),
        "softmax_aux": jax.ShapeDtypeStruct((8, 2), jnp.float32),
        "mask": jax.ShapeDtypeStruct((rows, 1, 64, 64), jnp.bool_),
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
    }
    plan = attend.plan(query, key, key, layout=layout, **extras)
    picture = plan.draw()
    assert sorted(name for tensor in picture.tensors for name in tensor.names) == sorted(
        fitted.tensor for fitted in plan.placement.fitted.specs if fitted.tensor != "query3d"
    )
    assert max(map(len, picture.text().splitlines())) <= 80
    ET.fromstring(picture.svg())
    assert "<svg" in plan._repr_html_()


def test_what_is_sent() -> None:
    def told(**metadata: Any) -> list[tuple[str, str, tuple[str, ...], int]]:
        plan = planned(pod({"fsdp": 2, "sp": 4}), kv_heads=8, **metadata)
        return [(one.what, one.kind, one.axes, len(one.groups)) for one in plan.draw().sent]

    assert told(sequence_parallel="gather") == [("key, value", "all-gather", ("sp",), 2)]
    around = ("key, value", "ring", ("sp",), 2)
    assert told(sequence_parallel="ring", ring_order="contiguous") == [around]
    assert told(sequence_parallel="ring") == [
        ("query, key, value", "permute", ("sp",), 2),
        around,
        ("output", "permute", ("sp",), 2),
    ]
    assert told(sequence_parallel="ulysses") == [
        ("query, key, value", "all-to-all", ("sp",), 2),
        ("output", "all-to-all", ("sp",), 2),
    ]
    assert planned(pod({"fsdp": 4, "tp": 2})).draw().sent == ()
    ring = planned(pod({"fsdp": 2, "sp": 4}), sequence_parallel="ring").draw().text()
    assert "0 -> 1 -> 2 -> 3 -> 0   4 -> 5 -> 6 -> 7 -> 4" in ring


@pytest.mark.parametrize(("strategy", "expected"), [
    ("gather", [("kv_segment_ids", "all-gather"), ("key, value, key_scale, value_scale", "all-gather")]),
    ("ring", [
        ("kv_segment_ids", "all-gather"), ("query, key, value", "permute"), ("the mask's rows", "permute"),
        ("key, value", "ring"), ("output", "permute"),
    ]),
    ("ulysses", [
        ("q_segment_ids", "all-gather"), ("kv_segment_ids", "all-gather"), ("query, key, value", "all-to-all"),
        ("output", "all-to-all"),
    ]),
])  # fmt: skip
def test_arrays_of_the_mask_and_scales_are_sent_too(strategy: str, expected: list[tuple[str, str]]) -> None:
    attend = OperationRegistry.create(
        "vanilla", OperationMetadata(mesh=pod({"fsdp": 2, "sp": 4}), sequence_parallel=strategy)
    )
    query = jax.ShapeDtypeStruct((4, 256, 8, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.int8 if strategy == "gather" else jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((4, 256, 4, 1), jnp.float32)
    scales = {"key_scale": scale, "value_scale": scale} if strategy == "gather" else {}
    ids = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    plan = attend.plan(query, key, key, mask=Causal(), q_segment_ids=ids, kv_segment_ids=ids, **scales)
    assert [(one.what, one.kind) for one in plan.draw().sent] == expected


def test_a_cache_that_stays_split() -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=pod({"sp": 8})))
    query = jax.ShapeDtypeStruct((4, 1, 8, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((4, 4096, 8, 64), jnp.bfloat16)
    plan = attend.plan(query, cache, cache, mode="decode")
    assert plan.placement.sequence.strategy == "split_kv"
    assert ("output, lse", "all-reduce") in [(one.what, one.kind) for one in plan.draw().sent]


def test_drops_and_repeats_are_marked() -> None:
    plan = planned(pod({"fsdp": 3, "tp": 8}), kv_heads=2)
    text, svg = plan.draw().text(), plan.draw().svg()
    said = " ".join(text.split())
    assert "dropped fsdp of batch in query, output: 4 is not divisible by fsdp=3" in said
    assert "each kv head is repeated 4 times" in said
    assert "mesh axis 'fsdp' (3) splits nothing: 3 devices do the same work" in said
    assert re.search(r"^8 .*h 0:1 = 0", text, re.MULTILINE)  # the next three hold what the first eight do
    assert 'text-decoration="line-through">fsdp</tspan>' in svg
    assert "held by several devices" in svg


def test_another_mesh() -> None:
    plan = planned(pod({"fsdp": 2, "tp": 4}))
    mesh = virtual_mesh({"fsdp": 2, "tp": 4})
    reversed_ids = jax.sharding.Mesh(np.flip(mesh.devices), mesh.axis_names)
    assert plan.draw(reversed_ids).ids == tuple(reversed(plan.draw().ids))
    with pytest.raises(ShardingError, match="the mesh to draw is"):
        plan.draw(pod({"tp": 8}))


def test_without_a_mesh_there_is_one_device() -> None:
    picture = planned(None, backend="tpu").draw()
    assert picture.ids == (0,)
    assert "whole" in picture.text()
    ET.fromstring(picture.svg())


def test_files(tmp_path: Path) -> None:
    picture = planned(pod({"tp": 2})).draw()
    assert picture.save(tmp_path / "plan.svg").read_text() == picture.svg() == picture._repr_html_()
    assert picture.save(tmp_path / "plan.txt").read_text() == picture.text() + "\n"


def test_notebooks() -> None:
    plan = planned(pod({"fsdp": 2, "tp": 2}))
    html = plan._repr_html_()
    assert html.count("<svg") == 2  # the mask and the placement
    assert "splash.forward_tpu (the platform&#x27;s own implementation)" in html
    attend = Attention("vanilla", mask=Causal())
    shown = attend._repr_html_()
    assert "&quot;operation&quot;: &quot;vanilla&quot;" in shown
    assert "<svg" in shown
    x = jnp.ones((1, 8, 2, 4))
    output = attend(x, x, x, return_lse=True)
    assert "1x8x2x4 float32" in output._repr_html_()
    assert "1x2x8 float32" in output._repr_html_()
    assert "vanilla.forward_native" in output._repr_html_()
    assert "plan" in attend._repr_html_()
    assert "no plan" in jax.jit(lambda x: attend(x, x, x))(x)._repr_html_()
