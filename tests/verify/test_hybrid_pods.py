"""Layers of hybrid models at a million tokens on pods that aren't here: what they have to send, and what programs do send."""

from __future__ import annotations

import importlib.util
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attnops import Declaration, OperationRegistry
from attnops.cli.verified import target_metadata
from attnops.planning.recurrent.traffic import recurrence_traffic

ROOT = Path(__file__).resolve().parents[2]
GIB, MIB = 1 << 30, 1 << 20
HBM = {"v5p": 95.9 * GIB, "tpu7x": 96 * GIB}
# Of a device's 32 heads, maps [128, 128] and as much that is added, each 2 MiB of float32. 32 devices: 5 rounds of what is added,
# 4 of what multiplies, the state before, and 2 * 31/32 of that after all tokens. Kimi's 8 devices: heads of 4 tensor-parallel
# devices, 8 each, 0.5 MiB; 3 rounds, 2 of what multiplies. Convolutions: 3 tokens of bfloat16 to the neighbour and 2 * (n - 1)/n.
FORWARD = {
    ("qwen3_5", "recurrence"): (2 * MIB) * (5 + 4 + 1 + 2 * 31 / 32),
    ("kimi_linear", "recurrence"): (MIB / 2) * (3 + 2 + 1 + 2 * 7 / 8),
    ("qwen3_5", "convolution"): 3 * 12288 / 2 * 2 * (1 + 2 * 31 / 32),
    ("kimi_linear", "convolution"): 3 * 12288 / 4 * 2 * (1 + 2 * 7 / 8),
}


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("hybrid_pods", ROOT / "benchmarks" / "hybrid_pods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PODS = _benchmark()


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.parametrize(("model", "layer"), FORWARD)
def test_what_is_sent_does_not_depend_on_the_length(model: str, layer: str) -> None:
    data = json.loads((PODS.EXAMPLES / model / f"{layer}.json").read_text())
    sent = []
    for length in (1 << 16, 1 << 20):
        declaration = Declaration.from_dict({**data, "call": data["call"] | {"q_len": length}})
        metadata = target_metadata(declaration, PODS.TARGETS[model]["v5p"], PODS.MESHES[model])
        operation: Any = OperationRegistry.create(declaration.operation, metadata)
        plan = operation.plan(**declaration.call_arguments(declaration.shapes()))
        assert plan.placement.exchange == ("log_step" if layer == "recurrence" else "")
        traffic = [recurrence_traffic(plan.operation, plan.problem, plan.placement, both) for both in (False, True)]
        assert [one.unknown for one in traffic] == [(), ()]
        sent.append([one.sent_bytes for one in traffic])
    assert sent[0] == sent[1]
    forward, both = sent[0]
    assert forward == FORWARD[model, layer]
    # What is passed on goes back, and the gradients of weights are summed over the devices of the sequence.
    assert 2 * forward <= both <= 3 * forward
    assert PODS.gathering(f"{model}/{layer}/v5p")[0] > 100 * forward


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.parametrize("cell", PODS.CELLS)
def test_programs_fit_and_send_what_is_planned(cell: str) -> None:
    model, layer, kind = cell.split("/")
    found = PODS.measure(cell)
    assert found["implementation"].endswith("forward_native" if layer == "convolution" else "forward_tpu")
    for name in ("forward", "forward and backward"):
        one = found["passes"][name]
        assert (one["failure"], one["differences"]) == (None, [])
        assert one["peak_bytes"] < HBM[kind]
        if (model, layer) in FORWARD and one["sent_bytes"] is not None:
            assert sum(one["sent_bytes"].values()) == pytest.approx(one["needed_bytes"], rel=0.01)
