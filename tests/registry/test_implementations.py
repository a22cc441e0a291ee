"""An implementation of one's own as an object: what asks it, and that several operations and a mesh can share it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
import pytest

from attnops import Causal, OperationMetadata, OperationRegistry
from attnops.authoring import LocalCall, LocalOutput, Operation, OperationConfig, implementation
from attnops.cli.app import main
from attnops.operators.vanilla import NATIVE
from attnops.planning import STATIC_MASKS, Implementation, declares
from attnops.planning.implementations import Padding
from attnops.verify import reference_attention, reference_gradients


class OwnConfig(OperationConfig):
    operation: Literal["own"] = "own"
    rows: int | None = None
    twice: bool = False
    interpret: bool = False


class Own(Implementation[OwnConfig]):
    """The native path behind a config of its own."""

    operation = "own"
    config = OwnConfig
    capability = declares(consumes=STATIC_MASKS | {"gqa"}, tolerance={"float32": (6e-6, 2e-5)}, dequantises=True)
    factor: ClassVar[float] = 1.0

    def __call__(self, call: LocalCall) -> LocalOutput:
        return LocalOutput(NATIVE(call).output * self.factor)

    def variant(self, config: OperationConfig) -> Implementation[Any]:
        return TWICE if self.reads(config) and self.read(config).twice else self

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        return self.read(problem.config).with_fields({"rows": self.read(problem.config).rows or placement.local.q_len})

    def padding(self, problem: Any, placement: Any, config: OperationConfig) -> Padding | None:
        return Padding(3, 0, 0.25)

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        return (f"{self.read(config).rows} rows at a time",)


class Twice(Own):
    factor = 2.0


OWN, TWICE = Own(), Twice()


class OfCpu(Operation):
    name = "own"
    config = OwnConfig
    forward_cpu = OWN
    forward_native = NATIVE


class OfTpu(Operation):
    name = "own_elsewhere"
    config = type(NATIVE).config  # type: ignore[assignment]
    forward_tpu = OWN
    forward_native = NATIVE


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for operation in (OfCpu, OfTpu):
        OperationRegistry.register(operation)
    yield
    for operation in (OfCpu, OfTpu):
        OperationRegistry.unregister(operation.name)


RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 16, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
SEEN = np.tri(16, dtype=bool)[None, None]


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "tp": 2}])
@pytest.mark.parametrize("twice", [False, True])
def test_it_runs_and_has_a_gradient(mesh: dict[str, int] | None, layout: str, twice: bool) -> None:
    attend = OfCpu(OperationMetadata(mesh=mesh, operation_configs={"own": {"twice": twice}}, tuning="off"))
    given = [x.swapaxes(1, 2) if layout == "bhtd" else x for x in (Q, K, V)]

    def loss(q: Any, k: Any, v: Any) -> Any:
        result = attend(q, k, v, mask=Causal(), layout=layout)
        return result.attention_outputs.sum(), result

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)
    factor = 2.0 if twice else 1.0
    want = reference_attention(Q, K, V, scale=8**-0.5, mask=SEEN).output * factor
    wanted = reference_gradients(Q, K, V, np.full_like(want, factor), scale=8**-0.5, mask=SEEN)
    for got, expected in zip(
        (out.attention_outputs, *gradients), (want, wanted["query"], wanted["key"], wanted["value"]), strict=True
    ):
        own = got.swapaxes(1, 2) if layout == "bhtd" else got
        np.testing.assert_allclose(own, expected, atol=1e-5)
    assert attend.plan(*given, mask=Causal(), layout=layout).implementation == "own.forward_cpu"


def test_the_plan_asks_the_object() -> None:
    plan = OfCpu(OperationMetadata(operation_configs={"own": {"twice": True}}, tuning="off")).plan(Q, K, V)
    assert plan.runs is TWICE
    assert plan.config.rows == 16  # type: ignore[attr-defined]
    assert plan.padding == Padding(3, 0, 0.25)
    assert "16 rows at a time" in plan.notes
    assert OfCpu.listed_as("forward_native") == "vanilla.forward_native"
    refused = OfCpu(OperationMetadata(fallback="error")).plan(Q, K, V, logits_soft_cap=1.0)
    assert [reason.code for one in refused.rejected for reason in one.reasons] == [
        "feature.logits_soft_cap", "policy.fallback",
    ]  # fmt: skip


def test_the_commands_plan_run_and_verify_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel for one more platform is its class and one line of the operation."""
    path = tmp_path / "call.json"
    sizes = {"batch": 2, "q_len": 16, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "mask": "causal", "mode": "train"}
    path.write_text(json.dumps({"operation": "own", "call": sizes}))
    ran = {}
    for command in (["plan"], ["run", "--check", "--repeats", "1"], ["verify", "--target", "here"]):
        assert main([command[0], str(path), *command[1:], "--json"]) == 0
        ran[command[0]] = json.loads(capsys.readouterr().out)
    assert ran["plan"]["implementation"] == "own.forward_cpu"
    assert [check["passed"] for check in ran["run"]["checks"]] == [True]
    (verified,) = ran["verify"]
    assert verified["passed"]
    assert [one["name"] for one in verified["passes"]] == ["forward", "forward and backward"]


def test_another_operation_reads_its_config_where_it_runs() -> None:
    metadata = OperationMetadata(backend="tpu", operation_configs={"own": {"rows": 5}}, tuning="off")
    plan = OfTpu(metadata).plan(Q, K, V)
    assert (plan.implementation, plan.config.operation, plan.config.rows) == ("own_elsewhere.forward_tpu", "own", 5)  # type: ignore[attr-defined]
    assert OfTpu.config_elsewhere("tpu") is OwnConfig
    assert OfTpu.config_elsewhere("cpu") is None
    assert OfCpu.config_elsewhere("cpu") is None


def test_interpreting_is_for_objects_that_know_it() -> None:
    class Plain(Operation):
        name = "plain_methods"
        config = OwnConfig
        forward_native = NATIVE

        @implementation(consumes=STATIC_MASKS | {"gqa"}, tolerance={})
        def forward_tpu(self, call: LocalCall) -> LocalOutput:
            raise AssertionError("not on a CPU")

    problem = OfCpu().plan(Q, K, V).problem
    interpreted = OwnConfig(interpret=True)
    assert Plain.kernel_platform(replace(problem, config=interpreted)) == "cpu"
    assert OfTpu.kernel_platform(replace(problem, config=interpreted)) == "tpu"
    assert OfTpu.kernel_platform(problem) == "cpu"
