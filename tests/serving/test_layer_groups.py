"""A cache whose layers are in groups: declared, planned, made, written and moved, each group with pages of its own."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops import ConfigError, InputError, ModelDeclaration, OperationMetadata, OperationRegistry, RefusedError
from attnops.errors import CapacityError, UnknownNameError
from attnops.operators.paged_cache import (
    CacheState,
    RaggedBatch,
    attend,
    copy,
    extract,
    init,
    insert,
    restore,
    scrub,
    shardings,
)
from attnops.planning.cache.kv_cache import KVCache, LayerGroup, layer_groups
from attnops.planning.cache.window_pages import first_visible_page, pages_of_all, pages_of_one
from attnops.planning.notes import has_note
from attnops.registry.declaration import Declaration
from attnops.registry.declaration_schema import declaration_json_schema
from attnops.serving import PagePool, PagePools
from attnops.serving.window import Window
from attnops.sharding import virtual_mesh

FIELDS: dict[str, Any] = {
    "layers": [{"layers": [0, 2], "window_tokens": 6, "pages": 12}, {"layers": [1], "pages": 20}],
    "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 4, "max_sequences": 4, "max_length": 24, "max_tokens": 8,
}  # fmt: skip
BYTES = {"layers": [{"layers": [0, 2], "window_tokens": 6}, {"layers": [1]}], "bytes_per_device": 40_000}


def cache_of(**changes: Any) -> KVCache:
    return KVCache.from_dict(FIELDS | changes)


# -- declared ----------------------------------------------------------------------------------------------------------


@st.composite
def groups_of(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int | None]]:
    """(groups as JSON, the window of each layer)."""
    windows = draw(st.lists(st.sampled_from([None, 3, 64, 1024]), min_size=1, max_size=8))
    kinds = list(dict.fromkeys(windows))
    if draw(st.booleans()) and windows == sorted(windows, key=kinds.index):
        groups: list[dict[str, Any]] = [{"layers": windows.count(kind)} for kind in kinds]
    else:
        groups = [{"layers": [n for n, window in enumerate(windows) if window == kind]} for kind in kinds]
    for group, kind in zip(groups, kinds, strict=True):
        if kind is not None or draw(st.booleans()):
            group["window_tokens"] = kind
    return groups, windows


@given(groups_of(), st.booleans())
def test_round_trip_is_exact(made: tuple[list[dict[str, Any]], list[int | None]], own_pages: bool) -> None:
    groups, windows = made
    how_many: dict[str, Any] = {"bytes_per_device": 2**20}
    if own_pages:
        how_many = {}
        groups = [group | {"pages": 64 + number} for number, group in enumerate(groups)]
    data = FIELDS | how_many | {"layers": groups}
    cache = KVCache.from_dict(data)
    assert cache.to_dict() == data
    assert KVCache.from_json(cache.to_json()) == cache
    assert hash(KVCache.from_json(cache.to_json())) == hash(cache)
    file = Declaration.from_dict({"operation": "paged", "cache": data})
    assert Declaration.from_json(file.to_json()) == file
    assert cache.layer_count == len(windows)
    assert [cache.groups[cache.group_of(n)].window_tokens for n in range(len(windows))] == windows
    plan = cache.plan(device_kind="cpu")
    assert json.loads(json.dumps(plan.to_dict()))["cache"]["layers"][0]["layers"] == groups[0]["layers"]
    assert [group["pages"] for group in plan.to_dict()["groups"]] == [part.pages for part in plan.groups]
    if own_pages:
        assert [part.pages for part in plan.groups] == [64 + number for number in range(len(groups))]


def test_groups_of_a_models_windows() -> None:
    assert layer_groups([1024, 1024, None, 1024]) == (
        LayerGroup(layers=(0, 1, 3), window_tokens=1024),
        LayerGroup(layers=(2,)),
    )
    assert layer_groups([None, None]) == (LayerGroup(layers=(0, 1)),)
    with pytest.raises(ConfigError):
        layer_groups([0])


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "gemma2", "sliding_window": 4096, "query_pre_attn_scalar": 64}, [4096, None] * 4),
        ({"model_type": "gpt_oss", "sliding_window": 128}, [128, None] * 4),
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 6}, [1024] * 5 + [None] + [1024] * 2),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 8),
        ({"model_type": "llama4_text", "attention_chunk_size": 2048, "num_local_experts": 2}, [2048, 2048, 2048, None] * 2),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)  # fmt: skip
def test_groups_of_a_models_config(config: dict[str, Any], windows: list[int | None]) -> None:
    """As transformers' modelling code has the layers; see tests/registry for each family."""
    sizes = {
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
    }
    model = ModelDeclaration.from_config(sizes | {"max_position_embeddings": 8192} | config)
    groups = model.layer_groups
    assert groups == layer_groups(windows)
    cache = cache_of(layers=[group.model_dump() for group in groups], bytes_per_device=2**24)
    assert [cache.groups[cache.group_of(n)].window_tokens for n in range(8)] == windows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": []}, "at least one group"),
        ({"layers": [3]}, r"layers\[0\] is an int"),
        ({"layers": [{"window_tokens": 3}]}, r"layers\[0\]: layers is missing"),
        ({"layers": [{"layers": 2, "window": 3, "pages": 9}]}, r"layers\[0\]: unknown field 'window'"),
        ({"layers": [{"layers": 2, "window_tokens": 0, "pages": 9}]}, r"layers\[0\]: window_tokens=0"),
        ({"layers": [{"layers": [], "pages": 9}]}, r"layers\[0\]: layers=\[\]; wanted a number of layers"),
        ({"layers": [{"layers": [0, 0], "pages": 9}]}, "list of distinct layer numbers"),
        ({"layers": [{"layers": [0, 2], "pages": 9}]}, "layer 1 of 0 to 2 is in no group"),
        ({"layers": [{"layers": [0], "pages": 9}, {"layers": [1, 0], "pages": 9}]}, "layer 0 is in two groups"),
        ({"layers": [{"layers": 1, "pages": 9}, {"layers": [1], "pages": 9}]}, "some groups have a number of layers"),
        ({"layers": [{"layers": 1, "pages": 9}, {"layers": 1}]}, r"layers\[1\] has no pages"),
        ({"layers": [{"layers": 1}, {"layers": 1}], "pages": 9}, "pages=9 for 2 groups"),
        ({"pages": 9}, r"layers\[0\].pages and pages are given"),
        ({"bytes_per_device": 9}, r"layers\[0\].pages and bytes_per_device are given"),
        ({"layers": [{"layers": 1}, {"layers": 1}]}, "neither of pages and bytes_per_device"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cache_of(**changes)


def test_a_models_groups_have_the_sizes_of_its_layers() -> None:
    """Gemma 4's local layers have heads of 256, its global ones of 512."""
    config = {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "sliding_window": 512, "hidden_size": 2304,
    }  # fmt: skip
    groups = ModelDeclaration.from_config(config).layer_groups
    found = [(group.layers, group.window_tokens, group.kv_heads, group.head_dim, group.value_dim) for group in groups]
    assert found == [((0, 1, 2, 3, 4), 512, 4, 256, 256), ((5,), None, 4, 512, 512)]
    sizes = {"kv_heads": 4, "head_dim": 256, "bytes_per_device": 1 << 24, "max_sequences": 2, "max_length": 1024}
    parts = KVCache(layers=groups, **sizes).plan().groups
    assert [part.cache.head_dim for part in parts] == [256, 512]


def test_schema() -> None:
    definitions = declaration_json_schema()["$defs"]
    own = {"kind", "kv_heads", "head_dim", "value_dim", "dtype", "states", "drafts", "snapshots", "slots"}
    assert set(definitions["LayerGroup"]["properties"]) == {"layers", "window_tokens", "pages"} | own
    assert definitions["LayerGroup"]["required"] == ["layers"]
    kinds = definitions["KVCache"]["properties"]["layers"]["anyOf"]
    assert {"type": "integer", "minimum": 1, "maximum": 2**30}.items() <= kinds[0].items()
    assert kinds[1]["items"] == {"$ref": "#/$defs/LayerGroup"}


# -- planned -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"tp": 2}, {"dp": 2, "sp": 2}])
@pytest.mark.parametrize("changes", [{}, BYTES])
def test_bytes_are_those_of_the_arrays(mesh: dict[str, int], changes: dict[str, Any]) -> None:
    quantised = {"quantised": {"dtype": "int8"}, "pages_axis": "dp", "page_sequence_axis": "sp"}
    cache = cache_of(**quantised, **changes)
    devices = virtual_mesh(mesh) if mesh else None
    plan = cache.plan(devices).require()
    state, rows = init(cache, devices), []
    for own in plan.groups:
        one = RaggedBatch.make(own, cu_q_lens=[0], kv_lens=[], page_table=[], num_seqs=0)
        rows.append(one if plan.shards == 1 else RaggedBatch.stack([one] * plan.shards))
    placed = jax.device_put(tuple(rows))
    if devices is not None:
        places = shardings(cache, devices)
        placed = jax.device_put(tuple(rows), places.batch)
        assert [x.key.sharding for x in state.layers] == [x.key for x in places.state.layers]
    arrays = jax.tree.leaves((state, placed))
    for device in devices.devices.flat if devices is not None else jax.devices()[:1]:
        held = sum(s.data.nbytes for array in arrays for s in array.addressable_shards if s.device == device)
        assert held == plan.bytes_per_device
    assert [state.layers[n].key.shape[0] for n in (0, 1)] == [part.pages for part in plan.groups]
    if changes:
        each = [part.bytes_of("key_pages", "value_pages", "key_scale", "value_scale") for part in plan.groups]
        one_more = each[1] * plan.shards * plan.sequence_shards // plan.groups[1].pages
        assert plan.bytes_per_device <= 40_000 < plan.bytes_per_device + one_more


def test_what_bytes_are_divided_into() -> None:
    """Windows have what all sequences need at most, and the others the rest; with too few bytes, all have as many pages."""
    large = cache_of(**BYTES | {"bytes_per_device": 400_000}).plan(device_kind="cpu")
    few, many = (part.pages for part in large.groups)
    assert few == pages_of_all(large.groups[0].cache, 1, 1) < many
    small = cache_of(**BYTES | {"bytes_per_device": 8_000}).plan(device_kind="cpu")
    assert small.groups[0].pages == small.groups[1].pages
    alike = cache_of(
        layers=[{"layers": 2, "window_tokens": 6}, {"layers": 1, "window_tokens": 9}], bytes_per_device=400_000
    )
    assert len({part.pages for part in alike.plan(device_kind="cpu").groups}) == 1
    assert alike.plan(device_kind="cpu").bytes_per_device > 399_000


def test_explain_says_each_group() -> None:
    plan = cache_of().plan(device_kind="cpu").require()
    text = plan.explain()
    for part in (
        "cache: 3 layers in 2 groups, 2 kv heads of 8, float32, pages of 4 tokens",
        "group 0   2 layers (0, 2), a window of 6 tokens: 12 pages, at most 4 per sequence: 72 tokens, 3 sequences of 24",
        "group 1   1 layer (1), all tokens: 20 pages: 80 tokens, 3 sequences of 24 tokens; 10.0 KiB per device",
        "tokens    72 tokens, 3 sequences of 24 tokens",
        "page table 4 x 6: 96 B, one per group",
        "key_pages[0]",
        "2 x float32[12,4,2,8]",
        "value_pages[1]",
    ):
        assert part in text, text
    assert "group 0 of 2: 2 layers with a window of 6 tokens" in plan.groups[0].explain()
    assert [array["count"] for array in plan.to_dict()["arrays"].values()] == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    with pytest.raises(InputError, match=r"plan.groups\[n\]"):
        plan["key_pages"]
    with pytest.raises(InputError, match=r"one group of layers, but the cache has 2"):
        RaggedBatch.make(plan, cu_q_lens=[0], kv_lens=[], page_table=[])
    unsaid = cache_of(max_tokens=None, layers=[{"layers": 1, "window_tokens": 6, "pages": 12}]).plan(device_kind="cpu")
    assert has_note(unsaid.notes, "cache.window_without_max_tokens")
    assert unsaid.most_pages == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pages": (3, 20)}, "group 0: 3 pages of 4 tokens; a sequence needs 4: a window of 6 tokens and a step of 8"),
        ({"pages": (4, 5)}, "group 1: 5 pages of 4 tokens; a sequence of max_length=24 needs 6"),
        ({**BYTES, "bytes_per_device": 500}, "group 0: 0 pages"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    if "pages" in changes:
        few, many = changes["pages"]
        changes = {"layers": [{"layers": 2, "window_tokens": 6, "pages": few}, {"layers": 1, "pages": many}]}
    plan = cache_of(**changes).plan(device_kind="cpu")
    assert {reason.code for reason in plan.refused} == {"pages"}
    for own in (plan, *plan.groups):  # a step over any group is refused too
        with pytest.raises(RefusedError, match=said):
            own.require()


def test_memory_is_that_of_all_groups() -> None:
    huge = [{"layers": 8, "window_tokens": 64, "pages": 2**23}, {"layers": 2, "pages": 2**24}]
    plan = cache_of(layers=huge).plan(device_kind="TPU v5 lite")
    assert [reason.code for reason in plan.refused] == ["device_memory"]


@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.sampled_from((1, 3)),
    st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), max_size=12),
)  # fmt: skip
def test_no_sequences_need_more_pages_than_planned(
    window: int, page: int, step: int, rows: int, along: int, steps: list[list[int]]
) -> None:
    """Any steps of up to `step` tokens, as a pool gives their pages out and takes them back."""
    layers = [LayerGroup(layers=1, window_tokens=window)]
    sizes = {"page_size": page, "max_sequences": rows, "max_length": 200, "max_tokens": step, "pages": 1}
    cache = KVCache(layers=layers, kv_heads=1, head_dim=8, **sizes)
    one, together = pages_of_one(cache, 1, along), pages_of_all(cache, 1, along)
    assert together <= rows * one
    pool = PagePool(together, page, window_tokens=window, sequence_shards=along)
    for row in range(rows):
        pool.alloc(row, 0)
    for counts in steps:
        left = step
        for row, count in enumerate(counts[:rows]):
            pool.append_count(row, min(left, count))
            left -= min(left, count)
        for row in range(rows):
            assert sum(page != pool.pages for page in pool.pages_of(row)) <= one
            pool.release(row)


