"""A page layout of one's own is one class: caches declare it, plans and pictures show it, and steps run over it on a mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ConfigError, KVCache, OperationMetadata, OperationRegistry, RaggedBatch
from attnops.cli.app import main
from attnops.operators.paged_cache import init
from attnops.page_layouts import LAYOUTS, ArraySize, PageLayout, PageShape, page_layout, register_layout
from attnops.sharding import virtual_mesh


class AlternatingHeads(PageLayout):
    """Both in one array [pages, 2 kv_heads, page, dim], keys and values alternating."""

    name = "alternating_heads"
    one_array = True
    heads_first = True
    same_dim = True
    dims = ("pages", "kv_heads", "page", "head_dim")
    form = "[pages, 2 kv_heads, page, dim]"

    def array_shape(self, size: ArraySize) -> tuple[int, ...]:
        return size.pages, 2 * size.heads, size.page, size.dim

    def sizes(self, key: Any, value: Any, dim: int, value_dim: int | None) -> PageShape:
        return PageShape(key.shape[0], key.shape[2], key.shape[1] // 2, key.shape[3], dim)

    def viewed(self, pages: Any) -> Any:
        return pages.reshape(pages.shape[0], -1, 2, *pages.shape[2:])

    def index(self, ids: Any, half: int, first: int, dim: int) -> tuple[Any, ...]:
        return ids, slice(None), half

    def joined(self, key: Any, value: Any) -> Any:
        return jnp.stack([key, value], axis=2).reshape(key.shape[0], -1, key.shape[2])

    def separate(self, key: Any, value: Any, dim: int, value_dim: int) -> tuple[Any, Any]:
        both = self.viewed(key).swapaxes(1, 3)
        return both[:, :, 0], both[:, :, 1]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_layout(AlternatingHeads())
    yield
    del LAYOUTS["alternating_heads"]


FIELDS: dict[str, Any] = {
    "layers": 1, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 16, "max_sequences": 4,
    "max_length": 32,
}  # fmt: skip


@pytest.mark.parametrize("quantised", [None, {"dtype": "int8"}])
@pytest.mark.parametrize("mesh", [None, {"tp": 2}])
def test_steps_over_it(mesh: dict[str, int] | None, quantised: dict[str, str] | None) -> None:
    random = np.random.default_rng(0)
    tokens = [random.standard_normal((8, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]
    later = [random.standard_normal((2, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]
    devices = None if mesh is None else virtual_mesh(mesh)
    metadata = OperationMetadata() if devices is None else OperationMetadata(mesh=devices)
    found = {}
    for layout in ("split", "alternating_heads"):
        cache = KVCache(**FIELDS | {"layout": layout, "quantised": quantised})
        plan = cache.plan(devices)
        first = RaggedBatch.make(plan, cu_q_lens=[0, 6, 7], kv_lens=[6, 1], page_table=[[5, 2], [3]])
        second = RaggedBatch.make(plan, cu_q_lens=[0, 1, 2], kv_lens=[7, 2], page_table=[[5, 2], [3]])
        operation = OperationRegistry.create("paged", metadata)

        def run(state: Any, operation: Any = operation, first: Any = first, second: Any = second) -> Any:
            one = operation(*tokens, state=state, layer=0, batch=first)
            two = operation(*later, state=one.state, layer=0, batch=second)
            return one.attention_outputs, two.attention_outputs

        found[layout] = jax.jit(run)(init(cache, devices))
        assert operation.plan(*tokens, cache=cache).implementation == "paged.forward_native"
    for got, want in zip(found["alternating_heads"], found["split"], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_file_and_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cache = KVCache(**FIELDS | {"layout": "alternating_heads", "kv_head_axis": "tp"})
    assert KVCache.from_json(cache.to_json()) == cache
    assert cache.plan(virtual_mesh({"tp": 2})).pages_array.fitted.local_shape == (16, 2, 4, 16)
    path = tmp_path / "step.json"
    declared = {
        "operation": "paged",
        "cache": cache.to_dict(),
        "step": {"q_heads": 4, "q_lens": [1, 5], "kv_lens": [9, 7]},
    }
    path.write_text(json.dumps(declared))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["query"]["shape"] == [6, 4, 16]
    assert main(["run", str(path), "--check", "--repeats", "1", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["passed"] for check in checks] == [True, True]
    assert main(["verify", str(path), "--target", "here"]) == 0
    capsys.readouterr()
    main(["plan", str(path), "--json", "--target", "tpu"])
    rejected = json.loads(capsys.readouterr().out)["rejected"]
    codes = [reason["code"] for one in rejected for reason in one["reasons"]]
    assert codes == ["paged.page_layout"]


def test_names() -> None:
    with pytest.raises(ConfigError, match="already"):
        register_layout(AlternatingHeads())
    with pytest.raises(ConfigError, match="Did you mean 'joined'"):
        page_layout("joind")
    with pytest.raises(ConfigError, match="wanted one of split, heads"):
        KVCache(**FIELDS | {"layout": "rows"})
    with pytest.raises(ConfigError, match="same"):
        KVCache(**FIELDS | {"layout": "alternating_heads", "value_dim": 8})
