"""When a step over pages runs a kernel in Mosaic GPU, with which sizes, and why not."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from jax.sharding import AbstractMesh
from mosaic_plans import A100, B200, H100, H200, codes_against
from paged_batches import PagedCase

from attnops import (
    ALiBi,
    Distance,
    KVCache,
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    Temperature,
    register_score_function,
)
from attnops.compat import abstract_device
from attnops.operators.kernels.pages.mosaic.page_rows import OwnKeys, row_keys
from attnops.operators.kernels.pages.mosaic.page_sizes import BLACKWELL_SIZING, HOPPER_SIZING
from attnops.operators.kernels.pages.mosaic.page_tiles import PageTiles, StepShape, head_tiles, row_copies, rows_stored
from attnops.operators.kernels.pages.mosaic.page_units import FIELDS, chunk_tiles, own_rows, sequence_tiles, units_of
from attnops.operators.kernels.pages.paged_mask import PagedOptions
from attnops.operators.kernels.pages.paged_step import Batch
from attnops.operators.mosaic.kernel import linker
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.operators.paged.mosaic_kernel import BLACKWELL_PAGES, HOPPER_PAGES
from attnops.page_layouts import LAYOUTS
from attnops.scores import PositionTemperature

SHARED, CORES = 232448, 132  # bytes that a block of threads may request, and an H100's multiprocessors
DEVICES, PAGES = {"hopper": H100, "blackwell": B200}, {"hopper": HOPPER_PAGES, "blackwell": BLACKWELL_PAGES}
REAL = jax.__version_info__ >= JAX_NEEDED


@register_score_function("tests.hopper_pages.sine")
def _sine(distance: Any) -> Any:
    return jnp.sin(distance.astype(jnp.float32))


def _plan(
    kind: str = H100,
    *,
    tokens: int = 32,
    heads: int = 32,
    config: dict[str, Any] | None = None,
    operation: str = "paged",
    call: dict[str, Any] | None = None,
    sizes: dict[str, int] | None = None,
    metadata: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    if "cache" in fields:
        fields["kind"] = fields.pop("cache")
    cache = KVCache(**{
        "layers": 1, "kv_heads": 8, "head_dim": 128, "page_size": 16, "pages": 4096, "max_sequences": 32, "max_length": 8192,
    } | fields)  # fmt: skip
    sizes = sizes or {"tp": 1}
    mesh = AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        abstract_device=abstract_device(kind, int(np.prod([*sizes.values()])), "gpu"),
    )
    declared = OperationMetadata(
        mesh=mesh, tuning="off", operation_configs={operation: config or {}}, **(metadata or {})
    )
    query = jax.ShapeDtypeStruct((tokens, heads, cache.head_dim), jnp.dtype(cache.dtype))
    own = [jax.ShapeDtypeStruct((tokens, cache.kv_heads, cache.head_dim), query.dtype), None]
    if not cache.values_in_keys:
        own[1] = jax.ShapeDtypeStruct((tokens, cache.kv_heads, cache.value_size), query.dtype)
    given = {"max_q_len": 1} | ({"softmax_scale": 0.1} if cache.values_in_keys else {}) | (call or {})
    return OperationRegistry.create(operation, declared).plan(query, *own, cache=cache, **given)


def _codes(plan: Any, generation: str = "hopper") -> set[str]:
    """Why the kernel doesn't run."""
    return codes_against(plan, f"forward_{generation}")


@pytest.mark.skipif(REAL, reason="this jax has what the kernel needs")
@pytest.mark.parametrize("fallback", ["warn", "error"])
@pytest.mark.parametrize("generation", DEVICES)
def test_an_older_jax_is_the_reason_for_plain_xla(generation: str, fallback: str) -> None:
    plan = _plan(DEVICES[generation], metadata={"fallback": fallback})
    codes = {f"paged.{generation}_jax"}
    assert (plan.kind, plan.method, _codes(plan, generation)) == ("routed", "forward_native", codes)


@pytest.mark.parametrize("kind", [A100])
def test_other_gpus_do_not_ask_it(kind: str) -> None:
    plan = _plan(kind)
    assert (plan.kind, plan.method, plan.rejected) == ("native", "forward_native", ())


