"""The shipped block choices: plans for real models take them, and what they say is possible."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import block_table

from attnops import OperationMetadata, OperationRegistry
from attnops.operators.shipped import table_key
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


@pytest.mark.slow
@pytest.mark.parametrize("generation", list(block_table.TARGETS))
def test_a_choice_compiles(generation: str) -> None:
    shape = next(s for s in block_table.SHAPES if s["name"] == "mistral-7b-v0.1")
    attend, arguments, decided, _ = _planned(generation, shape)
    report = verify_call(attend, arguments, generation)
    assert report.passed
    assert report.plan.config == decided.config