def test_a_pool_keeps_what_a_plan_counts() -> None:
    """Both files have the rule: serving/ imports no jax, so it isn't planning's."""
    for window in (None, 1, 4, 9):
        for page in (1, 3, 4):
            for length in range(40):
                seen = length if window is None else min(length, window - 1)
                tokens = range(length - seen, length + 1)  # what a query at `length` sees
                assert (
                    first_visible_page(length, window, page)
                    == min(tokens) // page
                    == Window(window, page).first_visible_page(length)
                )


# -- made, written, moved ----------------------------------------------------------------------------------------------


def batches_of(cache: KVCache) -> tuple[RaggedBatch, ...]:
    """A row of 11 tokens, 3 of them new, and one of 2: in the window's group the first page is gone."""
    rows = {"cu_q_lens": [0, 3, 5], "kv_lens": [15, 2]}
    first, second = cache.plan(device_kind="cpu").groups
    return (
        RaggedBatch.make(first, page_table=[[12, 3, 7, 5], [0]], **rows),
        RaggedBatch.make(second, page_table=[[19, 2, 4, 6], [9]], **rows),
    )


def tokens_of(cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
    key, value = np.random.default_rng(0).standard_normal((2, 5, cache.kv_heads, cache.head_dim)).astype(np.float32)
    return key, value


def test_each_layer_is_written_in_its_groups_pages() -> None:
    cache = cache_of()
    batches, (key, value) = batches_of(cache), tokens_of(cache)
    write = jax.jit(lambda state, layer, batch: insert(state, layer, batch, key, value), static_argnums=1)
    state = init(cache)
    for layer in range(3):
        state = write(state, layer, batches[cache.group_of(layer)])
    for layer, (page, other) in enumerate(((5, 0), (6, 9), (5, 0))):
        stored = np.asarray(state.layers[layer].key)
        np.testing.assert_array_equal(stored[page, :3], key[:3])
        np.testing.assert_array_equal(stored[other, :2], key[3:])
        assert set(np.flatnonzero(stored.any((1, 2, 3)))) == {page, other}
    one = copy(state, [(5, 11)], group=0)
    np.testing.assert_array_equal(one.layers[2].key[11], state.layers[2].key[5])
    np.testing.assert_array_equal(one.layers[1].key, state.layers[1].key)
    assert not np.asarray(scrub(state, [6], group=1).layers[1].key[6]).any()
    np.testing.assert_array_equal(scrub(state, [6], group=1).layers[0].key, state.layers[0].key)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["attend", "paged", "shard_map"])
