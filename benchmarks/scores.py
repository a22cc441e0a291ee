"""Score functions on this machine's CPU and in the schedules of described TPUs: python benchmarks/scores.py [--tpu].

CPU: times of a call with a score as ratios of the same call without one and of jax.nn with the bias as an array, one process,
calls interleaved, medians; and temporaries of the compiled program. --tpu: cycles of a tile and of the pass for the gradients of
a score's arrays, beside the tile without a score, by the static clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROUNDS = 9
HEADS, DIM = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tpu", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps(of_tpus() if chosen.tpu else of_cpu(), indent=1))


def of_cpu() -> dict[str, Any]:
    """Ratios of times at 4096 tokens, and MiB of temporaries at 32768."""
    return {"time": times(4096), "temporaries in MiB at 32768": memory(32768)}


def _calls(length: int, dtype: Any) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...], dict[str, Any]]:
    """(calls of query, key, value and an array; the first three; the array of each call)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from attnops import ALiBi, OperationMetadata, OperationRegistry, RelativeBias
    from attnops.scores import paper_slopes

    attend = OperationRegistry.create("vanilla", OperationMetadata())
    rng = np.random.default_rng(0)
    qkv = tuple(jnp.asarray(rng.standard_normal((1, length, HEADS, DIM)), dtype) for _ in range(3))
    slopes, table = jnp.asarray(paper_slopes(HEADS)), jnp.asarray(rng.standard_normal((32, HEADS)), jnp.float32)
    place = np.arange(length)
    arrays = {"plain": slopes, "alibi": slopes, "t5": table}
    if length <= 8192:
        away = abs(place[:, None] - place[None]).astype(np.float32)
        arrays["jax.nn with the bias"] = -slopes[None, :, None, None] * away[None, None]
    calls = {
        "plain": lambda q, k, v, x: attend(q, k, v, causal=True).attention_outputs,
        "alibi": lambda q, k, v, x: attend(q, k, v, causal=True, score=ALiBi(x)).attention_outputs,
        "t5": lambda q, k, v, x: attend(q, k, v, causal=True, score=RelativeBias(x)).attention_outputs,
        "jax.nn with the bias": lambda q, k, v, x: jax.nn.dot_product_attention(q, k, v, bias=x, is_causal=True),
    }
    return {name: call for name, call in calls.items() if name in arrays}, qkv, arrays


def _with_gradient(call: Callable[..., Any], of_array: bool) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def total(q: Any, k: Any, v: Any, x: Any) -> Any:
        return call(q, k, v, x).astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2, 3) if of_array else (0, 1, 2))


def times(length: int) -> dict[str, Any]:
    """Medians in ms, and ratios."""
    import jax
    import jax.numpy as jnp

    calls, qkv, arrays = _calls(length, jnp.float32)
    result: dict[str, Any] = {}
    for what in ("forward", "gradient"):
        compiled = {
            name: jax.jit(call if what == "forward" else _with_gradient(call, name in ("alibi", "t5")))
            .lower(*qkv, arrays[name])
            .compile()
            for name, call in calls.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in compiled}
        names = list(compiled)
        for round_ in range(ROUNDS + 1):
            # Another order in each round: a call pays for the caches that the one before it has left.
            for name in random.Random(round_).sample(names, len(names)):
                program = compiled[name]
                start = time.perf_counter()
                jax.block_until_ready(program(*qkv, arrays[name]))
                if round_:
                    taken[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(x) for name, x in taken.items()}
        result[what] = {
            "ms": {name: round(1e3 * x, 1) for name, x in medians.items()},
            "of plain": {name: round(medians[name] / medians["plain"], 3) for name in ("alibi", "t5")},
            "alibi of jax.nn": round(medians["alibi"] / medians["jax.nn with the bias"], 3),
        }
    return result


def memory(length: int) -> dict[str, Any]:
    """Temporaries of compiled programs in bfloat16."""
    import jax
    import jax.numpy as jnp

    calls, qkv, arrays = _calls(length, jnp.bfloat16)
    result: dict[str, Any] = {}
    for name, call in calls.items():
        programs = {"forward": call, "gradient": _with_gradient(call, name != "plain")}
        result[name] = {
            what: round(
                jax.jit(program).lower(*qkv, arrays[name]).compile().memory_analysis().temp_size_in_bytes / 2**20, 1
            )
            for what, program in programs.items()
        }
    return result


TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
CASES = {"plain": {}, "alibi": {"score": "alibi"}, "t5": {"score": "t5"}}


def of_tpus() -> dict[str, Any]:
    """Cycles of a tile of 1024 x 1024 that the mask leaves whole, head dim 128, causal, by kernel."""
    from attnops.verify.static_clock import kernels_in, regions, tile_cycles

    result: dict[str, Any] = {}
    for target in TARGETS:
        cycles: dict[str, dict[str, int]] = {}
        for name, fields in CASES.items():
            case = {"kernel": "attnops", "target": target, "length": 4096, "dim": 128, "blocks": [1024, 1024, 512]}
            with tempfile.TemporaryDirectory() as folder:
                case |= {"fused": True, "out": folder, **fields}
                subprocess.run(
                    [sys.executable, str(HERE / "tpu_static_worker.py"), json.dumps(case)],
                    check=True, capture_output=True, env=os.environ,
                )  # fmt: skip
                cycles[name] = {
                    kernel.removeprefix("attnops_splash_"): tile_cycles(
                        regions(*(path.read_text() for path in paths))
                    ).tiles[-1]
                    for kernel, paths in kernels_in(Path(folder)).items()
                    if "splash" in kernel
                }
        result[target] = {
            "cycles": cycles,
            "of plain": {
                name: {
                    kernel: round(n / cycles["plain"][kernel], 3)
                    for kernel, n in of.items()
                    if kernel in cycles["plain"]
                }
                for name, of in cycles.items()
                if name != "plain"
            },
        }
    return result


if __name__ == "__main__":
    main()
