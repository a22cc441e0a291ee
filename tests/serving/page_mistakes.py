"""Mistakes of both kernels in Mosaic GPU over pages: in writing the step's own keys and values, and in widening numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paged_batches as batches
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_mistakes import Planted
from mosaic_pages_runs import same_pages, written
from paged_batches import PagedCase

from attnops.operators.kernels.pages.mosaic.page_block import PagesBlock
from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep

_SEQUENCES = ((1, 200), (1, 64))


def writing(kernel: type[PagesBlock], planted: Planted) -> dict[str, Callable[[], None]]:
    """Them, by name."""

    def without_waiting(*args: Any) -> None:
        planted.changed["wait_smem_to_gmem"] = lambda _: None
        copy(*args)
        del planted.changed["wait_smem_to_gmem"]

    def next_row(self: Any, refs: dict[str, Any], name: str, at: tuple[Any, Any, Any], copied: Any) -> None:
        page, head, row = at
        copy_own(self, refs, name, (page, head, row if copied is plgpu.copy_gmem_to_smem else row + 1), copied)

    copy, copy_own = kernel.copy, kernel.copy_own
    return {
        "pages loaded before they are written": lambda: setattr(kernel, "copy", without_waiting),
        "the next row of a page": lambda: setattr(kernel, "copy_own", next_row),
    }


def uncommitted(planted: Planted, after: str) -> None:
    """What is committed right after the waits for such a barrier isn't."""
    last = [""]

    def wait(barrier: Any) -> None:
        last[0] = planted.name(barrier)
        plgpu.barrier_wait(barrier)

    planted.changed["barrier_wait"] = wait
    planted.changed["commit_smem"] = lambda: None if last[0] == after else plgpu.commit_smem()


def widening(planted: Planted) -> dict[str, Callable[[], None]]:
    """Of warpgroups that widen, by name."""
    return {
        "the next place of stored keys waited for": lambda: planted.wait_for_next("key_raw"),
        "widened keys not committed": lambda: uncommitted(planted, "key_raw"),
        "widened values not committed": lambda: uncommitted(planted, "value_raw"),
    }


def right_written(case: PagedCase, step: PageStep, generation: str, times: int) -> None:
    """Print so many times whether a kernel's numbers and its pages are right."""
    arrays = batches.make(case, _SEQUENCES, spare=0)
    for _ in range(times):
        try:
            got, after = written(case, arrays, step=step, generation=generation)
            assert same_pages(after, arrays)
            batches.agree(case, got, batches.expect(case, arrays))
        except AssertionError:
            print("numbers")
        else:
            print("unnoticed")
