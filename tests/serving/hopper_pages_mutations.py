"""Run the Hopper kernel over pages in the interpreter with a mistake planted in it: `python hopper_pages_mutations.py NAME`.

Mistakes are planted from outside, in the functions that the kernel calls while it is traced. Prints 'unnoticed' if the kernel
runs and its numbers are right. A race leaves the interpreter unusable, so each mistake has a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import paged_batches as batches
from hopper_pages_runs import expect_scored, run, same_pages, with_score, written
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_batches import PagedCase

from attnops import ALiBi
from attnops.operators.hopper.kernel import tensor_cores
from attnops.operators.kernels.pages.hopper import attend, page_forward, page_tile
from attnops.operators.kernels.pages.hopper.page_tiles import HopperStep, PageTiles

STAGES = 2
STEP = HopperStep(PageTiles(64, STAGES), PageTiles(64, STAGES, 2), 0, 0)
OF_INT8 = HopperStep(PageTiles(64, STAGES, stored=2), PageTiles(64, STAGES, 2, stored=2), 0, 0)
SEQUENCES = (
    (40, 330),
)  # two warpgroups compute; four tiles that all rows see, two that the mask or the sequence's end cuts

WRITTEN = ((1, 200), (1, 64))


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


def _released_early(name: str) -> None:
    """A place is said to be free once it is full, before it is read."""

    def wait(barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        if PLANTED.name(barrier) in (f"{name}_full", f"{name}_clean"):
            plgpu.barrier_arrive(PLANTED.here(f"{name}_free", barrier))

    PLANTED.changed["barrier_wait"] = wait
    _without("barrier_arrive", f"{name}_free")


def _a_phase_ahead(name: str) -> None:
    """Each warpgroup that computes arrives once too often at a barrier, before its first wait."""

    def wait(barrier: Any) -> None:
        if PLANTED.name(barrier) == "query_full":
            for slot in range(STAGES):
                plgpu.barrier_arrive(PLANTED.refs[name].at[slot])
        plgpu.barrier_wait(barrier)

    PLANTED.changed["barrier_wait"] = wait


def _one_arrival() -> None:
    """A place is free once one of the two warpgroups has read it."""
    plain = plgpu.Barrier

    def barrier(num_arrivals: int = 1, num_barriers: int = 1) -> Any:
        return plain(num_arrivals=1 if num_arrivals == 2 else num_arrivals, num_barriers=num_barriers)

    attend.plgpu = SimpleNamespace(**vars(plgpu) | {"Barrier": barrier})


def _uncommitted(after: str) -> None:
    """What is committed right after the waits for such a barrier isn't."""
    last = [""]

    def wait(barrier: Any) -> None:
        last[0] = PLANTED.name(barrier)
        plgpu.barrier_wait(barrier)

    PLANTED.changed["barrier_wait"] = wait
    PLANTED.changed["commit_smem"] = lambda: None if last[0] == after else plgpu.commit_smem()


def _wait_for(which: str, instead: str) -> None:
    """Waits for a barrier wait for another one."""

    def wait(barrier: Any) -> None:
        swapped = PLANTED.name(barrier) == which
        plgpu.barrier_wait(PLANTED.here(instead, barrier) if swapped else barrier)

    PLANTED.changed["barrier_wait"] = wait


def _next(slot: Any) -> Any:
    return lax.rem(slot + 1, STAGES)


def _copy_to_next_place(name: str) -> None:
    """Copies go to the next place, and say that this one is filled."""

    def copy(source: Any, target: Any, barrier: Any) -> None:
        if PLANTED.name(barrier) in (f"{name}_full", f"{name}_raw"):
            place = next(x for x in target.transforms if hasattr(x, "indices"))  # beside how the place is laid out
            slot, rows, *_ = place.indices
            target = PLANTED.refs[f"{name}_tiles"].at[_next(slot), pl.ds(rows.start, rows.size)]
        plgpu.copy_gmem_to_smem(source, target, barrier)

    PLANTED.changed["copy_gmem_to_smem"] = copy


def _wait_for_next_place(which: str) -> None:
    def wait(barrier: Any) -> None:
        if PLANTED.name(barrier) == which:
            (place,) = barrier.transforms
            (slot,) = place.indices
            barrier = PLANTED.refs[which].at[_next(slot)]
        plgpu.barrier_wait(barrier)

    PLANTED.changed["barrier_wait"] = wait


def _method(name: str, changed: Callable[[Any], Any]) -> None:
    """A method of the kernel, changed."""
    setattr(page_forward.PagesForward, name, changed(getattr(page_forward.PagesForward, name)))


def _not_cleaned(plain: Any) -> Any:
    def clean(self: Any, refs: dict[str, Any], unit: Any, tile: Any, slot: Any) -> None:
        del unit, tile
        plgpu.barrier_wait(refs[f"{self.streams[-1]}_raw"].at[slot])
        plgpu.barrier_arrive(refs[f"{self.streams[-1]}_clean"].at[slot])

    del plain
    return clean


def _next_tiles_pages(plain: Any) -> Any:
    return lambda self, refs, unit, tile, copy: plain(self, refs, unit, tile + (copy == 1), copy)


def _all_visible(plain: Any) -> Any:
    return lambda self, refs, unit, tile, rows, low, high: plain(self, refs, unit, tile, rows, low * 0, high * 0 + 330)


def _drafts_by_neighbours(plain: Any) -> Any:
    return lambda self, words, rows, number: plain(self, words, rows, number + 1)


