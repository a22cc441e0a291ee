"""Run the Hopper kernel in the interpreter with a mistake planted in it: `python hopper_mutations.py NAME`.

Mistakes are planted from outside, in the functions that the kernel calls while it is traced. Prints 'unnoticed' if the kernel
runs and its numbers are right. A race leaves the interpreter unusable, so each mistake has a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops import Causal
from attnops.operators.flash.kernel.flash_sizes import FlashSizes, TileSizes, TileSteps
from attnops.operators.hopper.kernel import forward, hopper_attention, tensor_cores
from attnops.operators.hopper.kernel.hopper_sizes import HopperSizes
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.operands import Operands, split_static

Q_LEN, KV_LEN, DIM, OFFSET = 128, 160, 64, 32  # five tiles of keys: three that all rows see, two that the mask cuts
SIZES = HopperSizes(128, 32, 2)


class Planted:
    """The functions of Mosaic GPU that the kernel calls, some of them replaced. names: of barriers, by reference."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.refs: dict[str, Any] = {}
        self.changed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.changed.get(name) or getattr(plgpu, name)

    def name(self, barrier: Any) -> str:
        return self.names[id(barrier.ref if hasattr(barrier, "ref") else barrier)]

    def here(self, name: str, barrier: Any) -> Any:
        """Another barrier, at the place of this one."""
        (place,) = barrier.transforms
        return self.refs[name].at[place.indices]


PLANTED = Planted()


def _without(function: str, which: str) -> None:
    """Calls of a function with this barrier do nothing."""
    PLANTED.changed[function] = lambda barrier: (
        None if PLANTED.name(barrier) == which else getattr(plgpu, function)(barrier)
    )


def _no_commit(module: Any) -> None:
    """A module's writes or reads aren't committed."""
    module.plgpu = SimpleNamespace(**vars(plgpu) | {"commit_smem": lambda: None})


def _released_early(name: str) -> None:
    """A place is said to be free once it is full, before it is read."""

    def wait(barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        if PLANTED.name(barrier) == f"{name}_full":
            plgpu.barrier_arrive(PLANTED.here(f"{name}_free", barrier))

    PLANTED.changed["barrier_wait"] = wait
    _without("barrier_arrive", f"{name}_free")


def _a_phase_ahead(name: str) -> None:
    """Each warpgroup that computes arrives once too often at a barrier, before its first wait."""

    def wait(barrier: Any) -> None:
        if PLANTED.name(barrier) == "query_full":
            for slot in range(SIZES.stages):
                plgpu.barrier_arrive(PLANTED.refs[name].at[slot])
        plgpu.barrier_wait(barrier)

    PLANTED.changed["barrier_wait"] = wait


def _one_arrival() -> None:
    """A place is free once one of the two warpgroups has read it."""
    plain = plgpu.Barrier
    hopper_attention.plgpu = SimpleNamespace(
        **vars(plgpu) | {"Barrier": lambda num_arrivals=1, num_barriers=1: plain(num_barriers=num_barriers)}
    )


def _wait_for(which: str, instead: str) -> None:
    """Waits for a barrier wait for another one."""

    def wait(barrier: Any) -> None:
        swapped = PLANTED.name(barrier) == which
        plgpu.barrier_wait(PLANTED.here(instead, barrier) if swapped else barrier)

    PLANTED.changed["barrier_wait"] = wait


def _copy(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]], which: str) -> None:
    """The copies that one kind of barrier waits for, changed."""

    def copy(source: Any, target: Any, barrier: Any) -> None:
        given = (source, target, barrier)
        plgpu.copy_gmem_to_smem(*(change(*given) if PLANTED.name(barrier) == which else given))

    PLANTED.changed["copy_gmem_to_smem"] = copy


def _slots(change: Callable[[Any], Any], function: str, which: str) -> None:
    """The place of a barrier in some calls, changed."""

    def call(barrier: Any) -> None:
        if PLANTED.name(barrier) == which:
            (place,) = barrier.transforms
            (slot,) = place.indices
            barrier = PLANTED.refs[which].at[change(slot)]
        getattr(plgpu, function)(barrier)

    PLANTED.changed[function] = call


def _next(slot: Any) -> Any:
    return lax.rem(slot + 1, SIZES.stages)


def _next_slot(source: Any, target: Any, barrier: Any) -> tuple[Any, Any, Any]:
    (place,) = barrier.transforms
    name = "key_tiles" if PLANTED.name(barrier) == "key_full" else "value_tiles"
    return source, PLANTED.refs[name].at[_next(place.indices[0])], barrier


MUTATIONS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    **{f"no wait for {name}": lambda name=name: _without("barrier_wait", name) for name in (
        "query_full", "key_full", "value_full", "key_free", "value_free",
    )},
    "keys released before they are read": lambda: _released_early("key"),
    "values released before they are read": lambda: _released_early("value"),
    **{f"{name} a phase ahead": lambda name=name: _a_phase_ahead(name) for name in (
        "key_full", "value_full", "key_free", "value_free",
    )},
    "keys and values free after one arrival": _one_arrival,
    "output not committed": lambda: PLANTED.changed.update(commit_smem=lambda: None),
    "reads of products not committed": lambda: _no_commit(tensor_cores),
    "keys waited for as values": lambda: _wait_for("key_full", "value_full"),
    "values waited for as keys": lambda: _wait_for("value_full", "key_full"),
    "free keys waited for as values": lambda: _wait_for("key_free", "value_free"),
    "keys in the next place": lambda: _copy(_next_slot, "key_full"),
    "values in the next place": lambda: _copy(_next_slot, "value_full"),
    "the next place of keys waited for": lambda: _slots(_next, "barrier_wait", "key_full"),
    "the next place of values waited for": lambda: _slots(_next, "barrier_wait", "value_full"),
}  # fmt: skip


def main(name: str) -> None:
    """Plant a mistake, run, compare."""
    forward.plgpu = PLANTED
    plain = forward.HopperForward.__call__

    def traced(self: Any, refs: dict[str, Any]) -> None:
        PLANTED.refs, PLANTED.names = refs, {id(ref): key for key, ref in refs.items()}
        plain(self, refs)

    forward.HopperForward.__call__ = traced  # type: ignore[method-assign]
    MUTATIONS[name]()
    size = TileSizes(64, 64, 4, 1)
    kernel = hopper_attention.PartialHopper(
        "bthd", DIM**-0.5, None, FlashSizes(size, size, size, 1, False, TileSteps()), "cuda", True, None, tiles=SIZES
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, DIM)).astype(jnp.bfloat16) for n in (Q_LEN, KV_LEN, KV_LEN))
    mask = LocalMask(Causal(), 0, Q_LEN, KV_LEN, OFFSET)
    static, dynamic = split_static(mask, None)
    output, _ = kernel.attend(static, Operands(*map(jnp.asarray, (q, k, v)), None, None), dynamic)
    q, k, v = (x[0, :, 0].astype(np.float64) for x in (q, k, v))
    seen = np.arange(KV_LEN) <= np.arange(Q_LEN)[:, None] + OFFSET
    weights = np.where(seen, np.exp(q @ k.T * DIM**-0.5), 0)
    want = weights @ v / weights.sum(1, keepdims=True)
    error = np.abs(np.asarray(output, np.float64)[0, :, 0] - want).max()
    print("unnoticed" if error < 2e-2 else f"numbers: {error}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1])
