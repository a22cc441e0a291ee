"""What is counted of VMEM, against what the TPU compiler allocated in the same kernels (benchmarks/results/vmem_counts.json)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attnops.operators.splash.vmem_count import vmem_need, vmem_room

ROOT = Path(__file__).resolve().parents[2]
WITHIN = 1.25


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("vmem_counts", ROOT / "tools" / "vmem_counts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vmem_counts"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tool: Any) -> dict[str, Any]:
    return json.loads(tool.DATA.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def nothing_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))


def test_splash_takes_what_is_counted(tool: Any, data: dict[str, Any]) -> None:
    found = list(tool.splash_kernels(data))
    assert {one.generation for one in found} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert len(found) >= 100
    assert [one for one in found if not 1 / WITHIN <= one.ratio <= WITHIN] == []


def test_paged_kernels_take_what_is_counted(tool: Any) -> None:
    found = list(tool.paged_kernels())
    assert len(found) >= 60
    assert all(1 / WITHIN <= one.ratio <= WITHIN for one in found), found


def test_what_is_planned_has_enough(tool: Any, data: dict[str, Any]) -> None:
    """The limit that a plan asks for is no less than what the compiler took, and neither is the need that it counts."""
    planned = 0
    for case in tool.cases():
        used = [n or 0 for n in data["cases"].get(case.name, {}).get("kernels", {}).values()]
        if not used:
            continue
        plan = tool.planned(case, compiles=False)[2]
        if tool.sizes_of(plan) != data["cases"][case.name]["config"]:
            continue
        planned += 1
        room = vmem_room(plan.problem, plan.config)
        assert max(used) <= room, case.name
        assert max(used) <= vmem_need(plan.problem, plan.placement, plan.config), case.name
    assert planned >= 50
