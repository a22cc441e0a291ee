"""Run a Hopper kernel in the interpreter with a mistake planted in it: `python hopper_mutations.py KERNEL NAME [TIMES]`.

Mistakes are planted from outside, in the functions that the kernels call while they are traced. Prints 'unnoticed' for each run
whose numbers are right. A race leaves the interpreter unusable, so each mistake has a process of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnops import Causal
from attnops.operators.hopper.kernel import backward, block, forward, hopper_attention, tensor_cores
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.operands import Operands, split_static
from attnops.operators.mosaic.kernel import block as mosaic_block
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes, MosaicTiles
from attnops.verify import reference_attention, reference_gradients

Q_LEN, KV_LEN, OFFSET = 192, 224, 32
STAGES = 2


class Kernel(NamedTuple):
    """A kernel under test. start: the barrier of what each warpgroup loads for itself. loaded: the barriers of tiles, and these
    tiles."""

    sizes: MosaicSizes
    start: str
    loaded: dict[str, tuple[str, ...]]
    dims: tuple[int, int] = (64, 64)


BY_KEYS = {"key": ("key_tiles",), "value": ("value_tiles",)}
BY_ROWS = {"rows": ("query_tiles", "d_output_tiles", "lse_tiles", "delta_tiles")}
KERNELS = {
    "forward": Kernel(MosaicSizes(128, 64, STAGES), "query_full", BY_KEYS),
    "dq": Kernel(MosaicSizes(128, 64, STAGES), "rows_full", BY_KEYS),
    "dkv": Kernel(MosaicSizes(64, 128, STAGES), "keys_full", BY_ROWS),
    "divided": Kernel(MosaicSizes(64, 64, STAGES), "keys_full", BY_ROWS, (256, 64)),
}


class Planted:
    """The functions of Mosaic GPU that the kernel calls, some of them replaced. names: of references and barriers."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.refs: dict[str, Any] = {}
        self.changed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.changed.get(name) or getattr(plgpu, name)

    def name(self, ref: Any) -> str:
        return self.names.get(_place(ref), "")

    def here(self, name: str, ref: Any) -> Any:
        """Another reference, at the place of this one."""
        return self.refs[name].at[ref.transforms[-1].indices]


def _place(ref: Any) -> int:
    """What references to the same place share."""
    return id(ref.ref if hasattr(ref, "ref") else ref)


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


def _released_before_sums(name: str) -> None:
    """A place is said to be free before the last product that reads it."""
    plain = tensor_cores.Interpreted.add_values

    def add_values(self: Any, *terms: Any) -> Any:
        plgpu.barrier_arrive(PLANTED.here(f"{name}_free", terms[0][2]))
        return plain(self, *terms)

    tensor_cores.Interpreted.add_values = add_values  # type: ignore[method-assign]
    _without("barrier_arrive", f"{name}_free")


def _a_phase_ahead(name: str, start: str) -> None:
    """Each warpgroup that computes arrives once too often at a barrier, before its first wait."""

    def wait(barrier: Any) -> None:
        if PLANTED.name(barrier) == start:
            for slot in range(STAGES):
                plgpu.barrier_arrive(PLANTED.refs[name].at[slot])
        plgpu.barrier_wait(barrier)

    PLANTED.changed["barrier_wait"] = wait


def _arrivals(name: str, count: int) -> None:
    """A barrier of so many arrivals."""
    plain = block.HopperBlock.scratch
    for kernel in (forward.HopperForward, backward.HopperQueryGradient, backward.HopperKeyGradients):
        plain = kernel.scratch

        def scratch(self: Any, dtype: Any, plain: Any = plain) -> dict[str, Any]:
            made = plain(self, dtype)
            many = made[name].num_barriers if name in made else 1
            return made | {name: plgpu.Barrier(num_arrivals=count, num_barriers=many)} if name in made else made

        kernel.scratch = scratch  # type: ignore[method-assign]


def _wait_for(which: str, instead: str) -> None:
    """Waits for a barrier wait for another one."""

    def wait(barrier: Any) -> None:
        swapped = PLANTED.name(barrier) == which
        plgpu.barrier_wait(PLANTED.here(instead, barrier) if swapped else barrier)

    PLANTED.changed["barrier_wait"] = wait


def _copy(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]], target_name: str) -> None:
    """The copies into one kind of place, changed."""

    def copy(source: Any, target: Any, barrier: Any) -> None:
        given = (source, target, barrier)
        plgpu.copy_gmem_to_smem(*(change(*given) if PLANTED.name(target) == target_name else given))

    PLANTED.changed["copy_gmem_to_smem"] = copy


def _wait_for_next(which: str) -> None:
    """Waits for a barrier wait for that of the next place."""
    PLANTED.changed["barrier_wait"] = lambda barrier: plgpu.barrier_wait(
        _next(barrier) if PLANTED.name(barrier) == which else barrier
    )


def _next(ref: Any) -> Any:
    """The reference's next place."""
    slot = ref.transforms[-1].indices[0]
    return PLANTED.refs[PLANTED.name(ref)].at[lax.rem(slot + 1, STAGES)]


def _read(which: str) -> None:
    """Numbers are read from the next place."""
    plain = tensor_cores.TensorCores.numbers

    def numbers(self: Any, ref: Any, layout: Any) -> Any:
        return plain(self, _next(ref) if PLANTED.name(ref) == which else ref, layout)

    tensor_cores.TensorCores.numbers = numbers  # type: ignore[method-assign]


def _swapped(first: str, second: str) -> None:
    """Numbers of one array for those of another."""
    plain = tensor_cores.TensorCores.numbers
    other = {first: second, second: first}

    def numbers(self: Any, ref: Any, layout: Any) -> Any:
        name = PLANTED.name(ref)
        return plain(self, PLANTED.here(other[name], ref) if name in other else ref, layout)

    tensor_cores.TensorCores.numbers = numbers  # type: ignore[method-assign]


