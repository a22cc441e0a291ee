"""Calls of the kernels in Mosaic GPU over pages in Pallas' interpreter, which looks for races, on the arrays of paged_batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
from paged_batches import PagedCase
from paged_kernel_runs import as_rows, bits, laid_out, split

from attnops.operators.kernels.pages.mosaic.attend import PageRows, paged_attention_mosaic
from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep, PageTiles
from attnops.operators.paged_cache.logit_arrays import by_place
from attnops.planning.score_operands import captured_names
from attnops.verify.paged_reference import PagedReference, paged_reference

# (queries of the step, keys after it) of each sequence: tiles of 64 keys that end at, before and after pages; empty sequences.
SEQUENCES = {
    "decode": ((1, 150), (0, 0), (1, 9), (1, 64)),
    "long": ((1, 420), (1, 40)),
    "speculate": ((3, 139), (0, 5), (2, 2), (3, 64)),
    "prefill": ((70, 70), (0, 0), (20, 150)),
    "mixed": ((1, 70), (9, 9), (0, 12), (40, 140)),
}
MOST = {"decode": 1, "long": 1, "speculate": 3}
SIZES = {
    "hopper": PageStep(PageTiles(64, 2), PageTiles(64, 2, 2), 1, 0),
    "blackwell": PageStep(PageTiles(64, 2, lines=128), PageTiles(64, 2, 2, lines=128), 1, 0),
}

OF_QUANTISED = {
    "hopper": PageStep(PageTiles(64, 2, stored=3), PageTiles(64, 2, 2, stored=2), 1, 0),
    "blackwell": PageStep(PageTiles(64, 2, stored=3, lines=128), PageTiles(128, 2, stored=2, lines=128), 1, 0),
}


def run(
    case: PagedCase,
    arrays: dict[str, Any],
    layout: str = "split",
    step: PageStep | None = None,
    *,
    generation: str = "hopper",
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(output, lse) of the kernel."""
    static: dict[str, Any] = (
        {"max_q_len": MOST.get(case.kind), "interpret": True, "generation": generation} | case.call | more
    )
    step = step or (OF_QUANTISED if case.quantised else SIZES)[generation]
    if case.latent and generation == "blackwell":
        step = step._replace(chunks=step.chunks._replace(row_groups=1))
    static["step"] = step
    if case.latent or layout in ("packed", "joined"):
        static["value_dim"] = case.dims[1]
    output, lse, _ = paged_attention_mosaic(**laid_out(arrays, layout), **static, layout=layout)
    assert output.dtype == case.dtype
    assert lse.dtype == np.float32
    return np.asarray(output, np.float64), np.asarray(lse, np.float64)


def check(case: PagedCase, layout: str = "split", step: PageStep | None = None, **more: Any) -> None:
    """Hold a call against the reference."""
    arrays = batches.make(case, SEQUENCES[case.kind], spare=1)
    batches.agree(case, run(case, arrays, layout, step, **more), batches.expect(case, arrays))


def _captures(score: Any) -> list[np.ndarray]:
    """A score's arrays; ALiBi's own slopes are those of the operation."""
    slopes = 2.0 ** (-2.0 * np.arange(1, 5))
    return [np.asarray(slopes if x is None else x, np.float32) for x in score.arrays()]


def with_score(score: Any) -> dict[str, Any]:
    """What the kernel takes of a score."""
    steps, arrays = by_place(score, [jnp.asarray(x) for x in _captures(score)])
    return {"score": steps, "captures": arrays}


def expect_scored(score: Any, case: PagedCase, arrays: dict[str, Any]) -> PagedReference:
    """The reference with a score."""
    given = {n: x for n, x in arrays.items() if n not in ("query", "num_seqs")}
    captures = dict(zip(captured_names(score), _captures(score), strict=True))
    query, count = np.asarray(arrays["query"], np.float64), int(arrays["num_seqs"].reshape(()))
    return paged_reference(query, num_seqs=count, score=score, captures=captures, **given, **case.call)


def written(
    case: PagedCase,
    whole: dict[str, Any],
    layout: str = "split",
    step: PageStep | None = None,
    *,
    generation: str = "hopper",
    **changes: Any,
) -> tuple[tuple[np.ndarray, np.ndarray], PageRows]:
    """((output, lse), the pages after) of a call that writes rows of one token, which pages hold junk for. changes: of arrays."""
    static: dict[str, Any] = {
        "max_q_len": MOST.get(case.kind),
        "interpret": True,
        "step": step or (OF_QUANTISED if case.quantised else SIZES)[generation],
        "generation": generation,
    } | case.call
    if case.latent or layout in ("packed", "joined"):
        static["value_dim"] = case.dims[1]
    before, rows = split(case, whole)
    made = as_rows(layout, rows)
    own = PageRows(made.key, made.value)
    run = jax.jit(lambda arrays, rows: paged_attention_mosaic(**arrays, rows=rows, **static, layout=layout))
    output, lse, after = run(laid_out(before | changes, layout), own)
    return (np.asarray(output, np.float64), np.asarray(lse, np.float64)), after


def same_pages(after: PageRows, whole: dict[str, Any], layout: str = "split") -> bool:
    """Whether every number of the pages is that of a case's arrays."""
    pairs = zip(after, map(laid_out(whole, layout).get, ("key_pages", "value_pages")), strict=True)
    return all(x is want is None or (bits(x) == bits(want)).all() for x, want in pairs)
