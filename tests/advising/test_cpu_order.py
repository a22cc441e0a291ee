"""The estimate's order of strategies against measured times on eight virtual devices: benchmarks/results/advise.json."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnops.advising.cpu_rates import CpuRates

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_advice", BENCHMARKS / "advise.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("figure", ["median", "least", "processor"])
def test_order_of_strategies(script: ModuleType, figure: str) -> None:
    """Over 20 cases, none of which the rates were fitted to, Kendall's tau is 0.6 at least in the mean."""
    cells: dict[str, dict[str, Any]] = json.loads((BENCHMARKS / "results" / "advise.json").read_text())["cells"]
    assert not set(script.HELD) & set(script.FIT)
    assert len(script.HELD) == 20
    taus = []
    for name in script.HELD:
        measured = [found[figure] for found in cells[name].values()]
        taus.append(script.kendall(measured, [script.predicted(name, way, CpuRates()) for way in cells[name]]))
    assert statistics.mean(taus) >= 0.6


def test_kendall_by_hand(script: ModuleType) -> None:
    assert script.kendall([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == 1
    assert script.kendall([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == -1
    assert script.kendall([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(1 / 3)
