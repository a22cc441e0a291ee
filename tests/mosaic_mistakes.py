"""Mistakes planted in kernels in Mosaic GPU: Planted stands for the module whose functions they call while they are traced.

A race leaves the interpreter unusable, so each mistake has a process of its own, of a program beside the kernel's tests:
`python PROGRAM KERNEL NAME [TIMES]`. It prints 'unnoticed' for each run whose numbers are right.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

# A race, a phase that nobody has waited for, one that was missed or comes too late, arrivals that complete none, and a place that
# holds another array by now or that an array hasn't.
NOTICED = (
    "RACE DETECTED", "Barrier completed phase", "must do so in all phases", "must observe each barrier completion",
    "missed observing phase", "barrier is already at phase", "arrivals pending", "disjoint lifetimes",
    "Out-of-bounds read",
)  # fmt: skip
SECONDS = 600


class Planted:
    """The functions of Mosaic GPU, some of them replaced. names: of references and barriers; stages: places of those of tiles."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.names: dict[int, str] = {}
        self.refs: dict[str, Any] = {}
        self.changed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.changed.get(name) or getattr(plgpu, name)

    def into(self, kernel: type[Any], modules: Iterable[Any]) -> None:
        """Stand for Mosaic GPU in modules, and know the references of what a kernel's class traces."""
        for module in modules:
            module.plgpu = self
        plain = kernel.__call__

        def traced(block: Any, refs: dict[str, Any]) -> None:
            self.refs, self.names = refs, {_place(ref): key for key, ref in refs.items()}
            plain(block, refs)

        kernel.__call__ = traced

    def name(self, ref: Any) -> str:
        """A reference's name."""
        return self.names.get(_place(ref), "")

    def here(self, name: str, ref: Any) -> Any:
        """Another reference, at the place of this one."""
        other, indices = self.refs[name], next(one.indices for one in ref.transforms if hasattr(one, "indices"))
        return other.at[indices[: len(other.shape)]]

    def next(self, ref: Any) -> Any:
        """The reference's next place."""
        (slot, *rest), *parts = (one.indices for one in ref.transforms if hasattr(one, "indices"))
        moved = self.refs[self.name(ref)].at[(lax.rem(slot + 1, self.stages), *rest)]
        for part in parts:
            moved = moved.at[part]
        return moved

    # -- mistakes ----------------------------------------------------------------------------------------------------

    def nothing(self, function: str) -> None:
        """A function does nothing."""
        self.changed[function] = lambda *given: None

    def without(self, function: str, which: str) -> None:
        """Calls of a function with this barrier do nothing."""
        self.changed[function] = lambda barrier: (
            None if self.name(barrier) == which else getattr(plgpu, function)(barrier)
        )

    def wait_for(self, which: str, instead: str) -> None:
        """Waits for a barrier wait for another one."""
        self.changed["barrier_wait"] = lambda barrier: plgpu.barrier_wait(
            self.here(instead, barrier) if self.name(barrier) == which else barrier
        )

    def wait_for_next(self, which: str) -> None:
        """Waits for a barrier wait for that of the next place."""
        self.changed["barrier_wait"] = lambda barrier: plgpu.barrier_wait(
            self.next(barrier) if self.name(barrier) == which else barrier
        )

    def copy(self, target_name: str, change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> None:
        """The copies into one kind of place, changed."""

        def copy(source: Any, target: Any, barrier: Any) -> None:
            given = (source, target, barrier)
            plgpu.copy_gmem_to_smem(*(change(*given) if self.name(target) == target_name else given))

        self.changed["copy_gmem_to_smem"] = copy

    def copy_to_next(self, target_name: str) -> None:
        """Tiles are copied into the next place."""
        self.copy(target_name, lambda source, target, barrier: (source, self.next(target), barrier))

    def a_phase_ahead(self, name: str, start: str) -> None:
        """Who waits for `start` arrives once too often at a barrier before."""

        def wait(barrier: Any) -> None:
            if self.name(barrier) == start:
                for slot in range(self.stages):
                    plgpu.barrier_arrive(self.refs[name].at[slot])
            plgpu.barrier_wait(barrier)

        self.changed["barrier_wait"] = wait

    def arrivals(self, kernels: Iterable[type[Any]], name: str, count: int) -> None:
        """A barrier of so many arrivals."""
        for kernel in kernels:

            def scratch(block: Any, dtype: Any, plain: Any = kernel.scratch) -> dict[str, Any]:
                made = plain(block, dtype)
                if name not in made:
                    return made
                known = made[name]
                same = {"num_barriers": known.num_barriers, "orders_tensor_core": known.orders_tensor_core}
                return made | {name: plgpu.Barrier(num_arrivals=count, **same)}

            kernel.scratch = scratch


def _place(ref: Any) -> int:
    """What references to the same place share."""
    return id(ref.ref if hasattr(ref, "ref") else ref)


def check_noticed(program: Path, kernel: str, name: str, times: int) -> None:
    """Run a program's mistake so often: each time it is noticed; 'none' isn't."""
    for _ in range(1 if name == "none" else times):
        command = [sys.executable, program, kernel, name]
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        unnoticed = run.returncode == 0 and run.stdout.split()[-1:] == ["unnoticed"]
        noticed = "numbers" in run.stdout or any(words in run.stderr for words in NOTICED)
        assert (unnoticed, noticed) == ((True, False) if name == "none" else (False, True)), run.stderr[-2000:]
