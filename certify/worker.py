"""Cases in a process of their own, so that a crash of the target is the result of one case, and a hang ends after a while."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import AttnOpsError, ConfigError
from .judge import Judgement
from .source import Subject

__all__ = ["Worker", "Workers"]

_COMMAND = (sys.executable, "-m", "attnops.certify.worker_process")
_START = 120.0  # seconds that importing the target may take, or as many as a case
_ACCELERATORS = ("/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
# Nearly all of the time goes into compiling small programs that run once.
_FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"


def _waited(pid: int) -> dict[str, float]:
    """Seconds for which each thread of a process was ready and had no CPU; nothing where the system doesn't say."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    """End a worker, and what its target started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


class Worker:
    """Runs the cases of one subject, each within `seconds`. A context manager; the process starts with the first case. Time in
    which the process waits for a CPU isn't counted, so that a busy machine isn't a wrong case.

    Errors: AttnOpsError if the target can't be imported or called.
    """

    def __init__(self, subject: Subject, seconds: float) -> None:
        self.subject, self.seconds = subject, seconds
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __call__(self, case: Any) -> Judgement:
        if self.process is None:
            self._start()
        answer, late = self._ask(case.to_dict(), self.seconds)
        if isinstance(answer, dict):
            raise ConfigError(answer["error"])
        if answer is not None:
            return Judgement(*answer)
        status = self._end()
        if late:
            return Judgement("wrong", f"no answer within {self.seconds:g} s", -1.0)
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        return Judgement("wrong", f"the process ended with {ending}", -1.0)

    def _start(self) -> None:
        environment = dict(os.environ)
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {_FLAGS}".strip()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), environment.get("PYTHONPATH"))))
        for name in ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION"):  # a user's program has jax's defaults
            environment.pop(name, None)
        self.process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.starts += 1
        convention = self.subject.convention.model_dump_json()
        answer, late = self._ask([self.subject.name, convention, list(self.subject.define)], max(_START, self.seconds))
        if answer is None or "error" in answer:
            self._end()
            why = "the import takes too long" if late else (answer or {}).get("error", "the process ended")
            raise AttnOpsError(f"{self.subject.name}: {why}; wanted a function that can be imported.")

    def _ask(self, request: Any, seconds: float) -> tuple[Any, bool]:
        """(the answer, None if there is none; whether time ran out)."""
        process, late, done = self.process, threading.Event(), threading.Event()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None

        def watch() -> None:
            started, before = time.monotonic(), _waited(process.pid)
            left = seconds
            while left > 0:
                if done.wait(left):
                    return
                now = _waited(process.pid)
                waited = max((spent - before.get(thread, 0.0) for thread, spent in now.items()), default=0.0)
                left = seconds - (time.monotonic() - started - waited)
            late.set()
            _kill(process)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            return (json.loads(line) if line else None), late.is_set()
        except (BrokenPipeError, json.JSONDecodeError):
            return None, late.is_set()
        finally:
            done.set()
            watcher.join()

    def _end(self) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        _kill(process)
        return process.wait()


class Workers:
    """Several workers of one subject, each in a process of its own: a case goes to one that is free. A context manager."""

    def __init__(self, subject: Subject, seconds: float) -> None:
        self.each = [Worker(subject, seconds) for _ in range(_processes())]
        self.free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.each:
            self.free.put(worker)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.each:
            if worker.process is not None:  # which a thread may be waiting for
                _kill(worker.process)
            worker.__exit__(kind, error, trace)

    def __call__(self, case: Any) -> Judgement:
        worker = self.free.get()
        try:
            return worker(case)
        finally:
            self.free.put(worker)


def _processes() -> int:
    """One for each of two CPUs; one alone with an accelerator, which a process may have to itself."""
    if os.environ.get("JAX_PLATFORMS") != "cpu" and any(Path(device).exists() for device in _ACCELERATORS):
        return 1
    return min(os.cpu_count() or 1, 2)
