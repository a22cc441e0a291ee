"""Steps over slots as users make them: declarations, plans, files and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from recurrent_inputs import KINDS
from step_inputs import STEPS, Rows, drawn, joined, wanted

from attnops import Attention, ConfigError, Declaration, OperationMetadata, OperationRegistry
from attnops.cli.app import main
from attnops.errors import RefusedShardingError
from attnops.verify.recurrent_call import PlannedRecurrence
from attnops.verify.recurrent_of_call import recurrent_reference

SIZES = {
    "mamba1": {"dims": {"channels": 24, "state_dim": 8}},
    "causal_conv1d": {"dims": {"channels": 24, "width": 4}},
}
HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}


def declared(kind: str, **call: Any) -> dict[str, Any]:
    fields = SIZES.get(kind, HEADS)
    dims = {**fields.get("dims", {}), **call.pop("dims", {})}  # type: ignore[dict-item]
    sizes = {name: x for name, x in fields.items() if name != "dims"}
    return {
        "operation": STEPS[kind],
        "call": {"q_len": 24, "batch": 4, **sizes, **call, **({"dims": dims} if dims else {})},
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [None, "autoregressive"])
def test_a_file_draws_a_step_that_the_reference_knows(kind: str, mode: str | None) -> None:
    file = declared(kind, mode=mode, dims={"columns": 2, "slots": 10, "shards": 2})
    declaration = Declaration.from_dict(file)
    assert Declaration.from_json(declaration.to_json()) == declaration
    arrays = declaration.draw(3)
    shapes = declaration.shapes()
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        n: (x.shape, x.dtype) for n, x in shapes.items()
    }
    operation: Any = OperationRegistry.create(STEPS[kind])
    output = operation(**declaration.call_arguments(arrays))
    problem = output.plan.problem
    assert problem.option["max_q_len"] == (2 if mode == "autoregressive" else None)
    want = recurrent_reference(problem, arrays, operation, output.plan.config)
    np.testing.assert_allclose(output.attention_outputs, want["attention_outputs"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(output.state, want["state"], rtol=0, atol=2e-5)
    assert json.loads(json.dumps(output.plan.to_dict()))["tensors"]["state"]["shape"] == list(arrays["state"].shape)


@pytest.mark.parametrize("kind", ["kda", "causal_conv1d"])
def test_the_reference_of_files_is_that_of_rows(kind: str) -> None:
    step = drawn(kind, "drafts")
    operation = step.operation()
    problem = operation.plan(**step.arrays, state=step.state, batch=step.batch).problem
    arrays = operation.flat({**step.arrays, "state": step.state, "batch": step.batch})
    found = recurrent_reference(problem, arrays, operation, problem.config)
    outputs, state = wanted(step)
    np.testing.assert_allclose(found["attention_outputs"], outputs, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["state"], state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "mamba1", "causal_conv1d"])
def test_attention_takes_a_step(kind: str) -> None:
    step = drawn(kind, "decode")
    attend = Attention(STEPS[kind])
    output = attend(**step.arrays, state=step.state, batch=step.batch, max_q_len=1)
    outputs, state = wanted(step)
    np.testing.assert_allclose(output.attention_outputs, outputs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(output.state, state, rtol=0, atol=2e-5)
    plan = attend.plan(**step.arrays, state=step.state, batch=step.batch)
    assert plan.problem.mode == "mixed"
    assert plan.problem.operation == STEPS[kind]


def test_the_config_of_the_whole_call_is_that_of_its_steps() -> None:
    step = drawn("gated_delta_rule", "decode")
    metadata = OperationMetadata(operation_configs={"gated_delta_rule": {"chunk_size": 32, "normalise_qk": True}})
    plan = step.operation(metadata).plan(**step.arrays, state=step.state, batch=step.batch)
    assert plan.config.chunk_size == 32
    assert plan.problem.option["normalise_qk"] is True


@pytest.mark.parametrize("kind", KINDS)
def test_devices_send_nothing(kind: str) -> None:
    parts = [drawn(kind, Rows((1, 4), (5, 0)), key_heads=2), drawn(kind, Rows((2, 3), (1, 2)), key_heads=2)]
    step = joined(parts)
    devices = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    arguments = step.arrays | {"state": step.state, "batch": step.batch}
    planned = PlannedRecurrence(step.operation(OperationMetadata(mesh=devices)), arguments)
    compiled = planned.traced("forward").lower().compile().as_text()
    for kind_of_send in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {kind_of_send}(" not in compiled
        assert f" {kind_of_send}-start(" not in compiled


def test_one_batch_for_all_devices_leaves_an_axis_idle() -> None:
    step = drawn("kda", "decode")
    devices = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    arguments: dict[str, Any] = step.arrays | {"state": step.state, "batch": step.batch}
    plan = step.operation(OperationMetadata(mesh=devices)).plan(**arguments)
    assert tuple(plan.specs["state"]) == (None, "tp", None, None)
    assert [x.values["names"] for x in plan.notes if getattr(x, "code", "") == "table.idle_axes"] == [["dp=2"]]
    with pytest.raises(RefusedShardingError, match="dp=2"):
        step.operation(OperationMetadata(mesh=devices, strict=True)).plan(**arguments)
    split = step.operation(OperationMetadata(mesh=devices, sequence_parallel="state")).plan(**arguments)
    assert "sequence.unsplit" in [getattr(x, "code", "") for x in split.notes]
    with pytest.raises(ConfigError, match="'ring' is for attention"):
        step.operation(OperationMetadata(mesh=devices, sequence_parallel="ring")).plan(**arguments)


def test_keys_are_repeated_where_the_mesh_splits_heads_further() -> None:
    step = drawn("gated_delta_rule", "mixed", key_heads=2)
    devices = jax.make_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])
    output = step.run(OperationMetadata(mesh=devices))
    outputs, state = wanted(step)
    np.testing.assert_allclose(output.attention_outputs, outputs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(output.state, state, rtol=0, atol=2e-5)
    assert "recurrent.repeated_keys" in [getattr(x, "code", "") for x in output.plan.notes]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"layout": "thd"}, "call.layout"),
        ({"batch": 5, "dims": {"shards": 2}}, "call.batch=5"),
        ({"dims": {"slots": 3}}, "call.dims.slots=3"),
        ({"q_len": 3}, "call.q_len=3"),
        ({"dims": {"width": 4}}, "call.dims has 'width'"),
        ({"segment_ids": 2}, "segment_ids"),
        ({"operands": {"initial_state": True}}, "initial_state"),
    ],
)
def test_wrong_files_are_refused(change: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Declaration.from_dict(declared("kda", **change)).shapes()


@pytest.mark.parametrize("command", [["plan"], ["run", "--check", "--json"], ["verify", "--json"]])
def test_commands(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps(declared("simple_gla", mode="autoregressive")))
    try:
        code = main([*command, str(file)])
    except SystemExit as stopped:
        code = stopped.code
    assert not code, capsys.readouterr()
    assert "ragged_simple_gla" in capsys.readouterr().out