LATENT: dict[str, Any] = {"cache": "latent", "kv_heads": 1, "head_dim": 576, "value_dim": 512}
RUNS: dict[str, dict[str, Any]] = {
    "split": {},
    "h200": {"kind": H200},
    "heads": {"layout": "heads"},
    "joined": {"layout": "joined", "head_dim": 64},
    "interleaved": {"layout": "interleaved"},
    "packed, padded to whole lanes": {"layout": "packed", "head_dim": 80},
    "other dims": {"head_dim": 192, "value_dim": 128, "layout": "heads"},
    "latents": LATENT | {"heads": 128},
    "float16": {"dtype": "float16"},
    "int8": {"quantised": {"dtype": "int8", "scale": "token_head"}},
    "fp8": {"quantised": {"dtype": "float8_e4m3fn", "scale": "head"}, "head_dim": 64, "call": {"max_q_len": None}},
    "int8 latents": LATENT | {"heads": 128, "quantised": {"dtype": "int8", "scale": "token_head"}},
    "large pages": {"page_size": 256},
    "mixed": {"call": {"max_q_len": None}, "tokens": 512},
    "chains": {"call": {"max_q_len": 4}, "tokens": 128},
    "features": {"call": {"sliding_window": (100, 0), "logits_soft_cap": 5.0, "return_lse": True}},
    "sinks": {"call": {"softmax_aux": jax.ShapeDtypeStruct((32,), "float32")}},
    "split pages": {
        "sizes": {"sp": 2},
        "page_sequence_axis": "sp",
        "call": {"max_q_len": None, "sliding_window": (100, 0)},
    },
    "trees": {"call": {"draft_tree": jax.ShapeDtypeStruct((32, 4, 4), "bool"), "max_q_len": 4}},
    "spans": {
        "call": {
            "spans": jax.ShapeDtypeStruct((32, 2), "int32"),
            "prefix_lengths": jax.ShapeDtypeStruct((32,), "int32"),
        }
    },
    "distances": {"call": {"score": ALiBi()}},
    "buckets": {"call": {"score": RelativeBias(np.ones((32, 32), np.float32))}},
    "positions": {
        "call": {
            "score": PositionTemperature(),
            "q_positions": jax.ShapeDtypeStruct((32,), "int32"),
            "draft_tree": jax.ShapeDtypeStruct((32, 4, 4), "bool"),
            "max_q_len": 4,
        }
    },
    "temperatures of drafts": {
        "call": {
            "score": Temperature(np.ones(32, np.float32)),
            "draft_tree": jax.ShapeDtypeStruct((32, 4, 4), "bool"),
            "max_q_len": 4,
        }
    },
    "split heads": {"sizes": {"tp": 4}, "kv_head_axis": "tp"},
    "declared": {"config": {"kernel": "hopper", "pages_per_block": 8, "kv_splits": 0}},
}
SMALLER = {"heads": 32, "head_dim": 288, "value_dim": 256}
BLACKWELL_RUNS = {name: given for name, given in RUNS.items() if "kind" not in given} | {
    "smaller latents": LATENT | SMALLER,
    "latents with smaller values": LATENT | {"heads": 128, "value_dim": 256},
    "smaller int8 latents": RUNS["int8 latents"] | SMALLER,
    "declared": {"config": {"kernel": "blackwell", "pages_per_block": 4, "kv_splits": 0}},
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(("generation", "name"), [
    *(("hopper", name) for name in RUNS), *(("blackwell", name) for name in BLACKWELL_RUNS)
])  # fmt: skip
def test_what_it_runs(generation: str, name: str) -> None:
    given = RUNS[name] if generation == "hopper" else {"kind": B200} | BLACKWELL_RUNS[name]
    plan, of = _plan(**given), PAGES[generation]
    assert (plan.kind, plan.method, plan.rejected) == ("platform", f"forward_{generation}", ())
    step, shape = of.step_tiles(plan.problem, plan.config), of.step_shape(plan.problem)
    chosen, several = of.step_tiles(plan.problem, plan.problem.config), of.several_rows(plan.problem)
    assert (step.decode, step.splits) == (chosen.decode, chosen.splits)  # filled in as chosen
    assert not several or step == chosen
    for tiles in (step.decode, step.chunks):
        assert sum(of.sizing.shared_bytes(shape, tiles).values()) <= SHARED
        assert tiles.consumers <= 2
    assert step.decode.stages + step.decode.stored >= 2


WRITTEN = {
    "split": None,
    "joined": None,
    "packed, padded to whole lanes": None,
    "trees": "paged.fused_long_rows",
    "mixed": "paged.fused_long_rows",
    "fp8": "paged.fused_long_rows",
    "int8": "paged.fused_spans",
    "latents": "paged.fused_spans",
    "spans": "paged.fused_spans",
    "split pages": "paged.fused_spans",
}
REFUSED = {
    "paged.kernel": {"config": {"kernel": "tpu"}},
    "paged.hopper_dtype": {"dtype": "float32"},
    "paged.hopper_page_size": {"page_size": 24},
    "paged.hopper_dim": {"head_dim": 640},
    "paged.hopper_rows": {"head_dim": 80},
    "paged.hopper_pages": {"config": {"pages_per_block": 12}},
    "paged.hopper_queries": {"config": {"queries_per_block": 24}, "call": {"max_q_len": None}},
    "paged.hopper_shared": {"config": {"pages_per_block": 8}, "layout": "heads", "head_dim": 512},
    "feature.rope_dtype": LATENT
    | {
        "heads": 128,
        "quantised": {"dtype": "int8", "scale": "token_head"},
        "rope_dtype": "bfloat16",
    },
    "paged.hopper_score_drafts": {
        "call": {"score": ALiBi(), "draft_tree": jax.ShapeDtypeStruct((32, 4, 4), "bool"), "max_q_len": 4}
    },
    "paged.hopper.score_function_operation": {"call": {"score": Distance("tests.hopper_pages.sine")}},
    "feature.selected": {"call": {"selected": jax.ShapeDtypeStruct((32, 8), "int32")}},
}
BLACKWELL_REFUSED = {code.replace("hopper", "blackwell"): given for code, given in REFUSED.items()} | {
    "feature.rope_dtype": REFUSED["feature.rope_dtype"] | SMALLER,
    "paged.kernel": {"config": {"kernel": "hopper"}},
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(("generation", "code"), [
    *(("hopper", code) for code in REFUSED), *(("blackwell", code) for code in BLACKWELL_REFUSED)
])  # fmt: skip
def test_what_it_refuses(generation: str, code: str) -> None:
    given = {"kind": DEVICES[generation]} | (REFUSED if generation == "hopper" else BLACKWELL_REFUSED)[code]
    plan = _plan(**given)
    assert (plan.kind, plan.method, _codes(plan, generation)) == ("fallback", "forward_native", {code})
    refused = _plan(**(given | {"metadata": {"fallback": "error"} | given.get("metadata", {})}))
    assert refused.kind == "refused"


@pytest.mark.usefixtures("new_jax")
def test_a_layout_of_ones_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(type(LAYOUTS["split"])):  # type: ignore[misc]
        name = "backwards"

    monkeypatch.setitem(LAYOUTS, "backwards", Backwards())
    for generation, kind in DEVICES.items():
        assert _codes(_plan(kind, layout="backwards"), generation) == {f"paged.{generation}_layout"}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("name", [n for n in OperationRegistry.names() if OperationRegistry.get(n).keys_in == "pages"])
def test_every_name_of_the_operation_has_it(name: str) -> None:
    operation = OperationRegistry.get(name)
    if operation.family != "attention":
        return
    layout = operation.cache_layout or "split"
    for generation, kind in DEVICES.items():
        plan = _plan(kind, operation=name, **(LATENT if layout == "latent" else {"layout": layout}))
        assert (plan.kind, plan.method) == ("platform", f"forward_{generation}")
        assert operation.capability(plan.method).writes_pages


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(("generation", "name", "code"), [
    *(("hopper", *of) for of in WRITTEN.items()),
    *(("blackwell", *of) for of in (WRITTEN | {"smaller latents": None}).items() if of[0] in BLACKWELL_RUNS),
])  # fmt: skip
def test_which_rows_a_fused_update_writes_first(generation: str, name: str, code: str | None) -> None:
    """What the kernel writes takes shared memory; the rest is noted. Latents of 128 heads have two blocks, or of 512 columns on
    Blackwell."""
    given = RUNS[name] if generation == "hopper" else {"kind": B200} | BLACKWELL_RUNS[name]
    plan, of = _plan(**given | {"config": {"update": "fused"}}), PAGES[generation]
    found = [n.code for n in plan.notes if n.code.startswith("paged.fused")]
    assert (plan.method, found) == (f"forward_{generation}", [] if code is None else [code])
    shape = of.step_shape(plan.problem)
    taken = of.sizing.shared_bytes(shape, of.step_tiles(plan.problem, plan.config).decode)["own"]
    assert bool(shape.rows) == bool(taken) == (code != "paged.fused_spans")


@pytest.mark.usefixtures("new_jax")
def test_what_a_search_tries() -> None:
    plan = _plan(call={"max_q_len": None}, tokens=512)
    free = plan.runs.tuned_fields(plan.problem, plan.placement)
    assert free == ("pages_per_block", "queries_per_block", "kv_splits")
    (ways,) = plan.runs.candidates(plan.problem, plan.placement).values()
    assert ways[0] == {}
    assert len({tuple(way.items()) for way in ways}) == len(ways) > 6
    assert {way["pages_per_block"] for way in ways[1:]} == {4, 8}
    assert {way["queries_per_block"] for way in ways[1:]} == {16, 32}
    for way in ways:
        assert not _codes(_plan(call={"max_q_len": None}, tokens=512, config=way))


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_by_rule() -> None:
    llama = StepShape(32, 32, 8, (128, 128), 16, False)
    step = HOPPER_SIZING.step(llama, CORES)
    assert step.splits == 33  # of 8 kv heads, for two blocks a multiprocessor
    assert (step.decode.block_kv, step.decode.row_groups, step.decode.parts) == (64, 1, 1)
    assert step.chunks == PageTiles(128, 2, 2)
    assert step.chunk_splits == 33  # one tile of 32 tokens
    assert HOPPER_SIZING.step(llama._replace(tokens=8192), CORES).chunk_splits == 0
    latent = HOPPER_SIZING.step(StepShape(32, 128, 1, (576, 512), 64, True), CORES)
    assert latent.decode == latent.chunks == PageTiles(64, 2, 1, 2)
    assert latent.splits == 132


def test_sizes_for_blackwell_by_rule() -> None:
    """128 rows, and of chunks 256; as many keys and stages, a power of two, as shared and tensor memory hold."""
    llama = StepShape(32, 32, 8, (128, 128), 16, False)
    step = BLACKWELL_SIZING.step(llama, 148)
    assert step.splits == 37  # of 8 kv heads, for two blocks a multiprocessor
    assert step.decode == PageTiles(128, 2, lines=128)
    assert step.chunks == PageTiles(128, 2, 2, lines=128)
    assert BLACKWELL_SIZING.block_tokens(llama) == (32, 64)
    narrow = BLACKWELL_SIZING.step(llama._replace(dims=(64, 64)), 148)
    assert (narrow.decode.stages, narrow.chunks.stages) == (4, 4)
    wide = llama._replace(dims=(256, 256))  # two groups' sums would take all tensor memory
    assert BLACKWELL_SIZING.block_tokens(wide) == (32,)
    assert BLACKWELL_SIZING.step(wide, 148).chunks == PageTiles(64, 2, lines=128)
    latent = StepShape(
        32, 32, 1, (288, 256), 64, True
    )  # their place is free after the product with weights: two at least
    assert BLACKWELL_SIZING.step(latent, 148).decode == PageTiles(128, 2, lines=128)
    counted = BLACKWELL_SIZING.shared_bytes(latent, PageTiles(128, 2, lines=128))
    assert (counted["query"], counted["key"], counted["value"]) == (73728, 147456, 0)


def test_latents_on_blackwell_by_rule() -> None:
    """Above 256 columns of values two blocks have them, and 256 columns of a query are in tensor memory beside 256 of sums and
    two tiles of logits. 128 rows of the other 320 columns, and two tiles of 64 keys, are in shared memory."""
    latent = StepShape(32, 128, 1, (576, 512), 64, True)
    step = BLACKWELL_SIZING.step(latent, 148)
    assert step.decode == step.chunks == PageTiles(64, 2, lines=128, column_blocks=2, held=256)
    assert step.splits == 148
    counted = BLACKWELL_SIZING.shared_bytes(latent, step.decode)
    assert (counted["query"], counted["key"], counted["rows"]) == (2 * 128 * 320, 2 * 2 * 64 * 576, 4 * 4 * 128)
    assert "512 columns of tensor memory, of 512" in BLACKWELL_SIZING.taken(latent, step.decode)
    one = BLACKWELL_SIZING.step(latent._replace(dims=(576, 256)), 148)
    assert one.decode == PageTiles(64, 2, lines=128, held=256)
    assert rows_stored(16, 1, step.decode) == 128  # all rows are read
    of_int8 = BLACKWELL_SIZING.step(latent._replace(quantised=True), 148)
    assert of_int8.decode == PageTiles(64, 1, stored=1, lines=128, column_blocks=2, held=256)


def test_what_is_stored_of_quantised_pages_on_blackwell_by_rule() -> None:
    """Two widened tiles, and as many stored ones as fit; 128 rows, as warpgroups that widen leave registers for."""
    llama = StepShape(32, 32, 8, (128, 128), 16, False, True)
    step = BLACKWELL_SIZING.step(llama, 148)
    assert step.decode == step.chunks == PageTiles(64, 2, stored=4, lines=128)
    assert BLACKWELL_SIZING.block_tokens(llama) == (32,)
    assert BLACKWELL_SIZING.step(llama._replace(dims=(64, 64)), 148).decode == PageTiles(64, 2, stored=8, lines=128)
    assert BLACKWELL_SIZING.step(llama._replace(dims=(256, 256)), 148).decode == PageTiles(64, 1, stored=2, lines=128)
    counted = BLACKWELL_SIZING.shared_bytes(llama, step.decode)
    # 4 tiles of 64 keys and values of 128 bytes; scales of 4 and of 2 tiles of 64, of keys and of values
    assert (counted["stored"], counted["scales"]) == (65536, 2 * (1024 + 512))


def test_shared_memory_by_hand() -> None:
    """64 rows of a query and two stages of 64 keys and values of 128 numbers, 16 bits each; latents have keys alone, and the
    output, 64 rows of 512, in the place of the query."""
    counted = HOPPER_SIZING.shared_bytes(StepShape(32, 32, 8, (128, 128), 16, False), PageTiles(64, 2))
    assert (counted["query"], counted["key"], counted["value"], counted["output"]) == (16384, 32768, 32768, 0)
    writes = HOPPER_SIZING.shared_bytes(StepShape(32, 32, 8, (128, 320), 16, False, rows=(128, 320)), PageTiles(64, 2))
    assert (writes["own"], counted["own"]) == (512 + 1024, 0)  # in units of 512 bytes
    latent = HOPPER_SIZING.shared_bytes(StepShape(32, 128, 1, (576, 512), 64, True), PageTiles(64, 2, 1, 2))
    wide = HOPPER_SIZING.shared_bytes(StepShape(32, 16, 8, (256, 256), 16, False), PageTiles(64, 3))
    assert sum(wide.values()) == 232608  # as Mosaic says, which refuses it
    assert (latent["query"], latent["key"], latent["value"], latent["output"]) == (73728, 147456, 0, 0)
    of_int8 = HOPPER_SIZING.shared_bytes(StepShape(32, 32, 8, (128, 128), 16, False, True), PageTiles(64, 2, stored=8))
    assert (of_int8["key"], of_int8["value"], of_int8["stored"], of_int8["scales"]) == (
        32768,
        32768,
        131072,
        4096 + 1024,
    )


def test_what_is_stored_of_quantised_pages_by_rule() -> None:
    """While one widened tile is read another is written, and as many as fit are on their way."""
    llama = StepShape(32, 32, 8, (128, 128), 16, False, True)
    assert HOPPER_SIZING.step(llama, CORES).decode == PageTiles(64, 2, stored=8)
    assert HOPPER_SIZING.step(llama, CORES).chunks == PageTiles(64, 2, 2, stored=3)
    # Four warpgroups leave each thread too few registers for 256 columns of two tiles of rows.
    wide = StepShape(32, 16, 8, (256, 256), 16, False, True)
    assert (HOPPER_SIZING.block_tokens(wide), HOPPER_SIZING.step(wide, CORES).chunks.row_groups) == ((32,), 1)
    latent = HOPPER_SIZING.step(StepShape(32, 128, 1, (576, 512), 64, True, True), CORES)
    assert latent.decode == PageTiles(64, 1, 1, 2, stored=2)  # two of 64 x 576 x 2 bytes don't fit beside the query's


@pytest.mark.parametrize(
    ("group", "tiles", "tokens"), [(1, 1, 64), (4, 1, 16), (5, 1, 12), (64, 1, 1), (96, 2, 1), (71, 2, 1), (128, 2, 1)]
)
def test_rows_of_a_tile(group: int, tiles: int, tokens: int) -> None:
    assert head_tiles(group, 64) == tiles
    assert HOPPER_SIZING.block_tokens(StepShape(8, group, 1, (128, 128), 16, False))[0] == tokens
    assert rows_stored(group, 1, PageTiles(64, 2)) == math.ceil(group / tiles / 8) * 8


@pytest.mark.parametrize(
    ("numbers", "size", "copies"),
    [(64, 2, 1), (256, 2, 1), (640, 2, 5), (640, 1, 5), (576, 2, 3), (288, 2, None), (96, 1, 1)],
)
def test_copies_of_a_row(numbers: int, size: int, copies: int | None) -> None:
    """Of up to 256 numbers; several begin at multiples of 128 bytes."""
    assert row_copies(numbers, size) == copies


# -- units of work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parts", "mask"),
    [
        ("decode", 5, (True, None, None)),
        ("decode", 0, (True, 90, None)),
        ("mixed", 40, (True, 90, None)),
        ("mixed", 1, (False, 40, None)),
        ("mixed", 5, (True, None, 100)),
    ],
)
def test_units_cover_each_visible_key_once(kind: str, parts: int, mask: tuple[bool, int | None, int | None]) -> None:
    """By hand, from the mask of each row: what a row sees is in one unit of its tile, and whole tiles are seen whole."""
    causal, left, chunk = mask
    sequences = [(1, 1000), (0, 7), (1, 64), (1, 3)] if kind == "decode" else [(40, 700), (0, 0), (1, 300), (33, 33)]
    arrays = batches.make(PagedCase(page=16), sequences, width=64, spare=1)
    table, pages = arrays["page_table"], len(arrays["key_pages"])
    table[0, 3] = pages + 5  # isn't there
    options = PagedOptions(scale=1.0, causal=causal, left=left, right=None, chunk=chunk, soft_cap=None, max_q_len=None)
    q_lens = np.array([q for q, _ in sequences] + [0], np.int32)
    kv_lens = np.array([n for _, n in sequences] + [0], np.int32)
    starts = np.array([0, *np.cumsum(q_lens)[:-1]], np.int32)
    batch = Batch(jnp.asarray(starts), jnp.asarray(q_lens), jnp.asarray(kv_lens), jnp.int32(q_lens.sum()))
    selected = jnp.asarray(q_lens > 0)
    size = 1 if kind == "decode" else 16
    tiles = sequence_tiles(batch, selected, 1) if kind == "decode" else chunk_tiles(batch, selected, 80, size)[0]
    keys = row_keys(options, batch, OwnKeys(16, table.shape[1]), tiles, size)
    units = units_of(tiles, keys, jnp.asarray(table), page=16, pages=pages, block_kv=64, parts=parts)
    made = [dict(zip(FIELDS, map(int, row), strict=True)) for row in np.asarray(units.table)]
    covered: dict[tuple[int, int], list[int]] = {}
    for unit in made:
        if unit["sequence"] < 0:
            continue
        assert unit["begin"] <= unit["full"] <= unit["after_full"] <= unit["end"]
        s, first = unit["sequence"], int(tiles.token[unit["tile"]])
        rows = range(first, min(first + 16, int(q_lens[s])))
        covered.setdefault((s, first), []).extend(range(unit["begin"], unit["end"]))
        seen = np.zeros((len(rows), 1024), bool)
        for n, row in enumerate(rows):
            at, keys = kv_lens[s] - q_lens[s] + row, np.arange(1024)
            seen[n] = (keys < kv_lens[s]) & (keys >= (0 if left is None else at - left)) & ((keys <= at) | (not causal))
            seen[n] &= (keys // chunk == at // chunk) if chunk else True
            seen[n] &= np.repeat((table[s] >= 0) & (table[s] < pages), 16)
        for tile in range(unit["full"], unit["after_full"]):
            assert seen[:, 64 * tile : 64 * (tile + 1)].all()
        visible = np.flatnonzero(seen.any(0))
        assert not len(visible) or unit["first_key"] <= visible[0] <= visible[-1] < unit["end_key"]
        live = {int(key) // 64 for key in visible}
        covered.setdefault((s, first, 1), []).extend(live)  # type: ignore[arg-type]
    wanted = {(s, row) for s in range(len(sequences)) for row in range(0, int(q_lens[s]), 16)}
    assert {key for key in covered if len(key) == 2} == wanted
    for key in wanted:
        assert len(set(covered[key])) == len(covered[key])  # none twice
        assert set(covered[(*key, 1)]) <= set(covered[key])  # type: ignore[index]
    assert len(made) <= len(tiles.tokens) + parts
    firsts = [(u["tile"]) for u in made if u["sequence"] >= 0 and u["first"]]
    assert sorted(firsts) == sorted(set(firsts))
    assert len(firsts) == len(wanted)
    assert np.asarray(units.number).max() <= units.most
    longest = max(len(covered[key]) for key in wanted)
    if parts > 1:
        assert np.asarray(units.number).max() == -(
            -longest // max(4, -(-sum(len(covered[k]) for k in wanted) // parts))
        )


@pytest.mark.parametrize("parts", [0, 3, 40])
def test_one_unit_writes_the_key_of_each_row_of_one_token(parts: int) -> None:
    """The last of its rows, in a tile that isn't a whole one; not of rows of several tokens, nor to pages that aren't there."""
    sequences = [(1, 1000), (0, 7), (1, 64), (2, 90), (1, 3)]
    arrays = batches.make(PagedCase(page=16), sequences, width=64, spare=1)
    table, pages = arrays["page_table"], len(arrays["key_pages"])
    table[4, 0] = -1  # isn't there
    q_lens = np.array([q for q, _ in sequences] + [0], np.int32)
    kv_lens = np.array([n for _, n in sequences] + [0], np.int32)
    starts = np.array([0, *np.cumsum(q_lens)[:-1]], np.int32)
    batch = Batch(jnp.asarray(starts), jnp.asarray(q_lens), jnp.asarray(kv_lens), jnp.int32(q_lens.sum()))
    options = PagedOptions(scale=1.0, causal=True, left=None, right=None, chunk=None, soft_cap=None, max_q_len=2)
    tiles, table = sequence_tiles(batch, jnp.asarray(q_lens > 0), 2), jnp.asarray(table)
    keys = row_keys(options, batch, OwnKeys(16, table.shape[1]), tiles, 2)
    written = own_rows(tiles, batch, table, 16, pages)
    units = units_of(tiles, keys, table, page=16, pages=pages, block_kv=64, parts=parts, written=written)
    made = [dict(zip(FIELDS, map(int, row), strict=True)) for row in np.asarray(units.table)]
    writers = [unit for unit in made if unit["sequence"] >= 0 and unit["own"] >= 0]
    assert [(unit["sequence"], unit["own"], unit["token"]) for unit in writers] == [(0, 999, 0), (2, 63, 1)]
    for unit in writers:
        assert unit["end"] == max(x["end"] for x in made if x["tile"] == unit["tile"])
        assert unit["begin"] <= unit["own"] // 64 < unit["end"]
        assert unit["after_full"] <= unit["own"] // 64


@pytest.mark.parametrize(
    ("of", "dim", "keys", "groups"),
    [("hopper", 64, 128, 2), ("hopper", 128, 128, 2), ("hopper", 256, 64, 2), ("blackwell", 128, 128, 2)],
)
@pytest.mark.parametrize("linked", [None, ("nvidia-nvjitlink", "13.5.37")])
def test_a_linker_has_tiles_of_fewer_registers(
    of: str, dim: int, keys: int, groups: int, linked: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker, "linker", lambda: linked)
    chunks = PAGES[of].sizing.step(StepShape(400, 32, 8, (dim, dim), 16, False), CORES).chunks
    one = linked is not None and dim == 256
    assert (chunks.block_kv, chunks.row_groups) == (64 if linked else keys, 1 if one else groups)