def _scored(name: str, changed: Callable[[Any], Any]) -> None:
    """What a score reads of a tile, changed."""
    plain = getattr(page_tile.PageTile, name)
    setattr(page_tile.PageTile, name, lambda *args: changed(plain(*args)))


def _without_waiting(plain: Any) -> Any:
    def copy(*args: Any) -> None:
        PLANTED.changed["wait_smem_to_gmem"] = lambda _: None
        plain(*args)
        del PLANTED.changed["wait_smem_to_gmem"]

    return copy


def _next_row(plain: Any) -> Any:
    def copy(self: Any, refs: dict[str, Any], name: str, at: tuple[Any, Any, Any], copied: Any) -> None:
        page, head, row = at
        plain(self, refs, name, (page, head, row if copied is plgpu.copy_gmem_to_smem else row + 1), copied)

    return copy


MUTATIONS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    **{f"no wait for {name}": lambda name=name: _without("barrier_wait", name) for name in (
        "query_full", "key_full", "value_full", "value_raw", "value_clean", "key_free", "value_free",
    )},
    "keys released before they are read": lambda: _released_early("key"),
    "values released before they are read": lambda: _released_early("value"),
    **{f"{name} a phase ahead": lambda name=name: _a_phase_ahead(name) for name in ("value_clean", "key_free", "value_free")},
    "places free after one arrival": _one_arrival,
    "output not committed": lambda: _uncommitted("value_clean"),
    "reads of products not committed": lambda: setattr(
        tensor_cores, "plgpu", SimpleNamespace(**vars(plgpu) | {"commit_smem": lambda: None})
    ),
    "values waited for as keys": lambda: _wait_for("value_full", "key_full"),
    "clean values waited for as those that have come": lambda: _wait_for("value_clean", "value_raw"),
    "free keys waited for as values": lambda: _wait_for("key_free", "value_free"),
    "keys in the next place": lambda: _copy_to_next_place("key"),
    "values in the next place": lambda: _copy_to_next_place("value"),
    "the next place of keys waited for": lambda: _wait_for_next_place("key_full"),
    "the next place of values waited for": lambda: _wait_for_next_place("value_full"),
    "hidden values not cleaned": lambda: _method("_clean", _not_cleaned),
    "a page of the next tile": lambda: _method("_page", _next_tiles_pages),
    "the bits of drafts next to them": lambda: _method("_drafts", _drafts_by_neighbours),
    "no mask by position": lambda: _method("_visible", _all_visible),
    # Over int8 pages, which are widened.
    "int8: none": lambda: None,
    **{f"int8: no wait for {name}": lambda name=name: _without("barrier_wait", name) for name in (
        "key_raw", "value_raw", "key_full", "value_full", "key_free", "value_free",
    )},
    "int8: values released before they are read": lambda: _released_early("value"),
    "int8: the next place of stored keys waited for": lambda: _wait_for_next_place("key_raw"),
    "int8: widened keys not committed": lambda: _uncommitted("key_raw"),
    "int8: widened values not committed": lambda: _uncommitted("value_raw"),
    # With a score by head and distance.
    "score: none": lambda: None,
    "score: distances to the keys of the next tile": lambda: _scored("positions", lambda x: (x[0], x[1] + 64)),
    "score: the slopes' sign": lambda: _scored("dense", lambda x: -x),
    # While it writes the step's own keys and values.
    "write: none": lambda: None,
    **{f"write: no wait for {name}": lambda name=name: _without("barrier_wait", name) for name in (
        "key_own_full", "value_own_full",
    )},
    "write: pages loaded before they are written": lambda: _method("_copy", _without_waiting),
    "write: the next row of a page": lambda: _method("_copy_own", _next_row),
}  # fmt: skip


def main(name: str) -> None:
    """Plant a mistake, run, compare."""
    page_forward.plgpu = PLANTED
    plain = page_forward.PagesForward.__call__

    def traced(self: Any, refs: dict[str, Any]) -> None:
        PLANTED.refs, PLANTED.names = refs, {id(ref): key for key, ref in refs.items()}
        plain(self, refs)

    page_forward.PagesForward.__call__ = traced  # type: ignore[method-assign]
    MUTATIONS[name]()
    case, step = PagedCase("prefill", (2, 1), dtype="bfloat16", page=32, tree=40), STEP
    if name.startswith("int8"):
        case, step = batches.varied(case, quantised="int8", scale="token_head"), OF_INT8
    more: dict[str, Any] = {}
    if name.startswith("score"):
        case, score = batches.varied(case, tree=0), ALiBi(np.array([0.5, 0.1], np.float32))
        more = with_score(score)
    if name.startswith("write"):
        case = PagedCase("decode", (2, 2), dtype="bfloat16", page=32)
    arrays = batches.make(case, WRITTEN if name.startswith("write") else SEQUENCES, spare=0)
    want = expect_scored(score, case, arrays) if more else batches.expect(case, arrays)
    after = None
    if name.startswith("write"):
        got, after = written(case, arrays, step=step)
    else:
        got = run(case, arrays, step=step, **more)
    try:
        batches.agree(case, got, want)
        assert after is None or same_pages(after, arrays), "other pages"
    except AssertionError as error:
        print(f"numbers: {str(error).splitlines()[0] if str(error) else np.abs(got[0] - want.output).max()}")
    else:
        print("unnoticed")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1])
