"""Static cycles of the TPU kernels of recurrences, by the compiler's schedules for described devices, without waits for memory.

    python benchmarks/recurrent_cycles.py [--json FILE] [--tokamax PYTHON]

`cycles` are those of 128 tokens of 4 heads of 128 in bfloat16, `step` those of one token of 4 heads over slots, with raw gates
and norms, `drafts` those of each of 4 tokens of a row, `convolved` the same with convolutions of queries, keys and values. With a
Python that has tokamax and libtpu, `tokamax` are those of its causal_conv1d_gated_delta_rule, which has the convolution, gates
and norms in one kernel: of 128 tokens, where ours leaves the convolution to XLA, and of one, and ours as a part of them. FILE
keeps its other parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from recurrent import arrays_of

from attnops import OperationMetadata, OperationRegistry, StateBatch
from attnops.operators.recurrent.kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING, STEP
from attnops.verify.clock_worker import ClockWorker
from attnops.verify.passes import target_reports
from attnops.verify.recurrent_call import PlannedRecurrence
from attnops.verify.static_clock import kernels_in, regions
from attnops.verify.topology import described_mesh
from attnops.verify.tune_recurrence import RecurrenceSearch

TARGETS = ("v6e:2x2", "tpu7x:2x2x1")
CELLS = (("gated_delta_rule", 64), ("gated_delta_rule", 128), ("kda", 128), ("simple_gla", 128))
HEADS, DIM, ROWS = 4, 128, 16
THEIRS = {"chunks": "fused_conv1d_gdn_per_seq_b1_c128", "step": "fused_conv1d_gdn_batched_b1_c1"}


def chunks() -> dict[str, dict[str, dict[str, float]]]:
    """Device -> rule and chunk -> kernel -> static cycles of 128 tokens of 4 heads."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    workers = {name: ClockWorker(name) for name in (FORWARD, KEEPING, BACKWARD)}
    for topology, (rule, chunk) in itertools.product(TARGETS, CELLS):
        mesh = Mesh(np.asarray(described_mesh(topology).devices).reshape(-1)[:1], ("dp",))
        metadata = OperationMetadata(mesh=mesh, operation_configs={rule: {"chunk_size": chunk}}, tuning="off")
        shapes = {
            name: jax.ShapeDtypeStruct((1, 512, 4, *x.shape[3:]), x.dtype if name == "decay" else jnp.bfloat16)
            for name, x in arrays_of(rule, 8).items()
        }
        of_cell = found.setdefault(topology.split(":")[0], {}).setdefault(f"{rule} {chunk}", {})
        for mode, part in (("prefill", "forward"), ("train", "backward")):
            plan: Any = OperationRegistry.create(rule, metadata).plan(**shapes, mode=mode)
            search = RecurrenceSearch(plan.operation, plan.method, plan.problem, plan.placement)
            compiled, fields, kernels = search.scheduled(part, {})
            for name, whole in kernels.items():
                outcome = workers[name].ask(plan.problem.device_kind, compiled, part, fields)
                if outcome.cycles is None:
                    raise SystemExit(f"{topology} {rule} {chunk}: {outcome.failure}")
                of_cell[name.removeprefix("attnops_recurrent_")] = whole(outcome.cycles) / 4
        print(topology, rule, chunk, of_cell, flush=True)
    for worker in workers.values():
        worker.close()
    return found


def steps(tokens: int, convolved: bool = False) -> dict[str, float]:
    """Device -> static cycles of one token of 4 heads of the gated delta rule, in rows of so many tokens. convolved: with
    convolutions of 4 tokens before it."""
    found = {}
    name, shape = "ragged_gated_delta_rule_v2", jax.ShapeDtypeStruct
    declared = {"gate": "raw", "beta_form": "sigmoid", "normalise_qk": True}
    for topology in TARGETS:
        mesh = Mesh(np.asarray(described_mesh(topology).devices).reshape(-1)[:1], ("dp",))
        count = ROWS * tokens
        keys, per_head = shape((count, HEADS, DIM), jnp.bfloat16), shape((count, HEADS), jnp.bfloat16)
        call = {"query": keys, "key": keys, "value": keys, "decay": per_head, "beta": per_head}
        call |= {"A_log": shape((HEADS,), jnp.float32), "dt_bias": shape((HEADS,), jnp.float32)}
        if convolved:
            for of in ("query", "key", "value"):
                call |= {f"{of}_conv_weight": shape((4, HEADS, DIM), jnp.bfloat16)}
                call |= {f"{of}_conv_window": shape((2 * ROWS, 3, HEADS, DIM), jnp.bfloat16)}
            call["conv_activation"] = "silu"
        sizes = ((ROWS + 1,), (ROWS,), (), (ROWS,), (ROWS, 1))
        batch = StateBatch(*(shape(size, jnp.int32) for size in sizes))
        state = shape((2 * ROWS, HEADS, DIM, DIM), jnp.float32)
        operation: Any = OperationRegistry.create(
            name, OperationMetadata(mesh=mesh, operation_configs={name: declared}, fallback="error")
        )
        planned = PlannedRecurrence(operation, {**call, "state": state, "batch": batch, "max_q_len": tokens})
        *_, report = target_reports(planned, topology, cycles=True)
        (kernel,) = report.passes[0].cycles
        assert kernel.name == STEP
        assert kernel.cycles is not None, kernel.failure
        found[topology.split(":")[0]] = kernel.cycles / count
        print(topology, "step", found, flush=True)
    return found


def theirs(python: str, ours: dict[str, Any], step: dict[str, float]) -> dict[str, Any]:
    """Device -> tokamax's cycles of a loop's turn of both kernels, and ours as a part of them; or what failed."""
    found: dict[str, Any] = {}
    for topology in TARGETS:
        device = topology.split(":")[0]
        with tempfile.TemporaryDirectory() as folder:
            command = [python, str(Path(__file__).with_name("recurrent_tokamax.py")), topology, folder, str(HEADS)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                found[device] = {"failure": done.stderr.strip().splitlines()[-1]}
                continue
            dumps = kernels_in(Path(folder))
            turns = {}
            for name, kernel in THEIRS.items():
                root = regions(*(path.read_text() for path in dumps[kernel]))
                turns[name] = max(region.cycles for region in root.all() if region.is_loop)
        mine = {"chunks": ours[device]["gated_delta_rule 128"]["forward"], "step": step[device]}
        of = {f"ours/theirs {name}": mine[name] / turns[name] for name in turns}
        found[device] = {"version": done.stdout.strip().splitlines()[-1], **turns, **of}
        print(topology, found[device], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokamax", metavar="PYTHON", help="one that has tokamax and libtpu")
    options = parser.parse_args()
    found: dict[str, Any] = {"cycles": chunks(), "step": steps(1), "drafts": steps(4)}
    found |= {"convolved step": steps(1, convolved=True), "convolved drafts": steps(4, convolved=True)}
    if options.tokamax:
        found["tokamax"] = theirs(options.tokamax, found["cycles"], found["convolved step"])
    print(json.dumps(found, indent=1))
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(before | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
