"""One process of several, of which one goes wrong in a way that is asked for; what each finds is printed as JSON lines.

Run by test_process_failures.py: process_failing.py COORDINATOR MEETING COUNT ID WHAT WHO
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnops import Causal, OperationMetadata, OperationRegistry, check_processes, watch_processes

HEARTBEAT = 10  # seconds, the least that jax's service takes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def found(name: str, call: Callable[[], Any]) -> None:
    """Make the call, and print what came of it and after how long."""
    start, error = time.monotonic(), None
    try:
        call()
    except Exception as raised:
        error = raised
    result = {"name": name, "error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    print(json.dumps(result | {"processes": getattr(error, "processes", None)}))


def mesh_of(sp: int, tp: int, devices: Any = None) -> Mesh:
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(sp, tp)
    return Mesh(devices, ("sp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def disagree(process: int, address: str) -> None:
    """A mesh, then the order of its devices, then a declaration, each another in process 1; then process 1 is late."""
    odd = process == 1
    mesh = mesh_of(2, 2)
    found("mesh", lambda: check_processes(mesh_of(4, 1) if odd else mesh, address=address, timeout=20))
    swapped = mesh_of(2, 2, jax.devices()[::-1])
    found("order", lambda: check_processes(swapped if odd else mesh, address=address, timeout=20))
    attention = OperationMetadata(mesh=mesh, sequence_parallel="ulysses" if odd else "ring")
    found("agree", lambda: check_processes(mesh, {"attention": attention}, address=address, timeout=20))
    if odd:
        time.sleep(2.5)
    else:
        found("late", lambda: check_processes(mesh, address=address, timeout=1))
    found(
        "same",
        lambda: check_processes(mesh, {"attention": attention.replace(sequence_parallel="ring")}, address=address),
    )


def attention_step(mesh: Mesh) -> Callable[[], jax.Array]:
    metadata = OperationMetadata(mesh=mesh, sequence_parallel="ring", tuning="off")
    attend = OperationRegistry.create("vanilla", metadata)
    spec = NamedSharding(mesh, PartitionSpec(None, "sp", "tp"))
    x = jax.make_array_from_callback((2, 48, 2, 8), spec, lambda index: np.ones((2, 48, 2, 8), np.float32)[index])
    loss = jax.jit(lambda x: attend(x, x, x, mask=Causal()).attention_outputs.sum())
    return lambda: loss(x)


def compute(process: int, who: int, address: str, stuck: bool) -> None:
    """Steps, in the midst of which one process dies or sleeps: the others wait for it in the third step."""
    mesh = mesh_of(jax.device_count() // 2, 2)
    with watch_processes(mesh, address=address, timeout=20) as watch:
        step = attention_step(mesh)
        for number in range(10):
            if number == 2 and process == who:
                time.sleep(5 if stuck else 0.5)
                if not stuck:
                    die()
            watch.wait(step(), 2 if stuck and number == 2 else None)


def main(coordinator: str, address: str, count: int, process: int, what: str, who: int) -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    if what == "never_started" and process == who:
        return
    bound = 3 if what == "never_started" else 30  # the others' imports take a while
    found("before", lambda: check_processes(address=address, timeout=bound, process_id=process, num_processes=count))
    if what == "never_started":
        return
    jax.distributed.initialize(
        coordinator,
        count,
        process,
        initialization_timeout=20,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=5,
    )
    if what == "dead_before_devices" and process == who:
        die()
    mesh = mesh_of(jax.device_count() // 2, 2)
    if what == "disagree":
        disagree(process, address)
    elif what == "dead_before_check":
        if process == who:
            die()
        found("check", lambda: check_processes(mesh, address=address, timeout=2))
    else:
        found("compute", lambda: compute(process, who, address, what == "stuck"))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]), sys.argv[5], int(sys.argv[6]))
