"""The Hopper kernel behind `paged`: the rules against it for a step, what it writes, and its sizes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ...devices import GpuVariant, gpu_specs, gpu_variant
from ...page_layouts import LAYOUTS
from ...planning import OperationConfig, Rule
from ...planning.paged.paged_problem import PagedProblem
from ...scores.steps import Lookup
from ..choices.function_rules import MOSAIC_GPU, score_function_rule
from ..hopper.kernel.hopper_sizes import ROWS
from ..kernels.pages.hopper.page_tiles import (
    KEYS,
    PAGES,
    HopperStep,
    PageTiles,
    StepShape,
    block_tokens,
    head_tiles,
    hopper_step,
    own_columns,
    shared_bytes,
    shared_limit,
    writable,
)
from ..mosaic.kernel.mosaic_sizes import DIM_STEP, padded_dim
from ..mosaic.mosaic_rules import JAX_NEEDED
from .step_reasons import BY_HEAD, POSITIONS, written_first

__all__ = [
    "HOPPER_PAGES",
    "HOPPER_PAGE_RULES",
    "hopper_candidates",
    "hopper_sizes",
    "hopper_written_first",
    "several_rows",
    "step_shape",
    "step_tiles",
]

HOPPER_PAGES = frozenset({
    "causal", "sliding_window", "chunked", "logits_soft_cap", "sinks", "return_lse", "gqa", "value_dim", "latent_values",
    "draft_tree", "spans", "prefix_lengths", "quantized_kv", "score", "positions",
})  # fmt: skip
"""The features of a step that the kernel has."""

_DTYPES = ("bfloat16", "float16")
_MAX_DIM = (576, 512)  # of a key and of a value


def step_shape(problem: PagedProblem) -> StepShape:
    """What the kernel's sizes depend on, of one device."""
    dims, latent = (problem.head_dim, problem.value_dim), LAYOUTS[problem.layout].values_in_keys
    writes = problem.update == "fused" and not hopper_written_first(problem)
    rows = tuple(numbers for _, numbers in _own_columns(problem)) if writes else ()
    return StepShape(
        problem.local_tokens, *problem.local_heads, dims, problem.page_size, latent, _quantised(problem), rows
    )


