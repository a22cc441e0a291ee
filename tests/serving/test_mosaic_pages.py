"""The kernels in Mosaic GPU over pages in Pallas' interpreter, which looks for races, against the float64 reference."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from covering import covering
from paged_batches import PagedCase

from attnops import KVCache, OperationMetadata, OperationRegistry
from attnops.errors import InputError
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from mosaic_pages_runs import SEQUENCES, SIZES, check, run
from test_page_stride import joined

from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep, PageTiles
from attnops.operators.paged_cache import RaggedBatch, init

BF16: dict[str, Any] = {"dtype": "bfloat16", "page": 16}
F16: dict[str, Any] = {"dtype": "float16", "page": 16}
HELD = PageTiles(64, 2, lines=128, held=256)
TWO_BLOCKS = PageStep(*[HELD._replace(column_blocks=2)] * 2, 1, 0)
TWO_PARTS = PageStep(PageTiles(64, 2, 1, 2), PageTiles(64, 2, 1, 2), 1, 0)
# The interpreter takes seconds for each.
QUICK = [(generation, "split", PagedCase("long", (4, 1), **BF16, window=(300, 0), sinks=True)) for generation in SIZES]
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": (70, 0)},
    {"window": (None, 0), "causal": False},
    {"window": (20, 3), "causal": False},
    {"causal": False},
    {"cap": 3.0},
    {"sinks": True},
    {"window": (9, 0), "cap": 3.0, "sinks": True},
    {"chunk": 50},
    {"chunk": 70, "causal": False, "sinks": True},
)
LAYOUTS = ("split", "heads", "joined", "interleaved", "packed")
HEADS = ((2, 2), (4, 2), (5, 1), (16, 1))
EVERY = [
    ("hopper", "split", PagedCase("decode", (4, 1), **BF16, window=(70, 0), sinks=True)),
    ("blackwell", "packed", PagedCase("mixed", (4, 2), **F16, cap=3.0)),
    ("hopper", "split", PagedCase("decode", (71, 1), **BF16, sinks=True)),
    ("hopper", "split", PagedCase("mixed", (71, 1), **BF16, sinks=True)),
    ("blackwell", "split", PagedCase("decode", (140, 1), **BF16, sinks=True)),
    ("hopper", "latent", PagedCase("decode", (4, 1), (128, 64), latent=True, **BF16)),
    *((generation, layout, PagedCase(kind, heads, dtype=dtype, page=page, **FEATURES[n]))
      for generation, layout, kind, heads, dtype, page, n in covering(itertools.product(
          SIZES, LAYOUTS, SEQUENCES, HEADS, ("bfloat16", "float16"), (8, 16, 32, 64, 128, 256), range(len(FEATURES))), 2)),
    *((generation, "split", PagedCase(kind, (2, 1), dims, **BF16)) for generation, kind, dims in itertools.product(
          SIZES, ("decode", "mixed"), ((128, 128), (192, 128), (64, 128), (96, 96), (256, 256)))),
    *((generation, "latent", PagedCase(kind, (heads, 1), dims, latent=True, **BF16, **FEATURES[n]))
      for generation, kind, heads, dims, n in covering(itertools.product(
          SIZES, SEQUENCES, (5, 16, 80), ((128, 64), (192, 128), (128, 96)), range(len(FEATURES))), 2)),
]  # fmt: skip


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize(("generation", "layout", "case"), QUICK, ids=_name)
def test_agrees_with_the_reference(generation: str, layout: str, case: PagedCase) -> None:
    check(case, layout, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "layout", "case"), [x for x in EVERY if x not in QUICK], ids=_name)
def test_agrees_with_the_reference_in_every_feature(generation: str, layout: str, case: PagedCase) -> None:
    check(case, layout, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "step"),
    [
        ("hopper", PageStep(PageTiles(64, 1), PageTiles(64, 1, 1), 0, 0)),
        ("hopper", PageStep(PageTiles(128, 3), PageTiles(128, 3, 2), 3, 2)),
        ("hopper", PageStep(PageTiles(64, 4), PageTiles(64, 2, 1), 5, 3)),
        ("hopper", TWO_PARTS),
        ("blackwell", PageStep(PageTiles(64, 1, lines=128), PageTiles(64, 1, 1, lines=128), 0, 0)),
        ("blackwell", PageStep(PageTiles(128, 2, lines=128), PageTiles(128, 1, 2, lines=128), 3, 2)),
        ("blackwell", PageStep(PageTiles(64, 4, lines=128), PageTiles(64, 2, 1, lines=128), 5, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["long", "mixed"])
def test_agrees_with_any_sizes(kind: str, generation: str, step: PageStep) -> None:
    case = PagedCase(kind, (2, 1), (64, 128), **BF16, window=(300, 0), sinks=True)
    check(case, step=step, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "kind", "heads", "dims", "step"), [
    *(("hopper", kind, 16, (576, 512), TWO_PARTS) for kind in ("decode", "speculate", "mixed")),
    ("blackwell", "decode", 128, (576, 512), TWO_BLOCKS),
    ("blackwell", "mixed", 16, (576, 512), TWO_BLOCKS),
    ("blackwell", "speculate", 80, (576, 256), PageStep(*[HELD] * 2, 1, 0)),
    ("blackwell", "long", 16, (320, 320), PageStep(*[HELD._replace(column_blocks=2)] * 2, 3, 0)),
])  # fmt: skip
def test_latents_of_the_largest_dim(
    generation: str, kind: str, heads: int, dims: tuple[int, int], step: PageStep
) -> None:
    """A value's 512 columns are divided between two warpgroups, or two blocks; a query is in tensor memory in part."""
    check(PagedCase(kind, (heads, 1), dims, latent=True, **BF16), "latent", step, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_quantised_latents_of_the_largest_dim(kind: str) -> None:
    """One place of widened ones, whose next tile waits for the product with values."""
    case = PagedCase(kind, (16, 1), (576, 512), latent=True, quantised="int8", scale="token_head", **BF16)
    tiles = HELD._replace(stages=1, stored=1, column_blocks=2)
    check(case, "latent", PageStep(tiles, tiles, 1, 0), generation="blackwell")


@pytest.mark.slow
@pytest.mark.parametrize("generation", SIZES)
def test_a_decode_batch_gives_the_same_without_knowing_it(generation: str) -> None:
    check(PagedCase("decode", (4, 2), **BF16, window=(70, 0)), max_q_len=None, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("generation", SIZES)
def test_pages_that_a_window_has_left_are_not_read(generation: str, kind: str) -> None:
    """Their ids are those of padding, and what they held is NaN."""
    case = PagedCase(kind, (4, 2), **BF16, window=(30, 0))
    arrays = batches.released(case, batches.make(case, SEQUENCES[kind], spare=1))
    batches.agree(case, run(case, arrays, generation=generation), batches.expect(case, arrays))


@pytest.mark.slow
@pytest.mark.parametrize("spared", [1, 4])
@pytest.mark.parametrize("generation", SIZES)
def test_ids_out_of_range_give_no_keys(generation: str, spared: int) -> None:
    """One of a row's pages isn't there: its keys aren't seen, wherever it lies."""
    case = PagedCase("decode", (2, 1), **BF16)
    arrays = batches.make(case, ((1, 150),), spare=0)
    want = batches.expect(case, _without_page(arrays, spared))
    arrays["page_table"][0, spared] = -1 if spared % 2 else len(arrays["key_pages"])
    batches.agree(case, run(case, arrays, generation=generation), want)


def _without_page(arrays: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """The same sequence without the keys of one of its pages."""
    page = arrays["key_pages"].shape[1]
    table = np.delete(arrays["page_table"], number, axis=1)
    return arrays | {"page_table": table, "kv_lens": arrays["kv_lens"] - page}


@pytest.mark.slow
def test_queries_beyond_max_q_len_are_not_attended() -> None:
    case = PagedCase("mixed", (4, 2), **BF16)
    arrays = batches.make(case, SEQUENCES["mixed"], spare=1)
    want = batches.expect(case, arrays)
    beyond = np.arange(len(arrays["query"])) - np.repeat(
        np.append(arrays["cu_q_lens"][:4], 50), np.append(np.diff(arrays["cu_q_lens"][:5]), 3)
    )
    want.output[beyond >= 20], want.lse[beyond >= 20] = 0, -np.inf
    batches.agree(case, run(case, arrays, max_q_len=20), want)


@pytest.mark.slow
@pytest.mark.parametrize("generation", SIZES)
def test_the_operation_runs_it(generation: str) -> None:
    """A decoding step after a prefill; the same as on plain XLA, whoever writes the step's keys."""
    cache = KVCache(
        layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", page_size=16, pages=32, max_sequences=2, max_length=256
    )
    rng, plan = np.random.default_rng(0), cache.plan()
    lengths, table, outputs, after = (100, 30), [list(range(7)), [8, 9]], [], []
    tokens = {
        n: [jnp.asarray(rng.standard_normal((n, heads, 64)), jnp.bfloat16) for heads in (2, 1, 1)] for n in (128, 2)
    }
    starts = [0, lengths[0] - 1, sum(lengths) - 2]
    before = RaggedBatch.make(plan, cu_q_lens=starts, kv_lens=[n - 1 for n in lengths], page_table=table, tokens=128)
    batch = RaggedBatch.make(plan, cu_q_lens=[0, 1, 2], kv_lens=lengths, page_table=table, tokens=2)
    interpreted = {"interpret": True, "kernel": generation, "kv_splits": 1}
    for method, config in (
        ("forward_native", {}),
        (f"forward_{generation}", interpreted),
        (f"forward_{generation}", interpreted | {"update": "fused"}),
    ):
        operation = OperationRegistry.create("paged", OperationMetadata(operation_configs={"paged": config}))
        state = OperationRegistry.create("paged")(*tokens[128], state=init(cache), layer=0, batch=before).state
        step = operation(*tokens[2], state=state, layer=0, batch=batch, max_q_len=1, return_lse=True)
        assert step.plan.method == method
        outputs.append([np.asarray(x, np.float64) for x in (step.attention_outputs, step.lse)])
        after.append([np.asarray(x, np.float64) for x in (step.state.only_pages.key, step.state.only_pages.value)])
    for other in outputs[1:]:
        for got, want in zip(other, outputs[0], strict=True):
            np.testing.assert_allclose(got, want, atol=2e-2)
    for other in after[1:]:
        for got, want in zip(other, after[0], strict=True):
            np.testing.assert_array_equal(got, want)


# Drafts of one word and of two, in tiles of 16 tokens and of 128; spans and prefixes that begin before a window's first key.
VISIBLE = (
    ("split", PagedCase("speculate", (4, 2), tree=8, sinks=True, **BF16)),
    ("heads", PagedCase("mixed", (4, 1), tree=40, window=(9, 0), **BF16)),
    ("latent", PagedCase("speculate", (16, 1), (128, 64), latent=True, tree=3, chunk=50, **BF16)),
    ("split", PagedCase("mixed", (4, 2), spans=True, window=(5, 0), cap=3.0, **BF16)),
    ("packed", PagedCase("prefill", (4, 2), prefix=30, chunk=20, **F16)),
    ("interleaved", PagedCase("decode", (4, 2), spans=True, prefix=9, **BF16)),
    ("joined", PagedCase("mixed", (2, 1), spans=True, prefix=25, tree=40, window=(3, 0), sinks=True, **BF16)),
)


@pytest.mark.parametrize(
    ("generation", "layout", "case"),
    [
        pytest.param(generation, *x, marks=[pytest.mark.slow] * (i > 0 or generation != "hopper"))
        for generation in SIZES
        for i, x in enumerate(VISIBLE)
    ],
    ids=_name,
)
def test_trees_of_drafts_spans_and_prefixes(generation: str, layout: str, case: PagedCase) -> None:
    check(case, layout, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("split", PagedCase("decode", (2, 1), sinks=True, **BF16)),
        ("heads", PagedCase("mixed", (4, 2), window=(30, 0), cap=3.0, **BF16)),
        ("split", PagedCase("mixed", (4, 2), tree=40, sinks=True, dtype="bfloat16", page=8)),
        ("latent", PagedCase("speculate", (16, 1), (128, 64), latent=True, tree=3, **BF16)),
        ("split", PagedCase("prefill", (2, 1), spans=True, prefix=25, window=(3, 0), **BF16)),
        ("joined", PagedCase("mixed", (2, 1), chunk=50, causal=False, dtype="bfloat16", page=128)),
    ],
    ids=_name,
)
def test_each_device_attends_to_its_own_pages(layout: str, case: PagedCase, n: int) -> None:
    """Several devices have the pages of each sequence in turn; a short one is on the first alone."""
    arrays = batches.make(case, SEQUENCES[case.kind], spare=1)
    generation = [*SIZES][n % 2]
    one = lambda case, part, **more: run(case, part, layout, generation=generation, **more)  # noqa: E731
    batches.agree(case, joined(case, arrays, n, one), batches.expect(case, arrays))


# Every dtype and scale of pages, over each layout; a tile of two warpgroups' rows, and one whose columns two share.
QUANTISED = (
    ("split", PagedCase("decode", (4, 2), quantised="int8", scale="token_head", sinks=True, **BF16)),
    ("heads", PagedCase("mixed", (4, 2), quantised="int8", scale="head", window=(30, 0), **BF16)),
    ("joined", PagedCase("prefill", (2, 1), quantised="int8", scale="tensor", cap=3.0, **F16)),
    ("heads", PagedCase("long", (4, 1), quantised="float8_e4m3fn", scale="token_head", window=(300, 0), **BF16)),
    ("interleaved", PagedCase("speculate", (4, 2), quantised="float8_e4m3fn", scale="head", tree=8, **F16)),
    ("packed", PagedCase("mixed", (4, 2), quantised="float8_e5m2", scale="tensor", chunk=50, **BF16)),
    ("split", PagedCase("decode", (4, 2), (96, 96), quantised="float8_e5m2", scale="head", dtype="bfloat16", page=8)),
    ("split", PagedCase("mixed", (2, 1), (64, 128), quantised="int8", scale="token_head", dtype="bfloat16", page=128)),
    ("latent", PagedCase("decode", (5, 1), (128, 64), latent=True, quantised="int8", scale="tensor", **BF16)),
    ("latent", PagedCase("mixed", (16, 1), (192, 128), latent=True, quantised="int8", scale="token_head", **BF16)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("generation", "layout", "case"),
    [
        pytest.param(generation, *x, marks=[pytest.mark.slow] * (i > 0 or generation != "hopper"))
        for generation in SIZES
        for i, x in enumerate(QUANTISED)
    ],
    ids=_name,
)
def test_quantised_pages(generation: str, layout: str, case: PagedCase) -> None:
    check(case, layout, generation=generation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "step"),
    [
        ("hopper", PageStep(PageTiles(64, 1, stored=1), PageTiles(64, 1, 1, stored=1), 0, 0)),
        ("hopper", PageStep(PageTiles(128, 2, stored=1), PageTiles(128, 2, 2, stored=3), 3, 2)),
        ("hopper", PageStep(PageTiles(64, 2, 1, 2, stored=2), PageTiles(64, 3, 1, 2, stored=2), 1, 0)),
        ("blackwell", PageStep(*[PageTiles(64, 1, stored=1, lines=128)] * 2, 0, 0)),
        ("blackwell", PageStep(PageTiles(128, 4, stored=1, lines=128), PageTiles(64, 2, stored=4, lines=128), 3, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["long", "mixed"])
def test_quantised_pages_agree_with_any_sizes(kind: str, generation: str, step: PageStep) -> None:
    case = PagedCase(kind, (2, 1), (64, 128), **BF16, window=(300, 0), quantised="int8", scale="token_head")
    check(case, step=step, generation=generation)


def test_other_dtypes_are_refused() -> None:
    case = PagedCase("decode", (2, 1), page=16)
    with pytest.raises(InputError, match="wanted both in bfloat16 or float16"):
        run(case, batches.make(case, ((1, 20),)))
