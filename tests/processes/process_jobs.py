"""Start the processes of a job, wait for them within a bound, and leave none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Ended(NamedTuple):
    """A process that ended: its exit status (below 0: the signal; None: killed at the bound), after how long, its output."""

    status: int | None
    seconds: float
    text: str


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_job(
    script: str, processes: Sequence[Sequence[object]], *, devices: Sequence[int], bound: float, optimised: bool = False
) -> list[Ended]:
    """Run script ARGUMENTS for each process at the same time, with as many virtual CPU devices as `devices` says of it.

    Unless `optimised`, XLA compiles with less effort, less than half of the time of a short job.
    """
    hurry = "" if optimised or not version("jaxlib").startswith("0.10.") else "--xla_cpu_use_fusion_emitters=false"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(not optimised),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "error",
    }
    for name in [n for n in environment if n.lower().endswith("_proxy") or n == "JAX_COORDINATOR_ADDRESS"]:
        del environment[name]
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    with tempfile.TemporaryDirectory(prefix="attnops-job-") as folder:
        begin = time.monotonic()
        try:
            for process, arguments in enumerate(processes):
                log = Path(folder, str(process))
                command = [sys.executable, str(HERE / script), *map(str, arguments)]
                flags = {"XLA_FLAGS": f"{hurry} --xla_force_host_platform_device_count={devices[process]}"}
                with log.open("wb") as out:
                    one = subprocess.Popen(
                        command, env=environment | flags, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                    )
                started.append((one, log))
            ended: dict[int, float] = {}
            while len(ended) < len(started) and time.monotonic() - begin < bound:
                for process, (one, _) in enumerate(started):
                    if process not in ended and one.poll() is not None:
                        ended[process] = time.monotonic() - begin
                time.sleep(0.02)
            statuses = [one.poll() for one, _ in started]
        finally:
            for one, _ in started:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        return [
            Ended(status, ended.get(process, bound), log.read_text(errors="replace"))
            for process, ((_, log), status) in enumerate(zip(started, statuses, strict=True))
        ]


def told(job: Sequence[Ended]) -> str:
    """What every process said, for the message of an assertion."""
    return "\n".join(f"--- process {i}, status {e.status}, {e.seconds:.1f} s\n{e.text}" for i, e in enumerate(job))
