"""A process that compiles one device's calls or steps for a described TPU and reads a kernel's cycles from its schedule.

libtpu reads what to dump when it starts, so there is one process per kernel: `python -m attnops.verify.clock_worker`. It takes
pickled (device kind, what to compile, part, fields) and returns Outcomes.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from .static_clock import Region, dump_options

__all__ = ["ClockWorker", "Compiled", "Outcome"]

_FOLDER = "ATTNOPS_CLOCK_FOLDER"
SECONDS = 600.0


class Compiled(Protocol):
    """What is compiled: it can be pickled, and reads its kernels' schedules."""

    def program(self, fields: Mapping[str, Any], part: str, mesh: Any = None) -> tuple[Any, list[Any]]:
        """(a function of a list of arrays, their shapes) for a part of it with these fields."""

    def read(self, kernel: str, root: Region) -> Any:
        """A kernel's cycles."""


class Outcome(NamedTuple):
    """What the compiler made of a candidate: the kernel's cycles, as what was compiled reads them, and bytes of VMEM (None where
    they can't be read), or why it failed.

    lost: the process ended before it answered, so another attempt may succeed.
    """

    cycles: Any | None
    vmem: int | None
    failure: str | None = None
    lost: bool = False


class ClockWorker:
    """A process that compiles one kernel. It is started at the first request, and again after one that took too long."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def ask(self, kind: str, problem: Compiled, part: str, fields: Mapping[str, Any]) -> Outcome:
        """Compile a part with these fields for a kind of device; one request at a time."""
        with self._lock:
            return self._ask(kind, problem, part, fields)

    def _ask(self, kind: str, problem: Compiled, part: str, fields: Mapping[str, Any]) -> Outcome:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(SECONDS, process.kill)
        late.start()
        try:
            pickle.dump((self.kernel, kind, problem, part, dict(fields)), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.close()
            return Outcome(None, 0, f"the compiler's process ended, or took more than {SECONDS:g} s", True)
        finally:
            late.cancel()
        assert isinstance(answer, Outcome)
        return answer

    def close(self) -> None:
        """End the process and remove its dumps."""
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue
            self._process.wait()
            self._process = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._folder = tempfile.mkdtemp(prefix="attnops-clock-")
            flags = os.environ.get("LIBTPU_INIT_ARGS", "")
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "LIBTPU_INIT_ARGS": f"{flags} {dump_options(self._folder, f'{self.kernel}.1')}".strip(),
                _FOLDER: self._folder,
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "attnops.verify.clock_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        return self._process


def compile_one(
    folder: Path, kernel: str, kind: str, problem: Compiled, part: str, fields: Mapping[str, Any]
) -> Outcome:
    """Compile a part, read its dumps and remove them."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from ..errors import AttnOpsError
    from .compiled import failure, kernels, program_text
    from .generations import topology_of
    from .static_clock import kernels_in, regions
    from .topology import described_mesh

    try:
        devices = described_mesh(topology_of(kind)).devices.reshape(-1)[:1]
        mesh = Mesh(np.asarray(devices), ("device",))
        function, shapes = problem.program(fields, part, mesh)
        replicated = NamedSharding(mesh, PartitionSpec())
        compiled = (
            jax.jit(function)
            .lower([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated) for x in shapes])
            .compile()
        )
        dumps = kernels_in(folder).get(kernel)
        if dumps is None:
            return Outcome(None, 0, f"libtpu dumped no schedule of {kernel}")
        cycles = problem.read(kernel, regions(*(path.read_text() for path in dumps)))
        text = program_text(compiled)
        used: list[int | None] = [None] if text is None else [k.vmem_used for k in kernels(text) if k.name == kernel]
        return Outcome(cycles, None if None in used else sum(n or 0 for n in used))
    except AttnOpsError as error:
        return Outcome(None, 0, str(error))
    except Exception as error:  # raised by the compiler
        return Outcome(None, 0, failure(error).message)
    finally:
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    """Answer requests until there are no more."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output out of the answers
    folder = Path(os.environ[_FOLDER])
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception as error:  # something this process lacks, such as the caller's mask function
            question = None
            answer = Outcome(None, 0, f"the call can't be sent to the compiler's process: {error}")
        else:
            answer = compile_one(folder, *question)
        pickle.dump(answer, answers)
        answers.flush()
        if question is None:
            return  # the rest of the stream can't be read


if __name__ == "__main__":
    # This file runs as __main__, but what it pickles needs an importable name.
    from .clock_worker import main as run

    run()
