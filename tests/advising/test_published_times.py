"""The estimate of one device's work against times that others measured: tokamax's autotuning data for a tpu7x.

benchmarks/results/static_clock.json has them, with the block sizes; those sizes are declared here, for attnops' own kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from attnops import Causal, Full, OperationMetadata, OperationRegistry
from attnops.advising.estimate import estimate
from attnops.advising.machine import machine_of
from attnops.compat import abstract_device
from attnops.verify.generations import abstract_target, vector_cycles
from attnops.verify.tile_counts import matrix_cycles

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "static_clock.json"
ROWS = [row for row in json.loads(RESULTS.read_text())["rows"] if row["chip"] == "tpu7x"]
NAMES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv")


def _seconds(row: dict[str, Any]) -> float:
    device = abstract_device("TPU7x", 1, "tpu")
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=device)
    sizes = {name: row["config"][name] for name in NAMES if name in row["config"]}
    # As tokamax's tiles are: computed whole, not pipelined.
    sizes |= {f"{name}_compute": sizes[name] for name in ("block_q", "block_q_dkv") if name in sizes}
    sizes |= {f"{name}_compute": sizes[name] for name in ("block_kv", "block_kv_dkv") if name in sizes}
    sizes |= {"transposed_tiles": False, "products_ahead": 0, "products_ahead_dkv": 0}
    if row["pass"] == "backward":
        sizes["use_fused_bwd_kernel"] = True
    metadata = OperationMetadata(mesh=mesh, operation_configs={"splash": sizes}, tuning="off", fallback="error")

    def array(heads: str, dim: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((row["batch"], row["length"], row[heads], row[dim]), "bfloat16")

    shapes = array("heads", "dim"), array("kv_heads", "dim"), array("kv_heads", "value_dim")
    mask = Causal() if row["mask"] == "causal" else Full()
    plan = OperationRegistry.create("splash", metadata).plan(*shapes, mask=mask, mode="train")
    assert plan.implementation == "splash.forward_tpu", plan.refusal()
    passes = {one.name: one.seconds for one in estimate(plan, machine_of("tpu7x:2x2x1")).passes}
    return passes[row["pass"]]


def test_tiles_against_the_schedules_read() -> None:
    """The longer of products and the rest, for each tile whose cycles were read from the compiler's schedule: attnops' kernels on
    three generations, three head dims, in the sizes that plans choose and in declared ones."""
    planned, declared = [], []
    for row in json.loads((RESULTS.parent / "tpu_static.json").read_text())["rows"]:
        if row["kernel"] != "attnops" or row["mask"] != "causal":
            continue
        kind, fields = abstract_target(row["target"])[0], row.get("fields", {})
        for kernel, (tiles, *_) in row["cycles"].items():
            products = kernel.removeprefix("attnops_splash_")
            of_pass = "" if products == "forward" else "_dkv"
            block_q, block_kv = (
                fields.get(f"{name}{of_pass}", size)
                for name, size in zip(("block_q", "block_kv"), row["blocks"], strict=False)
            )
            if products == "dq":  # its keys go by the inner block
                block_kv = row["blocks"][2]
            default = kind in ("TPU v6 lite", "TPU7x") and (products == "forward" or row["dim"] < 256)
            pipelined = products in ("forward", "backward") and fields.get(f"products_ahead{of_pass}", default)
            least = matrix_cycles(kind, products, block_q, block_kv, row["dim"], row["dim"])
            guess = max(least, block_q * block_kv * vector_cycles(kind, products, block_kv, bool(pipelined)))
            filled = guess + ({"forward": 415, "backward": 200}[products] if pipelined else 0)
            error = filled / max(*tiles, least) - 1
            (planned if "products_ahead" in fields else declared).append(abs(error))
    assert len(planned) > 20
    assert np.median(planned) < 0.025
    assert np.max(planned) < 0.1
    assert len(declared) > 80
    assert np.median(declared) < 0.045
    assert np.max(declared) < 0.45


def _ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def _correlation(a: list[float], b: list[float]) -> float:
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


@pytest.fixture(scope="module")
def guesses() -> list[float]:
    return [_seconds(row) for row in ROWS]


def test_rank_correlation_with_measured_times(guesses: list[float]) -> None:
    """All 76 together, and each pass; at a wrong order of magnitude ranks would still agree, so the median ratio is held too."""
    measured = [row["ms"] / 1e3 for row in ROWS]
    assert len(ROWS) == 76
    assert _correlation(guesses, measured) >= 0.95
    for which in ("forward", "backward"):
        chosen = [i for i, row in enumerate(ROWS) if row["pass"] == which]
        assert _correlation([guesses[i] for i in chosen], [measured[i] for i in chosen]) >= 0.95
    ratio = float(np.median([m / g for g, m in zip(guesses, measured, strict=True)]))
    assert 1 <= ratio < 2  # a bound, without what XLA does around the kernel


def test_rank_correlation_of_the_time_a_weight(guesses: list[float]) -> None:
    """Without it long calls rank themselves."""
    weights = [row["batch"] * row["heads"] * row["length"] ** 2 for row in ROWS]
    found = _correlation(
        [g / w for g, w in zip(guesses, weights, strict=True)],
        [row["ms"] / w for row, w in zip(ROWS, weights, strict=True)],
    )
    assert found >= 0.9
