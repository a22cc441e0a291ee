"""static_cycles: what a pass of a planned call takes by the TPU compiler's schedule, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator

from .clock_worker import ClockWorker
from .generations import clock_rate
from .report import KernelCycles
from .search import Scheduled

__all__ = ["static_cycles"]


def static_cycles(scheduled: Scheduled, kind: str, part: str) -> Iterator[KernelCycles]:
    """Compile each kernel once more, in a process that reads its schedule. kind: of the device; part: 'forward' or 'backward'."""
    compiled, fields, kernels = scheduled
    for name, whole in kernels.items():
        worker = ClockWorker(name)
        try:
            outcome = worker.ask(kind, compiled, part, fields)
        finally:
            worker.close()
        if outcome.cycles is None:
            yield KernelCycles(name, None, None, outcome.failure)
        else:
            cycles = whole(outcome.cycles)
            yield KernelCycles(name, cycles, cycles / clock_rate(kind))
