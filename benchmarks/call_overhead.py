"""What a call costs on the host: import time, the first plan, an eager call with a cached plan, planning, a long mask.

    python benchmarks/call_overhead.py [--json FILE]

Medians, interleaved in one process. Each import is timed in a new process, with bytecode that an earlier one wrote, as an
installed package has; the time is the CPU's, which other processes disturb less. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from attnops import Causal, OperationMetadata, OperationRegistry, SlidingWindow

_IMPORTS = ("import jax", "import attnops", "from attnops import Attention")
_FIRST_PLAN = (
    "import jax; from attnops import Attention; x = jax.ShapeDtypeStruct((1, 8, 2, 8), 'float32'); "
    "Attention('vanilla', causal=True).plan(x, x, x)"
)


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds of each call, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 50):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            call()
            if round_ >= 50:
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def import_times(runs: int = 7) -> dict[str, float]:
    """Median CPU seconds of imports, and of all up to a first plan, each in a new process, interleaved."""
    times: dict[str, list[float]] = {statement: [] for statement in (*_IMPORTS, _FIRST_PLAN)}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for run in range(runs + 1):
            for statement in times:
                code = f"import time; s = time.process_time(); {statement}; print(time.process_time() - s)"
                command = [sys.executable, "-c", code]
                out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                if run:
                    times[statement].append(float(out.stdout))
    return {statement: statistics.median(values) for statement, values in times.items()}


def eager_calls() -> dict[str, float]:
    """Microseconds of calling the jitted function directly, and through the operation with its plan cached."""
    attend = OperationRegistry.create("vanilla", OperationMetadata())
    x = jnp.ones((1, 8, 2, 8))
    mask = Causal() & SlidingWindow(left=3)
    plain = jax.jit(lambda q, k, v: attend(q, k, v).attention_outputs)
    masked = jax.jit(lambda q, k, v: attend(q, k, v, mask=mask).attention_outputs)
    return interleaved(
        {
            "jitted function": lambda: plain(x, x, x),
            "operation": lambda: attend(x, x, x),
            "jitted function, mask": lambda: masked(x, x, x),
            "operation, mask": lambda: attend(x, x, x, mask=mask),
        },
        3000,
    )


def planning() -> dict[str, float]:
    """Microseconds of planning 128k x 128k, new each time, and of only its causal block map."""
    count = iter(range(10**6))

    def plan() -> Any:
        attend = OperationRegistry.create(
            "splash", OperationMetadata(backend="tpu", softmax_scale=1 + next(count) / 1e6)
        )
        q = jax.ShapeDtypeStruct((1, 131072, 8, 128), jnp.bfloat16)
        return attend.plan(q, q, q, mask=Causal())

    blocks = lambda: Causal(0).live_blocks(512, 512, q_len=131072, kv_len=131072)  # noqa: E731
    return interleaved({"plan": plan, "block map": blocks}, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    imports, calls, plans = import_times(), eager_calls(), planning()
    figures = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "import_s": imports,
        "attention_of_import_jax": imports["from attnops import Attention"] / imports["import jax"],
        "call_us": calls,
        "overhead_us": calls["operation"] - calls["jitted function"],
        "overhead_with_mask_us": calls["operation, mask"] - calls["jitted function, mask"],
        "planning_128k_us": plans,
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