def hopper_written_first(problem: PagedProblem) -> list[str]:
    """What of a step has the keys of rows of one token written before: see `written_first`; scales of tokens, which XLA gathers;
    query heads that several blocks of threads have, of which each would write; and sizes that no copy by TMA has."""
    heads, kv_heads = problem.local_heads
    quantised, size = problem.cache.cache.quantised, jnp.dtype(problem.stored_dtype).itemsize
    return (
        written_first(problem)
        + ["a scale for each token"] * (quantised is not None and quantised.scale == "token_head")
        + [f"{heads // kv_heads} query heads of a kv head"] * (head_tiles(heads // kv_heads, ROWS) > 1)
        + [f"head_dim={problem.head_dim}"] * (not writable(_own_columns(problem), size))
    )


def step_tiles(problem: PagedProblem, config: OperationConfig) -> HopperStep:
    """Every size of one device's call, by rule where the config has none."""
    names = ("pages_per_block", "queries_per_block", "kv_splits")
    return hopper_step(step_shape(problem), _gpu(problem).cores, *(getattr(config, name, None) for name in names))


def several_rows(problem: PagedProblem) -> bool:
    """Whether rows may have more tokens than fit into a tile of few."""
    return problem.max_q_len is None or problem.max_q_len > block_tokens(step_shape(problem))[0]


def hopper_sizes(problem: PagedProblem) -> OperationConfig:
    """The config with the sizes filled in. Pages of a tile stay unset where decoding rows and chunks differ in them, or a page
    has more tokens than a tile."""
    config, step = problem.config, step_tiles(problem, problem.config)
    fields: dict[str, int] = {"kv_splits": step.splits}
    keys = {step.decode.block_kv, *((step.chunks.block_kv,) if several_rows(problem) else ())}
    if getattr(config, "pages_per_block", None) is None and len(keys) == 1 and min(keys) >= problem.page_size:
        fields["pages_per_block"] = min(keys) // problem.page_size
    if several_rows(problem) and getattr(config, "queries_per_block", None) is None:
        fields["queries_per_block"] = block_tokens(step_shape(problem))[step.chunks.row_groups - 1]
    return config.with_fields(fields)


def _gpu(problem: PagedProblem) -> GpuVariant:
    """The device's figures; an H100's, if it isn't known, in the interpreter."""
    gpu = gpu_variant(problem.device_kind) or gpu_variant(gpu_specs()["h100"].kind)
    assert gpu is not None
    return gpu


def hopper_candidates(problem: PagedProblem, names: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """What a search tries of these fields; the first declares nothing and is the rule's choice."""
    ruled = step_tiles(problem, problem.config).splits
    sizes: dict[str, tuple[int, ...]] = {
        "pages_per_block": _pages_of_tile(problem),
        "queries_per_block": block_tokens(step_shape(problem)),
        "kv_splits": tuple(dict.fromkeys((ruled, ruled // 2, 2 * ruled))),
    }
    options = itertools.product(*(sizes[name] for name in names if sizes[name]))
    made = (dict(zip((name for name in names if sizes[name]), option, strict=True)) for option in options)
    return ({}, *(fields for fields in made if _fits(problem, problem.config.with_fields(fields))))


# -- rules -------------------------------------------------------------------------------------------------------------


def _field(config: OperationConfig, name: str) -> Any:
    return getattr(config, name, None)


def _quantised(problem: PagedProblem) -> bool:
    return problem.cache.cache.quantised is not None


def _own_columns(problem: PagedProblem) -> tuple[tuple[int, int], ...]:
    """What a token's key and its value have of a page's rows."""
    cache, kv_heads = problem.cache.cache, problem.local_heads[1]
    key, value = (cache.pages_shape(1, kv_heads, dim)[-1] for dim in (problem.head_dim, problem.value_dim))
    return own_columns(LAYOUTS[problem.layout], problem.head_dim, (key, value))


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


def _pages_of_tile(problem: PagedProblem) -> tuple[int, ...]:
    return tuple(keys // problem.page_size for keys in KEYS if keys % problem.page_size == 0)


def _most_shared(problem: PagedProblem, config: OperationConfig) -> tuple[PageTiles, int]:
    """(the sizes that take most shared memory, its bytes)."""
    step, shape = step_tiles(problem, config), step_shape(problem)
    used = (step.decode, step.chunks) if several_rows(problem) else (step.decode,)
    return max(((tiles, sum(shared_bytes(shape, tiles).values())) for tiles in used), key=lambda x: x[1])


def _dims_fit(problem: PagedProblem, config: OperationConfig) -> bool:
    del config
    return problem.head_dim <= _MAX_DIM[0] and problem.value_dim <= _MAX_DIM[1]


def _fits(problem: PagedProblem, config: OperationConfig) -> bool:
    return not _dims_fit(problem, config) or _most_shared(problem, config)[1] <= shared_limit()


def _gathers(problem: PagedProblem) -> bool:
    """Whether a number of a table belongs to each pair of a query and a key."""
    return problem.score is not None and Lookup.name in problem.score.step_names(problem.contiguous_positions)


def _scores_drafts(problem: PagedProblem) -> bool:
    """Whether a score reads how deep the keys of a tree of drafts are."""
    parts = () if problem.score is None or "draft_tree" not in problem.features else problem.score.parts()
    return any(part.needs_positions and not part.by_query_alone for part in parts)


HOPPER_PAGE_RULES = (
    BY_HEAD,
    POSITIONS,
    Rule(
        "paged.hopper_score_gathered",
        "score",
        lambda p, c: not _gathers(p),
        "the score {p.score} reads a table: Mosaic GPU loads tiles, not a number for each pair of a query and a key",
        "Nothing to change: plain XLA gathers them. Without learnt numbers, write it as a function of the distance.",
    ),
    Rule(
        "paged.hopper_score_drafts",
        "score",
        lambda p, c: not _scores_drafts(p),
        "the score {p.score} beside draft_tree reads how deep each key of the tree is, which the kernel doesn't know",
        "Nothing to change: plain XLA runs.",
    ),
    score_function_rule("paged.hopper", MOSAIC_GPU),
    Rule(
        "paged.hopper_jax",
        "kernel",
        lambda p, c: jax.__version_info__ >= JAX_NEEDED,
        f"jax {jax.__version__}: what a kernel of Mosaic GPU needs is public from {'.'.join(map(str, JAX_NEEDED))} on",
        "Upgrade jax; until then plain XLA runs.",
        routes=True,
    ),
    Rule(
        "paged.kernel",
        "kernel",
        lambda p, c: _field(c, "kernel") != "tpu",
        "kernel='tpu' is declared",
        "Leave kernel out.",
    ),
    Rule(
        "paged.hopper_dtype",
        "runtime_dtype",
        lambda p, c: p.runtime_dtype in _DTYPES and (_quantised(p) or p.stored_dtype == p.runtime_dtype),
        "runtime dtype {p.runtime_dtype} over pages of {p.stored_dtype}: the kernel's products are of one 16-bit dtype",
        "Declare one of bfloat16 and float16 as runtime_dtype, and as the cache's dtype unless it is quantised.",
    ),
    Rule(
        "paged.hopper_layout",
        "cache.layout",
        lambda p, c: LAYOUTS[p.layout].kernel == p.layout,
        "pages of layout {p.layout!r}: the kernel reads attnops' own layouts",
        "Declare one of these where the cache is allocated.",
    ),
    Rule(
        "paged.hopper_page_size",
        "cache.page_size",
        lambda p, c: p.page_size in PAGES,
        f"pages of {{p.page_size}} tokens: a tile of {KEYS[0]} or {KEYS[1]} keys has whole pages, or a page whole tiles",
        f"Declare page_size={', '.join(map(str, PAGES))}.",
    ),
    Rule(
        "paged.hopper_dim",
        "cache.head_dim",
        _dims_fit,
        f"head_dim={{p.head_dim}}, value dim {{p.value_dim}}: shared memory and registers hold {_MAX_DIM[0]} and {_MAX_DIM[1]}",
        "Nothing to change: plain XLA runs.",
    ),
    Rule(
        "paged.hopper_rows",
        "cache.head_dim",
        lambda p, c: LAYOUTS[p.layout].kernel != p.layout or _rows_fit(p),
        f"head_dim={{p.head_dim}}, value dim {{p.value_dim}} in layout {{p.layout!r}}: the kernel loads {DIM_STEP} columns at "
        "once, and copying a cache into wider rows would cost more than it saves",
        f"Declare dims that are multiples of {DIM_STEP}, or a layout that pads them.",
    ),
    Rule(
        "paged.hopper_pages",
        "pages_per_block",
        lambda p, c: _field(c, "pages_per_block") in (None, *_pages_of_tile(p)),
        lambda p, c: (
            f"pages_per_block={_field(c, 'pages_per_block')} of {p.page_size} tokens: a tile has {KEYS[0]} or {KEYS[1]} keys"
        ),
        "Leave pages_per_block out.",
    ),
    Rule(
        "paged.hopper_queries",
        "queries_per_block",
        lambda p, c: not several_rows(p) or _field(c, "queries_per_block") in (None, *block_tokens(step_shape(p))),
        lambda p, c: (
            f"queries_per_block={_field(c, 'queries_per_block')}: the query heads of a kv head fill a tile's rows with "
            f"{' or '.join(map(str, block_tokens(step_shape(p))))} tokens"
        ),
        "Leave queries_per_block out.",
    ),
    Rule(
        "paged.hopper_shared",
        "pages_per_block",
        _fits,
        lambda p, c: (
            f"a tile of {_most_shared(p, c)[0].block_kv} keys takes {_most_shared(p, c)[1]} bytes of shared memory, of "
            f"{shared_limit()}"
        ),
        "Leave pages_per_block out, or use plain XLA.",
    ),
)
