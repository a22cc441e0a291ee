"""benchmarks/tpu-support.md is what tools/tpu_support.py makes of its data, and some of the data is made again."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pages
import pytest

NEEDS_LIBTPU = pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")


@pytest.fixture(scope="session")  # it registers a mask function, once in a process
def tool() -> ModuleType:
    path = pages.ROOT / "tools" / "tpu_support.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tool: ModuleType) -> dict[str, Any]:
    return json.loads(tool.DATA.read_text(encoding="utf-8"))


def test_the_page_is_up_to_date(tool: ModuleType, data: dict[str, Any]) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(data), "run `python tools/tpu_support.py --page`"


def test_every_cell_was_compiled(tool: ModuleType, data: dict[str, Any]) -> None:
    assert set(data["cells"]) == {cell.name for cell in tool.cells()}, "run `python tools/tpu_support.py --write`"
    assert set(data["versions"]) == {"jax", "libtpu", "tokamax"}


def _outcome(found: dict[str, Any]) -> Any:
    """Without the bytes, which change with the kernels and the compiler."""
    return found.get("refused", {name: sorted(made) for name, made in found.items() if name != "refused"})


@NEEDS_LIBTPU
@pytest.mark.parametrize(
    "cell",
    [
        ("attnops", "segment_ids", "bfloat16", 128, 128, "v5p:2x2x1"),
        ("attnops", "causal", "float32", 192, 128, "v6e:2x2"),
        ("attnops", "causal", "float16", 64, 64, "tpu7x:2x2x1"),
        ("jax", "sinks", "bfloat16", 128, 128, "v5e:2x2"),
    ],
    ids=lambda cell: "-".join(map(str, cell[:-1])),
)
def test_some_cells_again(cell: tuple[Any, ...], tool: ModuleType, data: dict[str, Any]) -> None:
    """The outcome is that on the page."""
    named = tool.Cell(*cell)
    assert _outcome(tool.compiled(named)) == _outcome(data["cells"][named.name])
