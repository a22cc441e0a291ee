"""advise for recurrences: meshes are planned and estimated by what the family may be split by, and the best is written."""

from __future__ import annotations

from typing import Any

import pytest

from attnops import OperationRegistry, RefusedError, advise
from attnops.advising.report import rows, term_rows
from attnops.planning.recurrent.traffic import recurrence_traffic
from attnops.registry.declaration import Declaration

HEADS = {"operands": {"decay": True, "beta": True}, "q_heads": 16, "kv_heads": 16, "head_dim": 128}
RULE = {"operation": "gated_delta_rule", "call": {"q_len": 1 << 17, "batch": 2, "dtype": "bfloat16", **HEADS}}
CONVOLUTION = {"operation": "causal_conv1d", "call": {"q_len": 4096, "dims": {"channels": 2048, "width": 4}}}


def test_every_mesh_is_ranked_or_refused() -> None:
    found = advise(RULE, "v5e:4x4", most_compiled=0)
    meshes = {entry.candidate.sizes: entry for entry in found.entries}
    assert all({"fsdp", "sp", "tp"} >= {name for name, _ in sizes} for sizes in meshes)
    assert {entry.strategy for entry in found.entries} <= {"", "state log_step", "state all_gather"}
    # Splitting rows and heads sends nothing, so it is first; a split sequence sends what it is counted to.
    assert set(found.best.candidate.mesh) <= {"fsdp", "tp"}
    assert found.best.estimate.sent_bytes == 0
    for entry in found.entries:
        plan = entry.plan
        both = recurrence_traffic(plan.operation, plan.problem, plan.placement, True)
        assert entry.estimate.sent_bytes == both.sent_bytes
        seconds = [one.seconds for one in entry.estimate.passes]
        assert sum(term.seconds for one in entry.estimate.passes for term in one.terms) == pytest.approx(sum(seconds))
    split = next(entry for entry in found.entries if "sp" in entry.candidate.mesh)
    # It works on its tokens twice: 2 rows of 2^17 tokens and 16 heads over 16 devices, chunks of 128, at 197 TFLOP/s.
    flops = 2 * (2 << 17) * 2 * (128 * (128 + 128) * 2 + 3 * 128 * 128)
    assert split.estimate.passes[0].bound == "products"
    assert split.estimate.passes[0].work == pytest.approx(flops / 197e12, rel=1e-3)
    reasons = {refusal.kind: refusal.reason for refusal in found.refused}
    assert "same work" in reasons["gather"]
    assert {"mesh axis cp", "mesh axis fsdp"} <= reasons.keys()
    assert len(rows(found.entries)) == len(found.entries)
    assert term_rows(found.best)


def test_the_best_is_written_as_it_was_planned() -> None:
    found = advise(RULE, "v5e:2x4", mesh={"sp": 8}, most_compiled=0)
    best = Declaration.from_dict(found.best.declaration.to_dict())
    assert best.metadata["sequence_parallel"] == "state"
    operation: Any = OperationRegistry.create(best.operation, best.operation_metadata())
    again = operation.plan(**best.call_arguments(best.shapes()))
    assert again.placement == found.best.plan.placement


def test_convolutions_and_decoding() -> None:
    found = advise(CONVOLUTION, "cpu:4", most_compiled=0)
    assert {"sp", "tp"} == {name for entry in found.entries for name in entry.candidate.mesh}
    one = {**RULE, "call": RULE["call"] | {"q_len": 1, "mode": "autoregressive"}}  # type: ignore[operator]
    found = advise(one, "v5e:2x4", most_compiled=0)
    assert set(found.best.candidate.mesh) <= {"fsdp", "tp"}
    assert [one.name for one in found.best.estimate.passes] == ["forward"]
    with pytest.raises(RefusedError):
        _ = advise(one, "v5e:2x4", mesh={"sp": 8}, most_compiled=0).best
