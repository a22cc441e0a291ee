"""Run the Blackwell kernel over pages in the interpreter with a mistake planted in it: see tests/mosaic_mistakes.py. Those of its
roles are the forward kernel's."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "blackwell")]
import jax
import paged_batches as batches
from forward_mutations import LAST, PLANTED, STAGES
from forward_mutations import mutations as of_roles
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_pages_runs import run
from page_mistakes import right_written, widening, writing
from paged_batches import PagedCase

from attnops.operators.blackwell.kernel import roles
from attnops.operators.kernels.pages.mosaic import blackwell_pages, page_block, page_widening
from attnops.operators.kernels.pages.mosaic.blackwell_pages import BlackwellPages
from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep, PageTiles
from attnops.operators.mosaic.kernel import block

STEP = PageStep(PageTiles(64, STAGES, lines=128), PageTiles(64, STAGES, 2, lines=128), 0, 0)
OF_LATENTS = PageStep(*[PageTiles(64, STAGES, lines=128, column_blocks=2, held=256)] * 2, 0, 0)
OF_QUANTISED = PageStep(*[PageTiles(64, STAGES, stored=2, lines=128)] * 2, 0, 0)
KEYS = 330  # four tiles that all rows see, two that the mask or the sequence's end cuts
# One softmax, whose tiles take turns; two, with 128 rows each.
CASES = {
    "few": (PagedCase("speculate", (2, 1), dtype="bfloat16", page=32, tree=3), ((3, KEYS),)),
    "chunks": (PagedCase("prefill", (8, 1), dtype="bfloat16", page=32, tree=32), ((32, KEYS),)),
    "write": (PagedCase("decode", (2, 2), dtype="bfloat16", page=32), ()),
    "latents": (PagedCase("decode", (16, 1), (576, 512), dtype="bfloat16", page=32, latent=True), ((1, 200),)),
    "int8": (
        PagedCase("speculate", (2, 1), dtype="bfloat16", page=32, quantised="int8", scale="token_head"),
        ((3, KEYS),),
    ),
}


def _method(name: str, changed: Callable[[Any], Any]) -> None:
    """A method of the kernel, changed."""
    setattr(BlackwellPages, name, changed(getattr(BlackwellPages, name)))


def _next_tiles_pages(plain: Any) -> Any:
    return lambda self, refs, unit, tile, copy: plain(self, refs, unit, tile + (copy == 1), copy)


def _all_visible(plain: Any) -> Any:
    def visible(self: Any, refs: Any, unit: Any, tile: Any, rows: Any, limits: Any, keys: Any) -> Any:
        return plain(self, refs, unit, tile, rows, (limits[0] * 0, limits[1] * 0 + KEYS), keys)

    return visible


def _visible_as_the_next(plain: Any) -> Any:
    def visible(self: Any, refs: Any, unit: Any, tile: Any, rows: Any, limits: Any, keys: Any) -> Any:
        return plain(self, refs, unit, tile, rows, limits, (32 - keys[0], keys[1]))

    return visible


def _drafts_by_neighbours(plain: Any) -> Any:
    return lambda self, words, rows, number: plain(self, words, rows, number + 1)


def _whole_first_tile(plain: Any) -> Any:
    return lambda self, refs, work, number, masked: plain(self, refs, work, number + STAGES, masked)


def _without_value_scales(plain: Any) -> Any:
    return lambda *given: [dataclasses.replace(tile, value_scale=lambda: None) for tile in plain(*given)]


def _other_part(plain: Any) -> Any:
    def work(self: Any, refs: dict[str, Any]) -> Any:
        made = plain(self, refs)
        return made._replace(part=1 - made.part)

    return work


def _with_first_columns(plain: Any) -> Any:
    def zero_hidden(self: Any, *given: Any) -> None:
        part = BlackwellPages.columns_block
        BlackwellPages.columns_block = lambda self: 0
        plain(self, *given)
        BlackwellPages.columns_block = part

    return zero_hidden


def _scales_released_early() -> None:
    """Softmaxes say nothing of the scales that they have read, and nobody waits for it."""
    _method("weighed", lambda plain: lambda *given: None)
    for name in ("key_free", "value_free"):
        PLANTED.arrivals((BlackwellPages,), name, 1)


def _cleaned_before_they_come() -> None:
    """The warpgroup that corrects sums doesn't wait for values."""

    def clean(plain: Any) -> Any:
        def clean(self: Any, refs: dict[str, Any], *rest: Any) -> None:
            PLANTED.changed["barrier_wait"] = lambda barrier: (
                None if PLANTED.name(barrier) == "value_full" else plgpu.barrier_wait(barrier)
            )
            plain(self, refs, *rest)
            del PLANTED.changed["barrier_wait"]

        return clean

    _method("clean", clean)