def mutations(kernel: Kernel) -> dict[str, Callable[[], None]]:
    """The mistakes of a kernel, by name."""
    made: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        f"no wait for {kernel.start}": lambda: _without("barrier_wait", kernel.start),
        "output not committed": lambda: PLANTED.changed.update(commit_smem=lambda: None),
        "reads of products not committed": lambda: _no_commit(tensor_cores),
        "copies that a warpgroup needs after one arrival fewer": lambda: _arrivals(kernel.start, 1),
    }
    if kernel.start == "query_full":  # of one copy
        del made["copies that a warpgroup needs after one arrival fewer"]
    for name, tiles in kernel.loaded.items():
        full, free = f"{name}_full", f"{name}_free"
        made |= {
            f"no wait for {full}": lambda full=full: _without("barrier_wait", full),
            f"no wait for {free}": lambda free=free: _without("barrier_wait", free),
            f"{name} released before it is read": lambda name=name: _released_early(name),
            f"{full} a phase ahead": lambda full=full: _a_phase_ahead(full, kernel.start),
            f"{free} a phase ahead": lambda free=free: _a_phase_ahead(free, kernel.start),
            f"{name} free after one arrival": lambda free=free: _arrivals(free, 1),
            f"the next place of {full} waited for": lambda full=full: _wait_for_next(full),
        }
        if len(tiles) > 1:
            made[f"{full} after one copy fewer"] = functools.partial(_arrivals, full, len(tiles) - 1)
        for one in tiles:
            made[f"{one} in the next place"] = lambda one=one: _copy(lambda a, b, c: (a, _next(b), c), one)
    last = {"query_full": "value", "rows_full": "key", "keys_full": "rows"}[kernel.start]
    made[f"{last} released before its last product"] = lambda: _released_before_sums(last)
    if last == "key":  # a place of values is filled after that of their keys, which is free only after both
        del made["value released before it is read"]
    if last == "value":
        made |= {
            "keys waited for as values": lambda: _wait_for("key_full", "value_full"),
            "values waited for as keys": lambda: _wait_for("value_full", "key_full"),
            "free keys waited for as values": lambda: _wait_for("key_free", "value_free"),
        }
    if last == "rows":
        made |= {
            "lse of the next place": lambda: _read("lse_tiles"),
            "delta of the next place": lambda: _read("delta_tiles"),
            "lse for delta": lambda: _swapped("lse_tiles", "delta_tiles"),
        }
    if divided(kernel):
        del made["the next place of rows_full waited for"]  # waits forever
        made |= {
            "the other warpgroup's keys not waited for": lambda: _without("barrier_wait", "keys_free"),
            "the other warpgroup's keys after one arrival": lambda: _arrivals("keys_free", 1),
        }
    return made


def divided(kernel: Kernel) -> bool:
    """Whether two warpgroups share keys."""
    return sum(kernel.dims) > 256


def right(which: str, kernel: Kernel) -> bool:
    """Whether the kernel's numbers are right."""
    dim, value_dim = kernel.dims
    tiles = MosaicTiles(kernel.sizes, kernel.sizes, kernel.sizes)
    part = hopper_attention.PartialHopper("bthd", dim**-0.5, None, "cuda", True, None, tiles=tiles)
    rng = np.random.default_rng(0)
    shapes = (Q_LEN, dim), (KV_LEN, dim), (KV_LEN, value_dim), (Q_LEN, value_dim)
    q, k, v, pull = (rng.standard_normal((1, n, 1, columns)).astype(jnp.bfloat16) for n, columns in shapes)
    static, dynamic = split_static(LocalMask(Causal(), 0, Q_LEN, KV_LEN, OFFSET), None)
    operands = Operands(*map(jnp.asarray, (q, k, v)), None, None)
    seen = np.arange(KV_LEN) <= np.arange(Q_LEN)[:, None] + OFFSET
    exact, known = [x.astype(np.float64) for x in (q, k, v)], {"scale": dim**-0.5, "mask": seen[None, None]}
    reference = reference_attention(*exact, **known)
    if which == "forward":
        got, want = [part.attend(static, operands, dynamic)[0]], [reference.output]
    else:
        shift = jnp.asarray(reference.lse * np.log2(np.e), jnp.float32)
        delta = jnp.asarray((reference.output * pull.astype(np.float64)).sum(-1).swapaxes(1, 2), jnp.float32)
        gradients = part.gradients(static, operands, dynamic, jnp.asarray(pull), shift, delta)
        names = ("query",) if which == "dq" else ("key", "value")
        got = [gradients.of_query()] if which == "dq" else [x for x in gradients.of_keys() if x is not None]
        of_all = reference_gradients(*exact, pull.astype(np.float64), None, **known)
        want = [of_all[name] for name in names]
    errors = [np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max() for x, y in zip(got, want, strict=True)]
    return max(errors) < 2e-2


def main(which: str, name: str, times: str = "1") -> None:
    """Plant a mistake, run, compare."""
    kernel = KERNELS[which]
    for module in (mosaic_block, block, forward, backward):
        module.plgpu = PLANTED  # type: ignore[attr-defined]
    plain = block.HopperBlock.__call__

    def traced(self: Any, refs: dict[str, Any]) -> None:
        PLANTED.refs, PLANTED.names = refs, {_place(ref): key for key, ref in refs.items()}
        plain(self, refs)

    block.HopperBlock.__call__ = traced  # type: ignore[method-assign]
    mutations(kernel)[name]()
    for _ in range(int(times)):
        print("unnoticed" if right(which, kernel) else "numbers")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
