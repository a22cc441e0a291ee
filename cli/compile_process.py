"""A process that compiles one target of `attnops verify --timeout`: only a process can be ended while the compiler works.

`python -m attnops.cli.compile_process` takes pickled (VerifyOptions, target), and returns the report as it grows, or the error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..errors import AttnOpsError
from ..verify.report import TargetReport
from .short_warnings import short_warnings
from .verified import VerifyOptions, verified

__all__ = ["verified_within"]

COMMAND = (sys.executable, "-m", "attnops.cli.compile_process")


def verified_within(options: VerifyOptions, target: str, seconds: float | None) -> Iterator[TargetReport]:
    """The report of one target as it grows, of a process of its own. A pass that takes more than so many seconds is given up,
    with those after it; None: no pass is."""
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    report: TargetReport | None = None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # if it has ended, that shows below
            pickle.dump((options, target), process.stdin)
        while True:
            late = threading.Event()
            answer = _answer(process, process.stdout, None if report is None else seconds, late)
            if answer is None:
                break
            if isinstance(answer, AttnOpsError):
                raise answer
            report = answer
            yield report
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    if report is None:
        raise AttnOpsError(
            f"{target}: the compiler's process ended before it planned the call (status {process.returncode})."
        )
    if late.is_set():
        assert seconds is not None
        yield report.abandoned(f"given up after {seconds:g} s (--timeout)")
    elif report.pending:
        yield report.abandoned(f"the compiler's process ended (status {process.returncode})")


def _answer(process: subprocess.Popen[bytes], pipe: Any, seconds: float | None, late: threading.Event) -> Any:
    """What the process sends next; None if it ended or was too late."""

    def end() -> None:
        late.set()
        process.kill()

    timer = None if seconds is None else threading.Timer(seconds, end)
    if timer is not None:
        timer.start()
    try:
        return pickle.load(pipe)
    except (EOFError, pickle.UnpicklingError):
        return None
    finally:
        if timer is not None:
            timer.cancel()


def main() -> None:
    """Answer one request."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output out of the answers

    def send(answer: Any) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    options, target = pickle.load(sys.stdin.buffer)
    with short_warnings():
        try:
            for report in verified(options, target):
                send(report)
        except AttnOpsError as error:
            send(error)


if __name__ == "__main__":
    # This file runs as __main__, but what it pickles needs an importable name.
    from .compile_process import main as run

    run()