def mutations(case: str) -> dict[str, Callable[[], None]]:
    """The mistakes in a case, by name."""
    if case == "write":
        waits = ("key_own_full", "value_own_full")
        made = {f"no wait for {name}": lambda name=name: PLANTED.without("barrier_wait", name) for name in waits}
        return made | writing(BlackwellPages, PLANTED) | {"none": lambda: None}
    if case == "latents":  # of which two blocks have half of the values' columns each
        return {
            "none": lambda: None,
            "no wait for query_held": lambda: PLANTED.without("barrier_wait", "query_held"),
            "no wait for key_free": lambda: PLANTED.without("barrier_wait", "key_free"),
            "queries not committed": lambda: PLANTED.nothing("commit_tmem"),
            "the other block's output": lambda: _method("work", _other_part),
            "values of the first columns": lambda: _method("part_of_columns", lambda plain: lambda self, run: run(0)),
            "zeros over the first columns": lambda: _method("zero_hidden", _with_first_columns),
        }
    if case == "int8":  # pages are widened
        waits = ("key_full", "value_full", "key_free", "value_free", "key_raw", "value_raw")
        made = {f"no wait for {name}": lambda name=name: PLANTED.without("barrier_wait", name) for name in waits}
        return made | widening(PLANTED) | {
            "none": lambda: None,
            "scales released before they are read": _scales_released_early,
            "scales of values not multiplied": lambda: _method("parts", _without_value_scales),
        }  # fmt: skip
    return of_roles(BlackwellPages) | {
        "hidden values not cleaned": lambda: _method("zero_hidden", lambda plain: lambda *given: None),
        "values of another tile cleaned": lambda: _method("clean", _whole_first_tile),
        "values cleaned before they come": _cleaned_before_they_come,
        "a page of the next tile": lambda: _method("_page", _next_tiles_pages),
        "the bits of drafts next to them": lambda: _method("_drafts", _drafts_by_neighbours),
        "no mask by position": lambda: _method("visible", _all_visible),
        "the mask of the tile's other part": lambda: _method("visible", _visible_as_the_next),
    }


def main(which: str, name: str, times: str = "1") -> None:
    """Plant a mistake, run, compare."""
    case, sequences = CASES[which]
    LAST[0] = STEP.chunks.row_groups - 1 if which == "chunks" else 0
    PLANTED.into(BlackwellPages, (block, roles, page_block, page_widening, blackwell_pages))
    mutations(which)[name]()
    if which == "write":
        right_written(case, STEP, "blackwell", int(times))
        return
    step = {"int8": OF_QUANTISED, "latents": OF_LATENTS}.get(which, STEP)
    arrays, layout = batches.make(case, sequences, spare=0), "latent" if case.latent else "split"
    for _ in range(int(times)):
        try:
            batches.agree(case, run(case, arrays, layout, step, generation="blackwell"), batches.expect(case, arrays))
        except AssertionError:
            print("numbers")
        else:
            print("unnoticed")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