def test_on_a_mesh_and_inside_a_shard_map(way: str) -> None:
    """Two shards with the same batch give the same twice; the caller may split the heads himself."""
    axes = {"attend": {"dp": 2, "tp": 2}, "paged": {"dp": 2, "tp": 2}, "shard_map": {"tp": 2}}[way]
    cache, mesh = cache_of(), virtual_mesh(axes)
    query = np.random.default_rng(2).standard_normal((5, 4, 8)).astype(np.float32)
    key, value = tokens_of(cache)
    batches, twice = batches_of(cache), way != "shard_map"
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh if twice else None))
    pages = [{**group, "pages": 2 * group["pages"]} for group in FIELDS["layers"]]
    on_mesh = cache_of(layers=pages, max_sequences=8, max_tokens=16, pages_axis="dp") if twice else cache
    state, places = init(on_mesh, mesh), shardings(on_mesh, mesh)
    for layer, window in enumerate(((5, 0), None, (3, 0))):
        batch = batches[cache.group_of(layer)]
        alone = functools.partial(attend, sliding_window=window)
        want = jax.jit(alone, static_argnums=1)(init(cache), layer, batch, query, key, value)
        specs = places.batch[cache.group_of(layer)]

        def call(state: Any, batch: Any, q: Any, k: Any, v: Any, layer: int = layer, window: Any = window) -> Any:
            if way == "attend":
                return attend(state, layer, batch, q, k, v, mesh=mesh, sliding_window=window).output
            return paged(q, k, v, state=state, layer=layer, batch=batch, sliding_window=window).attention_outputs

        given: Any = (state, RaggedBatch.stack([batch] * 2), *(np.concatenate([x] * 2) for x in (query, key, value)))
        if not twice:
            given = (state, batch, query, key, value)
        at = (places.state, specs, places.query, places.key, places.value)
        given = jax.device_put(given, at)
        if way == "shard_map":
            in_specs = jax.tree.map(lambda x: x.spec, at)
            call = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=places.query.spec, check_vma=False)
        got = np.asarray(jax.jit(call)(*given))
        np.testing.assert_allclose(got, np.concatenate([want.output] * 2) if twice else want.output, rtol=0, atol=2e-6)


