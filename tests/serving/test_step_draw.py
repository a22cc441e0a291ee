"""plan.draw of steps over pages: devices hold what jax gives them, and what is sent is what the plan says."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import KVCache, OperationMetadata, OperationRegistry, ShardingError
from attnops.operators.paged_cache import shardings
from attnops.sharding import virtual_mesh

SIZES = {
    "page_size": 16,
    "pages": 64,
    "max_sequences": 8,
    "max_length": 128,
    "layers": 4,
    "head_dim": 64,
    "max_tokens": 64,
}
MESHES: list[tuple[dict[str, Any], dict[str, int], int]] = [
    ({"pages_axis": "dp", "kv_head_axis": "tp"}, {"dp": 2, "tp": 4}, 8),
    ({"pages_axis": "dp", "kv_head_axis": "tp"}, {"tp": 4, "dp": 2}, 2),
    ({"pages_axis": "dp", "page_sequence_axis": "sp", "kv_head_axis": "tp"}, {"dp": 2, "sp": 2, "tp": 2}, 1),
    ({"page_sequence_axis": ("sp", "dp")}, {"dp": 2, "sp": 4}, 4),
    ({}, {"dp": 8}, 4),
]


def _planned(axes: dict[str, Any], mesh: Any, kv_heads: int, dtype: str = "bfloat16") -> Any:
    cache = KVCache(kv_heads=kv_heads, dtype=dtype, **SIZES, **axes)
    query, key = (jax.ShapeDtypeStruct((64, heads, 64), jnp.dtype(dtype)) for heads in (8, kv_heads))
    operation = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
    return cache, operation.plan(query, key, key, cache=cache, mode="autoregressive")


@pytest.mark.parametrize(("axes", "sizes", "kv_heads"), MESHES, ids=str)
def test_devices_hold_what_jax_gives_them(axes: dict[str, Any], sizes: dict[str, int], kv_heads: int) -> None:
    mesh = virtual_mesh(sizes)
    cache, plan = _planned(axes, mesh, kv_heads)
    picture, places = plan.draw(mesh), shardings(cache, mesh)
    given = {
        "query": places.query,
        "key": places.key,
        "key_pages of each layer": places.state.layers[0].key,
        "page_table": places.batch.page_table,
    }
    shapes = {fitted.tensor: fitted.shape for fitted in plan.tensors}
    shapes |= {"key_pages of each layer": plan.cache["key_pages"].fitted.shape}
    shapes |= {"page_table": plan.cache["page_table"].fitted.shape}
    for name, sharding in given.items():
        (tensor,) = [tensor for tensor in picture.tensors if name in tensor.names]
        for device, slices in sharding.devices_indices_map(shapes[name]).items():
            parts = tensor.device_parts[picture.ids.index(device.id)]
            ranges = [dim.range(part) for dim, part in zip(tensor.dims, parts, strict=True)]
            assert ranges == ["{}:{}".format(*s.indices(n)[:2]) for s, n in zip(slices, shapes[name], strict=True)], (
                name
            )


@pytest.mark.parametrize(("axes", "sizes", "kv_heads"), MESHES, ids=str)
def test_what_is_sent_and_repeated(axes: dict[str, Any], sizes: dict[str, int], kv_heads: int) -> None:
    _, plan = _planned(axes, virtual_mesh(sizes), kv_heads)
    picture = plan.draw()
    along = axes.get("page_sequence_axis")
    assert [one.kind for one in picture.sent] == (["all-reduce"] if along else [])
    for one in picture.sent:
        assert sorted(itertools.chain(*one.groups)) == list(range(8))
        assert f"merged by their lse over {'+'.join(one.axes)}" in " ".join(plan.notes)
    told = " ".join(picture.repeated)
    assert ("each kv head is stored" in told) == (kv_heads < sizes.get("tp", 1))
    assert ("mesh axis 'dp' (8) splits nothing: 8 devices do the same work" in told) == (not axes)
    text = picture.text()
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert ET.fromstring(picture.svg()).get("role") == "img"
    assert "<svg" in plan._repr_html_()


def test_one_device_has_no_picture_in_a_notebook_and_another_mesh_is_refused() -> None:
    _, plan = _planned({}, None, 4, "float32")
    html = plan._repr_html_()
    assert "<svg" not in html
    assert "paged.forward_native" in html
    with pytest.raises(ShardingError, match="this plan is for mesh none, but the mesh to draw is dp=8"):
        plan.draw(virtual_mesh({"dp": 8}))
