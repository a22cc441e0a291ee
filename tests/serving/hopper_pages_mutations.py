"""Run the Hopper kernel over pages in the interpreter with a mistake planted in it: see tests/mosaic_mistakes.py."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["NPROC"] = "8"  # warpgroups wait in threads of XLA's, as many as there are cores by default
sys.path.append(str(Path(__file__).parents[1]))
import jax
import numpy as np
import paged_batches as batches
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_mistakes import Planted
from mosaic_pages_runs import expect_scored, run, with_score
from page_mistakes import right_written, uncommitted, widening, writing
from paged_batches import PagedCase

from attnops import ALiBi
from attnops.operators.hopper.kernel import tensor_cores
from attnops.operators.kernels.pages.mosaic import hopper_pages, page_block, page_tile, page_widening
from attnops.operators.kernels.pages.mosaic.hopper_pages import HopperPages
from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep, PageTiles
from attnops.operators.mosaic.kernel import block

STAGES = 2
SEQUENCES = (
    (40, 330),
)  # two warpgroups compute; four tiles that all rows see, two that the mask or the sequence's end cuts
CASE = PagedCase("prefill", (2, 1), dtype="bfloat16", page=32, tree=40)
STEP = PageStep(PageTiles(64, STAGES), PageTiles(64, STAGES, 2), 0, 0)
CASES = {
    "whole": (CASE, STEP),
    "score": (batches.varied(CASE, tree=0), STEP),
    "write": (PagedCase("decode", (2, 2), dtype="bfloat16", page=32), STEP),
    "int8": (
        batches.varied(CASE, quantised="int8", scale="token_head"),
        PageStep(PageTiles(64, STAGES, stored=2), PageTiles(64, STAGES, 2, stored=2), 0, 0),
    ),
}
PLANTED = Planted(STAGES)


def _released_early(name: str) -> None:
    """A place is said to be free once it is full, before it is read."""

    def wait(barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        if PLANTED.name(barrier) in (f"{name}_full", f"{name}_clean"):
            plgpu.barrier_arrive(PLANTED.here(f"{name}_free", barrier))

    PLANTED.changed["barrier_wait"] = wait
    PLANTED.without("barrier_arrive", f"{name}_free")


def _method(name: str, changed: Callable[[Any], Any]) -> None:
    """A method of the kernel, changed."""
    setattr(HopperPages, name, changed(getattr(HopperPages, name)))


def _next_tiles_pages(plain: Any) -> Any:
    return lambda self, refs, unit, tile, copy: plain(self, refs, unit, tile + (copy == 1), copy)


def _all_visible(plain: Any) -> Any:
    def visible(self: Any, refs: Any, unit: Any, tile: Any, rows: Any, limits: Any, keys: Any) -> Any:
        return plain(self, refs, unit, tile, rows, (limits[0] * 0, limits[1] * 0 + 330), keys)

    return visible


def _drafts_by_neighbours(plain: Any) -> Any:
    return lambda self, words, rows, number: plain(self, words, rows, number + 1)


def _scored(name: str, changed: Callable[[Any], Any]) -> None:
    """What a score reads of a tile, changed."""
    plain = getattr(page_tile.PageTile, name)
    setattr(page_tile.PageTile, name, lambda *args: changed(plain(*args)))


def _without_waits(*names: str) -> dict[str, Callable[[], None]]:
    return {f"no wait for {name}": lambda name=name: PLANTED.without("barrier_wait", name) for name in names}


def mutations(case: str) -> dict[str, Callable[[], None]]:
    """The mistakes in a case, by name."""
    made: dict[str, Callable[[], None]] = {"none": lambda: None}
    if case == "score":  # by head and distance
        return made | {
            "distances to the keys of the next tile": lambda: _scored("positions", lambda x: (x[0], x[1] + 64)),
            "the slopes' sign": lambda: _scored("dense", lambda x: -x),
        }
    if case == "write":  # the step's own keys and values
        return made | _without_waits("key_own_full", "value_own_full") | writing(HopperPages, PLANTED)
    full = ("key_full", "value_full", "key_free", "value_free", "value_raw")
    if case == "int8":  # pages are widened
        return (
            made
            | _without_waits(*full, "key_raw")
            | {
                "values released before they are read": lambda: _released_early("value"),
                "keys released before they are read": lambda: _released_early("key"),
            }
            | widening(PLANTED)
        )
    ahead = {
        f"{name} a phase ahead": lambda name=name: PLANTED.a_phase_ahead(name, "query_full")
        for name in ("value_clean", "key_free", "value_free")
    }
    return made | _without_waits(*full, "query_full", "value_clean") | ahead | {
        "keys released before they are read": lambda: _released_early("key"),
        "values released before they are read": lambda: _released_early("value"),
        "places free after one arrival": lambda: PLANTED.arrivals((HopperPages,), "value_free", 1),
        "output not committed": lambda: uncommitted(PLANTED, "value_clean"),
        "reads of products not committed": lambda: setattr(
            tensor_cores, "plgpu", SimpleNamespace(**vars(plgpu) | {"commit_smem": lambda: None})
        ),
        "values waited for as keys": lambda: PLANTED.wait_for("value_full", "key_full"),
        "clean values waited for as those that have come": lambda: PLANTED.wait_for("value_clean", "value_raw"),
        "free keys waited for as values": lambda: PLANTED.wait_for("key_free", "value_free"),
        "keys in the next place": lambda: PLANTED.copy_to_next("key_tiles"),
        "values in the next place": lambda: PLANTED.copy_to_next("value_tiles"),
        "the next place of keys waited for": lambda: PLANTED.wait_for_next("key_full"),
        "the next place of values waited for": lambda: PLANTED.wait_for_next("value_full"),
        "hidden values not cleaned": lambda: _method("zero_hidden", lambda plain: lambda *given: None),
        "a page of the next tile": lambda: _method("_page", _next_tiles_pages),
        "the bits of drafts next to them": lambda: _method("_drafts", _drafts_by_neighbours),
        "no mask by position": lambda: _method("visible", _all_visible),
    }  # fmt: skip


def main(which: str, name: str, times: str = "1") -> None:
    """Plant a mistake, run, compare."""
    case, step = CASES[which]
    PLANTED.into(HopperPages, (block, page_block, page_widening, hopper_pages))
    mutations(which)[name]()
    if which == "write":
        right_written(case, step, "hopper", int(times))
        return
    arrays = batches.make(case, SEQUENCES, spare=0)
    more, want = dict[str, Any](), batches.expect
    if which == "score":
        score = ALiBi(np.array([0.5, 0.1], np.float32))
        more, want = with_score(score), functools.partial(expect_scored, score)
    for _ in range(int(times)):
        try:
            batches.agree(case, run(case, arrays, step=step, **more), want(case, arrays))
        except AssertionError:
            print("numbers")
        else:
            print("unnoticed")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