def test_a_group_has_to_be_said_where_there_are_several() -> None:
    cache = cache_of()
    state, batches, (key, value) = init(cache), batches_of(cache), tokens_of(cache)
    query = np.zeros((5, 4, 8), np.float32)
    for call in (
        lambda: copy(state, [(0, 1)]),
        lambda: scrub(state, [1]),
        lambda: state.pages,
    ):
        with pytest.raises(InputError, match=r"2 groups.*specify one"):
            call()
    for group in (2, -1, True, "0"):
        with pytest.raises(InputError, match="wanted 0 to 1"):
            copy(state, [(0, 1)], group=group)  # type: ignore[arg-type]
    for call in (
        lambda: insert(state, 1, batches[0], key, value),
        lambda: attend(state, 1, batches[0], query, key, value),
        lambda: OperationRegistry.create("paged")(query, key, value, state=state, layer=1, batch=batches[0]),
    ):
        with pytest.raises(InputError, match=r"layer 1 is in group 1 .* made for group 0"):
            call()
    with pytest.raises(InputError, match="layer=3; wanted 0 to 2"):
        insert(state, 3, batches[0], key, value)
    with pytest.raises(InputError, match="those of one group"):
        RaggedBatch.stack(batches)
    shapes = [jax.ShapeDtypeStruct((5, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    paged = OperationRegistry.create("paged")
    with pytest.raises(InputError, match="2 groups; specify the step's layer"):
        paged.plan(*shapes, cache=cache)
    with pytest.raises(InputError, match="layer=3; wanted 0 to 2"):
        paged.plan(*shapes, cache=cache, layer=3)
    assert paged.plan(*shapes, cache=cache, layer=1).kind != "refused"
    assert paged.plan(*shapes, cache=cache, layer=2).kind == "refused"
    assert "layers    of group 0 of 2: a window of 6 tokens" in paged.explain(
        *shapes, cache=cache, layer=0, sliding_window=(5, 0)
    )


def test_a_sequence_is_taken_out_and_brought_back_into_other_pages() -> None:
    """What the next token sees of it is what it was; the pages that were left behind needn't be there."""
    cache = cache_of()
    batches = batches_of(cache)
    random = np.random.default_rng(1)
    state = init(cache)
    drawn = lambda x: jnp.asarray(random.standard_normal(x.shape), x.dtype)  # noqa: E731
    state = CacheState(tuple(x._replace(key=drawn(x.key), value=drawn(x.value)) for x in state.layers), cache)
    saved = jax.device_get(extract(state, batches, 0))
    assert int(saved.length) == 15
    assert not np.asarray(saved.layers[0].key)[0].any()
    elsewhere = (
        RaggedBatch.make(cache.plan().groups[0], cu_q_lens=[0, 0], kv_lens=[15], page_table=[[12, 12, 8, 1]]),
        RaggedBatch.make(cache.plan().groups[1], cu_q_lens=[0, 0], kv_lens=[15], page_table=[[1, 0, 11, 8]]),
    )
    back = restore(state, saved, elsewhere, 0)
    for layer, (old, new) in enumerate((((7, 5), (8, 1)), ((19, 2, 4, 6), (1, 0, 11, 8)), ((7, 5), (8, 1)))):
        was, now = (np.asarray(x.layers[layer].key)[list(pages)] for x, pages in ((state, old), (back, new)))
        was[-1, 3:] = 0  # behind the 15 tokens
        np.testing.assert_array_equal(was, now)
    for wrong in (batches[0], [batches[0]], batches[::-1]):
        with pytest.raises(InputError, match="a list with the batch of each"):
            extract(state, wrong, 0)
        with pytest.raises(InputError, match="a list with the batch of each"):
            restore(state, saved, wrong, 0)


# -- pools -------------------------------------------------------------------------------------------------------------


def pools() -> PagePools:
    return PagePools.of(cache_of().plan(device_kind="cpu"))


def test_pools_are_those_of_the_plan() -> None:
    made = pools()
    assert [(pool.pages, pool.window_tokens, pool.max_pages_per_sequence) for pool in made.pools] == [
        (12, 6, 6),
        (20, None, 6),
    ]
    assert "12 pages of 4" in repr(made)
    with pytest.raises(InputError, match="no pools"):
        PagePools([])
    with pytest.raises(InputError, match="same page_size"):
        PagePools([PagePool(4, 4), PagePool(4, 2)])


def test_a_prefix_is_matched_where_all_groups_have_what_they_see() -> None:
    made, prompt = pools(), list(range(1, 25))
    made.alloc("a", 0)
    for start in range(0, 24, 4):
        made.append("a", prompt[start : start + 4])
        made.publish("a")
        made.release("a")
    assert made.page_tables(["a"])[0].tolist() == [[12, 12, 12, 12, 4, 5]]
    assert [match.tokens for match in made.match(prompt)] == [24, 24]
    assert [match.pages for match in made.match(prompt)] == [(4, 5), (0, 1, 2, 3, 4, 5)]
    growth = made.adopt("b", prompt[:14])
    assert [(own.matched, own.new_pages) for own in growth] == [(12, ()), (12, ())]
    assert made.page_tables(["b"], 3)[0].tolist() == [[12, 1, 2]]
    made.check()
    # Page 3 of the window's group is given to another: 16 tokens and 20 can't be matched any more, 24 can, and so can 12.
    made.pools[0]._index.remove(3)
    made.pools[0]._index.unused[0].pop(3)
    made.pools[0]._owners.returned[0].append(3)
    assert [made.match(prompt[:n])[1].tokens for n in (24, 23, 19, 15)] == [24, 12, 12, 12]
    assert made.pools[1].match(prompt[:23]).tokens == 20


def test_a_call_that_one_pool_refuses_changes_none() -> None:
    made = pools()
    made.alloc("a", 0)
    made.append("a", list(range(8)))
    made.publish("a")
    made.append("a", list(range(8, 12)))
    made.release("a")
    made.alloc("full", 24)
    made.alloc("more", 8)
    made.fork("a", "c")

    def insides() -> Any:
        return repr(made), [pool.pages_of(name) for pool in made.pools for name in ("a", "c", "full")], made.counts()

    before = insides()
    for error, said, call in (
        (CapacityError, "needs 6 pages", lambda: made.alloc("new", 23)),  # the second pool has them, the first has not
        (InputError, "would get 13 more", lambda: made.append("a", [1] * 13)),
        (CapacityError, "needs 3 pages", lambda: made.append_count("c", 12)),
        (CapacityError, "needs 4 pages", lambda: made.adopt("d", list(range(8)), 16)),
        (InputError, "pages that were released", lambda: made.truncate("a", 4)),
        (InputError, "is already in the pool", lambda: made.fork("a", "c")),
        (InputError, "tokens=-1", lambda: made.alloc("a", -1)),
        (UnknownNameError, "nobody", lambda: made.free("nobody")),
        (UnknownNameError, "nobody", lambda: made.fork("nobody", "e")),
        (UnknownNameError, "nobody", lambda: made.release("nobody")),
    ):
        with pytest.raises(error, match=said):
            call()
        made.check()
        assert insides() == before
    made.pools[0].append_count("a", 1)
    with pytest.raises(InputError, match="never on a single pool"):
        made.check()
