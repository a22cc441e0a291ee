"""What the kernels in Mosaic GPU behind `paged` support, as data."""

from __future__ import annotations

from typing import Any

import jax

from ...page_layouts import LAYOUTS
from ...planning import OperationConfig, Rule
from ...planning.paged.paged_problem import PagedProblem
from ..choices.function_rules import MOSAIC_GPU, score_function_rule
from ..kernels.pages.mosaic.page_tiles import KEYS, PAGES
from ..mosaic.kernel.mosaic_sizes import DIM_STEP, padded_dim
from ..mosaic.mosaic_rules import JAX_NEEDED
from .mosaic_kernel import MosaicPages, is_quantised, pages_of_tile
from .step_reasons import BY_HEAD, POSITIONS

__all__ = ["page_rules"]

_DTYPES = ("bfloat16", "float16")


def _field(config: OperationConfig, name: str) -> Any:
    return getattr(config, name, None)


def _rows_stored(problem: PagedProblem) -> dict[str, tuple[int, int]]:
    """Of keys and of values: the columns that a page's row has from where they begin, and those that a tile loads."""
    cache, form = problem.cache.cache, LAYOUTS[problem.layout]
    kv_heads, dims = problem.local_heads[1], (problem.head_dim, problem.value_dim)
    stored = [cache.pages_shape(1, kv_heads, dim)[-1] for dim in dims]
    if form.one_array:
        stored = [stored[0], stored[0] - form.first_value(dims[0])]
    return dict(zip(("key", "value"), zip(stored, map(padded_dim, dims), strict=True), strict=True))


def _rows_fit(problem: PagedProblem) -> bool:
    """Whether the columns of tiles are there in a page's rows, and begin where TMA can."""
    first = LAYOUTS[problem.layout].first_value(problem.head_dim)
    return first % DIM_STEP == 0 and all(columns <= row for row, columns in _rows_stored(problem).values())


def _scores_drafts(problem: PagedProblem) -> bool:
    """Whether a score reads how deep the keys of a tree of drafts are."""
    parts = () if problem.score is None or "draft_tree" not in problem.features else problem.score.parts()
    return any(part.needs_positions and not part.by_query_alone for part in parts)


def page_rules(of: MosaicPages) -> tuple[Rule, ...]:
    """What a generation's kernel asks of a step."""
    return (
        BY_HEAD,
        POSITIONS,
        Rule(
            f"paged.{of.name}_score_drafts",
            "score",
            lambda p, c: not _scores_drafts(p),
            "the score {p.score} beside draft_tree reads how deep each key of the tree is, which the kernel doesn't know",
            "Nothing to change: plain XLA runs.",
        ),
        score_function_rule(f"paged.{of.name}", MOSAIC_GPU),
        Rule(
            f"paged.{of.name}_jax",
            "kernel",
            lambda p, c: jax.__version_info__ >= JAX_NEEDED,
            f"jax {jax.__version__}: what a kernel of Mosaic GPU needs is public from {'.'.join(map(str, JAX_NEEDED))} on",
            "Upgrade jax; until then plain XLA runs.",
            routes=True,
        ),
        Rule(
            "paged.kernel",
            "kernel",
            lambda p, c: _field(c, "kernel") in (None, of.name),
            lambda p, c: f"kernel={_field(c, 'kernel')!r} is declared",
            "Leave kernel out.",
        ),
        Rule(
            f"paged.{of.name}_dtype",
            "runtime_dtype",
            lambda p, c: p.runtime_dtype in _DTYPES and (is_quantised(p) or p.stored_dtype == p.runtime_dtype),
            "runtime dtype {p.runtime_dtype} over pages of {p.stored_dtype}: the kernel's products are of one 16-bit dtype",
            "Declare one of bfloat16 and float16 as runtime_dtype, and as the cache's dtype unless it is quantised.",
        ),
        Rule(
            f"paged.{of.name}_layout",
            "cache.layout",
            lambda p, c: LAYOUTS[p.layout].kernel == p.layout,
            "pages of layout {p.layout!r}: the kernel reads attnops' own layouts",
            "Declare one of these where the cache is allocated.",
        ),
        Rule(
            f"paged.{of.name}_page_size",
            "cache.page_size",
            lambda p, c: p.page_size in PAGES,
            f"pages of {{p.page_size}} tokens: a tile of {KEYS[0]} or {KEYS[1]} keys has whole pages, or a page whole tiles",
            f"Declare page_size={', '.join(map(str, PAGES))}.",
        ),
        Rule(
            f"paged.{of.name}_dim",
            "cache.head_dim",
            of.dims_fit,
            f"head_dim={{p.head_dim}}, value dim {{p.value_dim}}: {of.sizing.held} hold {of.sizing.most[0]} and "
            f"{of.sizing.most[1]}",
            "Nothing to change: plain XLA runs.",
        ),
        Rule(
            f"paged.{of.name}_rows",
            "cache.head_dim",
            lambda p, c: LAYOUTS[p.layout].kernel != p.layout or _rows_fit(p),
            f"head_dim={{p.head_dim}}, value dim {{p.value_dim}} in layout {{p.layout!r}}: the kernel loads {DIM_STEP} columns "
            "at once, and copying a cache into wider rows would cost more than it saves",
            f"Declare dims that are multiples of {DIM_STEP}, or a layout that pads them.",
        ),
        Rule(
            f"paged.{of.name}_pages",
            "pages_per_block",
            lambda p, c: _field(c, "pages_per_block") in (None, *pages_of_tile(p)),
            lambda p, c: (
                f"pages_per_block={_field(c, 'pages_per_block')} of {p.page_size} tokens: a tile has {KEYS[0]} or {KEYS[1]} keys"
            ),
            "Leave pages_per_block out.",
        ),
        Rule(
            f"paged.{of.name}_queries",
            "queries_per_block",
            lambda p, c: (
                not of.several_rows(p)
                or _field(c, "queries_per_block") in (None, *of.sizing.block_tokens(of.step_shape(p)))
            ),
            lambda p, c: (
                f"queries_per_block={_field(c, 'queries_per_block')}: the query heads of a kv head fill a tile's rows with "
                f"{' or '.join(map(str, of.sizing.block_tokens(of.step_shape(p))))} tokens"
            ),
            "Leave queries_per_block out.",
        ),
        Rule(
            f"paged.{of.name}_shared",
            "pages_per_block",
            of.fits,
            of.taken,
            "Leave pages_per_block out, or use plain XLA.",
        ),
    )
