"""The shipped block choices: plans for real models take them, and what they say is possible."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import block_page
import block_table

from attnops import OperationMetadata, OperationRegistry
from attnops.operators.choices.shipped import table_key
from attnops.operators.splash.candidates import SHIPPED
from attnops.verify.call import verify_call

CHOICES = json.loads(SHIPPED.path.read_text())["choices"]
CALLS = [
    (generation, shape) for generation in block_table.TARGETS for shape in block_table.SHAPES if shape["seq_q"] > 1
]


def _planned(generation: str, shape: dict[str, Any]) -> Any:
    """The plan of a model's call by the defaults, and the table's key for it."""
    operation, arguments, decided = block_table.planned(shape, block_table.TARGETS[generation], {})
    metadata = OperationMetadata(mesh=operation.metadata.mesh, fallback="error")
    attend = OperationRegistry.create("splash", metadata)
    return attend, arguments, attend.plan(**arguments), table_key(decided.problem, decided.placement)


def test_there_are_choices_and_each_belongs_to_a_model() -> None:
    keys = {_planned(*call)[3] for call in CALLS}
    assert CHOICES
    assert set(CHOICES) <= keys


@pytest.mark.parametrize("shape", [s for s in block_table.SHAPES if s["seq_q"] > 1], ids=lambda s: s["name"])
def test_a_plan_takes_the_tables_choice(shape: dict[str, Any]) -> None:
    for generation in block_table.TARGETS:
        _, _, decided, key = _planned(generation, shape)
        if key not in CHOICES:
            assert decided.tuning.source == "heuristic"
            continue
        assert decided.tuning.source == "table"
        assert {name: getattr(decided.config, name) for name in CHOICES[key]} == CHOICES[key]


def _written(folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> tuple[dict[str, Any], str]:
    """The table and the page after a search of one call on a v5e, beside what ships, as if this compiler had made it."""
    table, page, work = folder / "shipped.json", folder / "page.md", folder / "work.json"
    table.write_text(json.dumps(json.loads(SHIPPED.path.read_text()) | {"compiler": compiler}))
    page.write_text(block_page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    fields = {name: 512 for axis in ("q", "kv") for part in ("", "_dkv") for name in _names(axis, part)}
    fields |= {"block_kv_compute_in": 512, "use_fused_bwd_kernel": True}
    row = {
        "shape": "mistral-7b-v0.1",
        "generation": "v5e",
        "fields": fields,
        "ratio": {"forward": 0.9},
        "vmem": {},
    }
    work.write_text(json.dumps({"tiles": {}, "choices": {"TPU v5 lite, bfloat16, q 8192": row}}))
    monkeypatch.setattr(block_page, "SHIPPED", SHIPPED._replace(path=table))
    monkeypatch.setattr(block_page, "PAGE", page)
    block_page.write(block_table.Work(work).data["choices"])
    return json.loads(table.read_text()), page.read_text(encoding="utf-8")


def _names(axis: str, part: str) -> tuple[str, str]:
    return f"block_{axis}{part}", f"block_{axis}{part}_compute"


def test_a_search_of_one_generation_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = block_page.PAGE.read_text(encoding="utf-8")
    written, page = _written(tmp_path, monkeypatch, block_page.compiler())
    others = {key: fields for key, fields in CHOICES.items() if not key.startswith("TPU v5 lite, ")}
    assert others
    assert written["choices"].keys() - others.keys() == {"TPU v5 lite, bfloat16, q 8192"}
    assert {key: written["choices"][key] for key in others} == others
    assert "| mistral-7b-v0.1: q 8192 | 512, 512; 512 x 512 | 512, 512; 512 x 512 fused | unknown | 0.90 |" in page
    assert page.partition("### v6e")[2] == before.partition("### v6e")[2]


def test_another_compiler_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, page = _written(tmp_path, monkeypatch, "libtpu 0.0.1")
    assert list(written["choices"]) == ["TPU v5 lite, bfloat16, q 8192"]
    assert "Not searched yet: v4, v5p, v6e, tpu7x" in page
    assert "### v6e" not in page


@pytest.mark.slow
@pytest.mark.parametrize("generation", list(block_table.TARGETS))
def test_a_choice_compiles(generation: str) -> None:
    shape = next(s for s in block_table.SHAPES if s["name"] == "mistral-7b-v0.1")
    attend, arguments, decided, _ = _planned(generation, shape)
    report = verify_call(attend, arguments, generation)
    assert report.passed
    assert report.plan.config == decided.config
