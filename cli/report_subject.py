"""What a report is about: the mask of a call, or the batch, the cache and the plan's rows of a step over pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ..drawing.charts import Bar, bars
from ..drawing.html import folded, paragraph, pictures, rows
from ..drawing.sequences import SequenceBar, sequences
from ..planning import Plan
from ..planning.cache.cache_plan import CachePlan, array_rows, fact_rows
from ..planning.paged.page_reads import SequenceReads
from ..planning.paged.paged_plan import PagedPlan
from ..planning.selection.index_plan import IndexPlan
from ..planning.text import bytes_text
from ..scores.node import GIVEN

__all__ = ["batch", "cache", "mask"]

_MAX_TILES = 2**20


def mask(plan: Plan | IndexPlan) -> Iterator[str]:
    """The mask's structure, next to it the kernel's tiles if they are known and not too many, and the score."""
    problem = plan.problem
    q, kv = _tile(plan)
    blocks: list[tuple[int, int] | None] = [None]
    if q and kv and (problem.q_len // q + 1) * (problem.kv_len // kv + 1) <= _MAX_TILES:
        blocks.append((q, kv))
    draw = partial(problem.mask.draw, problem.q_len, problem.kv_len, query_offset=problem.query_offset or 0)
    drawn = list(dict.fromkeys(draw(block=block).svg() for block in blocks))
    if len(drawn) > 1:
        yield paragraph("The mask as declared, then in the tiles that the kernel visits.")
    yield pictures(drawn)
    if problem.score is None:
        return
    if any(array is GIVEN for array in problem.score.arrays()):
        yield paragraph(f"The score {problem.score} isn't drawn: its arrays are those of a call.")
        return
    score = problem.score.draw(
        problem.q_len, problem.kv_len, heads=problem.q_heads, query_offset=problem.query_offset or 0
    )
    yield paragraph("What the score adds to logits, for the first head.")
    yield pictures([score.svg()])


def _tile(plan: Plan | IndexPlan) -> tuple[int | None, int | None]:
    """Queries and keys of a tile, None if they aren't known."""
    if plan.route is not None:
        return plan.route.tile(False)
    kernels = () if plan.runs is None else plan.runs.passes(plan.config, False)
    return next(((kernel.block_q, kernel.block_kv) for kernel in kernels if kernel.kernel), (None, None))


def batch(plan: PagedPlan, reads: Sequence[SequenceReads]) -> Iterator[str]:
    """What a layer of the step reads, sequence by sequence."""
    page, several = plan.problem.page_size, len({sequence.shard for sequence in reads}) > 1
    drawn = []
    for number, sequence in enumerate(reads):
        name = f"{number} on {sequence.shard}" if several else str(number)
        text = f"{sequence.queries} of {sequence.length}, {sequence.end_page - sequence.first_page} pages"
        drawn.append(
            SequenceBar(name, sequence.length, min(sequence.first_page * page, sequence.length), sequence.queries, text)
        )
    yield paragraph("Each line: the step's own tokens, of all tokens of the sequence; the pages that a layer reads.")
    yield pictures([sequences(drawn)])
    if plan.reads is not None:
        yield rows([("reads", plan.reads.describe())])


def cache(plan: CachePlan) -> Iterator[str]:
    """Its memory against the device's, and its arrays."""
    yield paragraph(plan.describe())
    if plan.memory_limit is not None:
        text = f"{bytes_text(plan.bytes_per_device)} of {bytes_text(plan.memory_limit)}"
        yield bars([Bar("cache per device", plan.bytes_per_device, text, plan.memory_limit)])
    if plan.scalar_limit is not None:
        text = f"{bytes_text(plan.page_table_bytes)} of {bytes_text(plan.scalar_limit)} of scalar memory"
        yield bars([Bar("page table", plan.page_table_bytes, text, plan.scalar_limit)])
    yield rows(fact_rows(plan))
    yield folded("Arrays", rows([(row[0], ", ".join(row[1:])) for row in array_rows(plan)]))
