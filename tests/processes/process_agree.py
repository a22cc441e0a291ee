"""One process of several, which ask each other what they declare; what each finds is printed as JSON lines.

Run by test_check_processes.py: process_agree.py COORDINATOR COUNT ID differ|devices|die. Process 1 is the odd one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from attnops import OperationMetadata, OperationRegistry, check_processes

HEARTBEAT = 5  # seconds


def found(name: str, *arguments: Any, **named: Any) -> None:
    """Check, and print what came of it."""
    error: Any = None
    try:
        check_processes(*arguments, **named)
    except Exception as raised:
        error = raised
    result = {"name": name, "error": type(error).__name__, "text": str(error)}
    print(json.dumps(result | {"processes": getattr(error, "processes", None)}))


def mesh_of(sp: int, tp: int, kind: AxisType = AxisType.Auto, step: int = 1) -> Mesh:
    return Mesh(np.asarray(jax.devices()[::step]).reshape(sp, tp), ("sp", "tp"), axis_types=(kind,) * 2)


def differ(process: int) -> None:
    odd, count = process == 1, jax.device_count()
    mesh = mesh_of(count // 2, 2)
    found("nothing")
    found("mesh", mesh_of(count, 1) if odd else mesh)
    found("sizes", {"sp": 4 if odd else 2})
    found("types", mesh_of(count // 2, 2, AxisType.Explicit) if odd else mesh)
    found("order", mesh_of(count // 2, 2, step=-1) if odd else mesh)
    found("platform", mesh.abstract_mesh if odd else mesh)

    ring = OperationMetadata(mesh=mesh, sequence_parallel="ring", operation_configs={"vanilla": {"block_q": 128}})
    ulysses = ring.replace(sequence_parallel="ulysses")
    found("declaration", mesh, {"attention": ulysses if odd else ring, "step": 3})
    wide = ring.replace(operation_configs={"vanilla": {"block_q": 256}})
    found("leaf", mesh, {"attention": wide if odd else ring})
    attend, x = OperationRegistry.create("vanilla"), jax.ShapeDtypeStruct((2, 8, 2, 8), jnp.float32)
    found("plan", agree={"plan": attend.plan(x, x, x, causal=not odd)})
    found("one process lacks it", agree={} if odd else {"step": [1, {}]})
    found("all differ", agree={"text": "x" * (5000 * process)})
    found("many", agree={str(n): ("x" if process else "y") * 500 for n in range(9)})
    with mock.patch.object(jax, "__version__", "0.0.1" if odd else jax.__version__):
        found("version")

    agreed = {"attention": ring, "plan": attend.plan(x, x, x, causal=True), "sizes": [1, 2.5, None, "é" * 3000]}
    found("same", mesh, dict(reversed(agreed.items())) if odd else agreed)


def main(coordinator: str, count: int, process: int, what: str) -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    jax.distributed.initialize(
        coordinator,
        count,
        process,
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT if what == "die" else 60,
        shutdown_timeout_seconds=20,
    )
    jax.devices()
    if what == "differ":
        differ(process)
    elif what == "devices":
        found("devices")
    elif process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        found("dead")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
