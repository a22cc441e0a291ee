"""`attnops verify --cycles`: what kernels of a planned call take by the TPU compiler's schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from attnops import OperationMetadata, OperationRegistry, StateBatch
from attnops.operators.recurrent.kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING, STEP
from attnops.verify.generations import clock_rate
from attnops.verify.passes import target_reports
from attnops.verify.recurrent_call import PlannedRecurrence
from attnops.verify.report import PassReport
from attnops.verify.topology import described_mesh


def one_device(topology: str = "v5e:2x2") -> Mesh:
    return Mesh(np.asarray(described_mesh(topology).devices).reshape(-1)[:1], ("dp",))


def step_of(rows: int) -> PassReport:
    """A step of one token of each row, with all gates, as verify compiles it."""
    name, heads, dim = "ragged_gated_delta_rule_v2", 8, 128
    declared = {"gate": "raw", "beta_form": "sigmoid", "normalise_qk": True}
    metadata = OperationMetadata(mesh=one_device(), operation_configs={name: declared})
    shape = lambda *s, d="float32": jax.ShapeDtypeStruct(s, jnp.dtype(d))  # noqa: E731
    keys, per_head = shape(rows, heads // 2, dim, d="bfloat16"), shape(rows, heads)
    batch = (shape(rows + 1, d="int32"), shape(rows, d="int32"), shape(d="int32"), shape(rows, d="int32"))
    call = {
        "query": keys, "key": keys, "value": shape(rows, heads, dim, d="bfloat16"), "decay": per_head, "beta": per_head,
        "A_log": shape(heads), "dt_bias": shape(heads), "state": shape(512, heads, dim, dim),
        "batch": StateBatch(*batch, shape(rows, 1, d="int32")), "max_q_len": 1,
    }  # fmt: skip
    planned = PlannedRecurrence(OperationRegistry.create(name, metadata), call)
    *_, report = target_reports(planned, "v5e:2x2", cycles=True)
    (only,) = report.passes
    assert only.failure is None
    # The slots are donated: they count once.
    assert only.alias_bytes == 512 * heads * dim * dim * 4
    return only


@pytest.mark.slow
def test_a_step_takes_its_cycles_for_each_row() -> None:
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    few, many = (step_of(rows).cycles[0] for rows in (8, 16))
    assert (few.name, few.failure) == (STEP, None)
    assert few.cycles is not None
    assert many.cycles == 2 * few.cycles
    # Each state is multiplied by its decay, read for key and query, and added to: at least 7 operations on 16 of 8 x 128
    # numbers, of which a core does 4 a cycle.
    assert few.cycles >= 8 * 8 * 7 * 16 / 4
    assert few.seconds == pytest.approx(few.cycles / clock_rate("TPU v5 lite"))


@pytest.mark.slow
def test_each_pass_has_its_own_kernels() -> None:
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    operation = OperationRegistry.create("simple_gla", OperationMetadata(mesh=one_device(), tuning="off"))
    shape = jax.ShapeDtypeStruct((1, 256, 4, 128), jnp.bfloat16)
    *_, report = target_reports(
        PlannedRecurrence(operation, {"query": shape, "key": shape, "value": shape}), "v5e:2x2", cycles=True
    )
    forward, both = report.passes
    assert [kernel.name for kernel in forward.cycles] == [FORWARD]
    assert {kernel.name for kernel in both.cycles} == {KEEPING, BACKWARD}
    assert {kernel.name for kernel in both.kernels or ()} == {KEEPING, BACKWARD}
    assert all(kernel.cycles for kernel in (*forward.cycles, *both.cycles))


@pytest.mark.slow
def test_the_command_prints_them(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    sizes = {"batch": 4, "q_len": 512, "q_heads": 4, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16"}
    path = config("splash", **sizes, causal=True, mode="prefill")
    (report,) = json.loads(attnops("verify", path, "--target", "v5e:2x2", "--cycles", "--json").out)
    (kernel,) = report["passes"][0]["cycles"]
    assert kernel["name"] == "attnops_splash_forward"
    printed = attnops("verify", path, "--target", "v5e:2x2", "--cycles").out
    assert f"{kernel['cycles']:,} cycles" in printed


def test_what_has_no_schedule_says_so(attnops: Callable[..., Any], tmp_path: Path) -> None:
    """XLA runs Mamba-1 on a TPU."""
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    path = tmp_path / "mamba1.json"
    call = {"batch": 4, "q_len": 16, "dims": {"channels": 128, "state_dim": 8}, "mode": "prefill"}
    path.write_text(json.dumps({"operation": "mamba1", "call": call}))
    (report,) = json.loads(attnops("verify", path, "--target", "v5e:2x2", "--cycles", "--json").out)
    (kernel,) = report["passes"][0]["cycles"]
    assert kernel["cycles"] is None
    assert "mamba1.forward_native" in kernel["failure"]
