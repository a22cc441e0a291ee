"""The search for the chunks of a recurrence: what it tries, what it stores, and what a plan makes of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from attnops import ConfigError, OperationMetadata, OperationRegistry
from attnops.operators.recurrent.kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING
from attnops.planning import tune_cache
from attnops.planning.notes import has_note
from attnops.sharding import virtual_mesh
from attnops.verify.local_recurrence import LocalRecurrence
from attnops.verify.topology import described_mesh
from attnops.verify.tune import tune_plan
from attnops.verify.tune_recurrence import RecurrenceSearch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tune_cache.ENVIRONMENT, str(tmp_path))
    return tmp_path


def planned(
    kind: str, *, tokens: int = 512, dim: int = 128, mode: str = "train", heads: int = 4, **metadata: Any
) -> Any:
    narrow = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    call = {
        "query": narrow(1, tokens, 2, dim),
        "key": narrow(1, tokens, 2, dim),
        "value": narrow(1, tokens, heads, dim),
    }
    if kind in ("gated_delta_rule", "kda"):
        call["beta"] = narrow(1, tokens, heads)
    return OperationRegistry.create(kind, OperationMetadata(**({"platform": "tpu"} | metadata))).plan(**call, mode=mode)


@pytest.mark.parametrize(
    ("tokens", "mode", "wanted"),
    [
        (512, "train", {"backward": ({}, 256, 64, 32, 16)}),
        (512, "prefill", {"forward": ({}, 256, 64, 32, 16)}),
        (50, "train", {"backward": ({}, 32, 16)}),  # all tokens are one chunk of 64
        (1, "prefill", {}),
    ],
)
def test_chunks_that_are_tried(tokens: int, mode: str, wanted: dict[str, Any]) -> None:
    plan = planned("gated_delta_rule", tokens=tokens, mode=mode)
    found = plan.runs.candidates(plan.problem, plan.placement)
    assert found == {
        part: tuple(x or {} if isinstance(x, dict) else {"chunk_size": x} for x in of) for part, of in wanted.items()
    }


def test_chunks_without_room_are_not_tried() -> None:
    plan = planned("kda", dim=256)
    (fields,) = plan.runs.candidates(plan.problem, plan.placement).values()
    assert {"chunk_size": 256} not in fields
    assert {} in fields


def test_declared_chunks_are_not_searched() -> None:
    declared = planned("simple_gla", operation_configs={"simple_gla": {"chunk_size": 32}})
    assert declared.tuning is None
    with pytest.raises(ConfigError, match="no sizes to search"):
        tune_plan(declared)


@pytest.mark.parametrize(("mode", "wanted"), [("train", {KEEPING, BACKWARD}), ("prefill", {FORWARD})])
def test_steps_of_the_grid(mode: str, wanted: set[str]) -> None:
    """Two rows of a device, 4 heads in one step, 500 tokens in 4 chunks."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    call = {"query": shape(4, 500, 8, 128), "key": shape(4, 500, 8, 128), "value": shape(4, 500, 8, 128)}
    configs = {"simple_gla": {"interpret": True}}
    metadata = OperationMetadata(mesh=virtual_mesh({"dp": 2, "tp": 2}), operation_configs=configs)
    plan = OperationRegistry.create("simple_gla", metadata).plan(**call, mode=mode)
    steps = plan.runs.grid_steps(plan.problem, plan.placement, plan.config)
    assert dict(steps) == dict.fromkeys(wanted, 2 * 4)
    local = LocalRecurrence.of(plan.problem, plan.placement)
    assert local.arrays["query"].shape == (2, 500, 4, 128)
    assert pickle.loads(pickle.dumps(local)) == local


def test_what_a_search_measured_is_what_a_plan_runs(folder: Path) -> None:
    """In the interpreter, on this machine."""
    how = {"platform": None, "operation_configs": {"simple_gla": {"interpret": True}}}
    plan = planned("simple_gla", tokens=32, dim=8, mode="prefill", **how)
    assert plan.method == "forward_tpu"
    assert plan.tuning.source == "heuristic"
    report = tune_plan(plan, most=2)
    assert [m.fields for m in report.measured("forward")] == [{}, {"chunk_size": 16}]
    assert all(m.seconds > 0 for m in report.measured("forward"))
    again = planned("simple_gla", tokens=32, dim=8, mode="prefill", **how)
    assert again.tuning.source == "cache"
    assert str(folder) in again.explain()
    assert again.config.chunk_size == report.best["forward"].fields.get("chunk_size", 128)
    assert not has_note(again.notes, "recurrent.smaller_chunks")


@pytest.mark.slow
def test_static_cycles_of_both_passes() -> None:
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    mesh = Mesh(np.asarray(described_mesh("v6e:2x2").devices).reshape(-1)[:1], ("dp",))
    plan = planned("simple_gla", mesh=mesh)
    report = tune_plan(plan, most=2)
    measured = report.measured("backward")
    assert [m.fields for m in measured] == [{}, {"chunk_size": 256}]
    search = RecurrenceSearch(plan.operation, plan.method, plan.problem, plan.placement)
    kernels = search.scheduled("backward", {}).kernels
    assert set(kernels) == {KEEPING, BACKWARD}
    # The matrix units alone take so many cycles: 10 products of 128 x 128 x 128 for each of 4 heads and 4 chunks, on four units
    # of 256 x 256 numbers.
    assert measured[0].detail["cycles"] > 10 * 16 * 128**3 / (4 * 256 * 256)
    clock = 918e12 / (2 * 4 * 256 * 256)  # from the published operations a second of four such units
    assert measured[0].seconds == pytest.approx(measured[0].detail["cycles"] / clock, rel=0.01)
