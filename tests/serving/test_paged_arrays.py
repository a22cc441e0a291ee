"""The arrays of a paged cache against a NumPy model: what is written where, what is refused, what is never written."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from versions import needs_jax_0_10

from attnops import AttnOpsError, InputError, ShardingError
from attnops.errors import InputTypeError
from attnops.operators.paged_cache import (
    CacheState,
    RaggedBatch,
    copy,
    dense_insert,
    extract,
    init,
    insert,
    restore,
    scrub,
    shardings,
)
from attnops.planning.cache.kv_cache import KVCache
from attnops.planning.quantised import quantise
from attnops.sharding import virtual_mesh

PAGE, PAGES, ROWS, WIDTH, HEADS, DIM, TOKENS = 4, 16, 4, 5, 2, 3, 24
FIELDS: dict[str, Any] = {
    "layers": 2, "kv_heads": HEADS, "head_dim": DIM, "value_dim": 5, "dtype": "float32", "page_size": PAGE, "pages": PAGES,
    "max_sequences": ROWS, "max_length": PAGE * WIDTH,
}  # fmt: skip
CACHE = KVCache(**FIELDS)
PLAN = CACHE.plan()


def tokens(seed: int, count: int = TOKENS, heads: int = HEADS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((count, heads, dim), np.float32) for dim in (DIM, 5))  # type: ignore[return-value]


@st.composite
def batches(draw: Any) -> tuple[list[int], list[int], list[list[int]]]:
    """(query lengths, kv lengths, page ids) of some sequences, no page twice."""
    ids = draw(st.permutations(range(PAGES)))
    q_lens, kv_lens, table = [], [], []
    for _ in range(draw(st.integers(0, ROWS))):
        kv_len = draw(st.integers(0, PAGE * WIDTH))
        needed = -(-kv_len // PAGE)
        if needed > len(ids):
            break
        q_lens.append(draw(st.integers(0, min(kv_len, TOKENS - sum(q_lens)))))
        kv_lens.append(kv_len)
        table.append(list(ids[:needed]))
        ids = ids[needed:]
    return q_lens, kv_lens, table


def make(q_lens: list[int], kv_lens: list[int], table: list[list[int]], **options: Any) -> RaggedBatch:
    starts = np.cumsum([0, *q_lens])
    return RaggedBatch.make(PLAN, cu_q_lens=starts, kv_lens=kv_lens, page_table=table, tokens=TOKENS, **options)


def model(
    pages: np.ndarray, new: np.ndarray, q_lens: list[int], kv_lens: list[int], table: list[list[int]]
) -> np.ndarray:
    """What insert does, token by token."""
    pages, token = pages.copy(), 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            pages[table[row][position // PAGE], position % PAGE] = new[token]
            token += 1
    return pages


write = jax.jit(insert, static_argnums=1)


@settings(max_examples=25)
@given(batches(), st.integers(0, 1))
def test_insert_is_the_model(batch: Any, layer: int) -> None:
    """Also: NaN in tokens of no sequence is never written, and another layer is left alone."""
    key, value = tokens(1)
    key[sum(batch[0]) :] = np.nan
    value[sum(batch[0]) :] = np.nan
    before = init(CACHE)
    after = write(before, layer, make(*batch), key, value)
    for name, new in (("key", key), ("value", value)):
        stored = np.asarray(getattr(after.layers[layer], name))
        np.testing.assert_array_equal(stored, model(np.zeros_like(stored), new, *batch))
        assert np.isfinite(stored).all()
        assert not np.asarray(getattr(after.layers[1 - layer], name)).any()


@settings(max_examples=20)
@given(batches(), st.data())
def test_chunks_are_one_insert(batch: Any, data: Any) -> None:
    q_lens, kv_lens, table = batch
    key, value = tokens(2)
    whole = write(init(CACHE), 0, make(*batch), key, value)
    first = [data.draw(st.integers(0, q_len)) for q_len in q_lens]
    starts, state = np.cumsum([0, *q_lens]), init(CACHE)
    for begin, count in ((np.zeros(len(first), int), first), (first, np.subtract(q_lens, first).tolist())):
        index = [starts[row] + begin[row] + i for row in range(len(count)) for i in range(count[row])]
        lens = [kv_lens[row] - q_lens[row] + begin[row] + count[row] for row in range(len(count))]
        padded = np.pad(np.asarray(index, int), (0, TOKENS - len(index)))
        state = write(state, 0, make(list(count), lens, table), key[padded], value[padded])
    jax.tree.map(np.testing.assert_array_equal, state, whole)


@settings(max_examples=15)
@given(
    batches(),
    st.sampled_from(["int8", "float8_e4m3fn", "float8_e5m2"]),
    st.sampled_from(["token_head", "head", "tensor"]),
)
def test_quantised_pages(batch: Any, dtype: str, scale: str) -> None:
    cache = KVCache(**FIELDS, quantised={"dtype": dtype, "scale": scale})
    fixed = {} if scale == "token_head" else {"key_scale": 0.02, "value_scale": 0.02}
    key, value = tokens(3)
    count = sum(batch[0])
    state = write(init(cache, **fixed), 0, make(*batch), key, value).layers[0]
    for stored, scales, new in ((state.key, state.key_scale, key), (state.value, state.value_scale, value)):
        assert stored.dtype == jnp.dtype(dtype)
        assert scales is not None
        if scale != "token_head":
            # What the scale has no number for becomes the largest: no infinity, no NaN.
            assert np.isfinite(np.asarray(stored, np.float32)).all()
            continue
        wanted, wanted_scales = quantise(new, dtype, "token_head", "thd")
        got = model(np.zeros(stored.shape, np.float32), wanted.astype(np.float32), *batch)
        np.testing.assert_allclose(
            np.asarray(stored, np.float32), got, rtol=0.26 if dtype == "float8_e5m2" else 0.13, atol=1
        )
        per_token = model(np.zeros(scales.shape, np.float32), wanted_scales[..., 0], *batch)
        np.testing.assert_allclose(scales, per_token, rtol=1e-6)
        back = np.asarray(stored, np.float32) * np.asarray(scales)[..., None]
        error = np.abs(back - model(np.zeros(stored.shape, np.float32), new, *batch))
        most = {"int8": 1 / 127, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[dtype]
        assert error.max(initial=0) <= most * (np.abs(new[:count]).max(initial=0) + 1e-6)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"page_table": [[0], [16]]}, "row 1: kv_len 3 needs 1 pages of 4, but the table has 0"),
        ({"page_table": [[0], [17]]}, "row 1: page id 17; wanted 0 to 15, or 16 for padding"),
        ({"page_table": [[-1], [1]]}, "row 0: page id -1"),
        ({"kv_lens": [2, 9]}, "row 1: kv_len 9 needs 3 pages of 4, but the table has 1"),
        ({"kv_lens": [1, 3]}, "row 0: 2 queries and kv_len 1"),
        ({"cu_q_lens": [0, 2, 1]}, "row 1: cu_q_lens falls from 2 to 1"),
        ({"cu_q_lens": [1, 2, 3]}, "row 0: cu_q_lens starts at 1"),
        ({"cu_q_lens": [0, 1]}, "2 entries for 2 rows"),
        ({"tokens": 4}, "row 1: cu_q_lens goes to 5, but there are 4 tokens"),
        ({"kv_lens": [2, 2**31]}, "row 1: kv_lens is 2147483648; wanted a number that fits in int32"),
        ({"cu_q_lens": [0, 2**40, 5]}, "row 1: cu_q_lens is 1099511627776"),
        ({"page_table": [[0], [2**32]]}, r"page_table\[1\] is 4294967296; wanted a number that fits"),
        ({"page_table": [[0], [1, 2, 3, 4, 5, 6]]}, "row 1: 6 pages; wanted at most 5"),
        ({"page_table": [[3], [3]]}, "row 0: its tokens go to page 3, which row 1 reads too; copy the page first"),
        (
            {"kv_lens": [2, 7], "page_table": [[0], [1, 1]]},
            "row 1: its tokens go to page 1, which the same row has twice",
        ),
        ({"page_table": [[0]]}, "page_table has 1 rows and kv_lens 2"),
        ({"num_seqs": 5}, "num_seqs is 5; wanted 0 to 4"),
        ({"kv_lens": [2.0, 3.0]}, "kv_lens has dtype float64"),
        ({"kv_lens": [1] * 5}, "kv_lens has 5 rows; wanted at most 4"),
        ({"page_table": np.zeros(3, int)}, r"page_table has shape \(3,\)"),
    ],
)
def test_a_batch_without_meaning_is_refused(arrays: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"cu_q_lens": [0, 2, 5], "kv_lens": [2, 3], "page_table": [[0], [1]]}
    assert RaggedBatch.make(PLAN, **right).kv_lens.tolist() == [2, 3, 0, 0]
    with pytest.raises((InputError, InputTypeError), match=says):
        RaggedBatch.make(PLAN, **(right | arrays))


def test_a_shared_prefix_is_read_and_not_written() -> None:
    """Two rows may read the same full pages; only a write to one is refused."""
    made = RaggedBatch.make(PLAN, cu_q_lens=[0, 1, 2], kv_lens=[5, 6], page_table=[[7, 1], [7, 2]])
    assert made.page_table[:2, 0].tolist() == [7, 7]


RIGHT = make([2, 3], [2, 3], [[0], [1]])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layer": 2}, "layer=2; wanted 0 to 1"),
        ({"layer": True}, "layer=True is a bool; wanted an int"),
        ({"key": tokens(0)[0].astype("float16")}, "key is float16, but the cache is declared float32"),
        ({"value": tokens(0)[0]}, r"value has shape \(24, 2, 3\); wanted \[tokens, 2, 5\]"),
        ({"key": tokens(0, heads=4)[0]}, r"wanted \[tokens, 2, 3\]"),
        ({"key": tokens(0, 8)[0]}, "key has 8 tokens and value 24"),
        ({"key": 3}, "key is an int"),
        ({"batch": RaggedBatch(*(np.asarray(x, np.int64) for x in jax.tree.leaves(RIGHT)))}, "cu_q_lens is int64"),
        ({"batch": RaggedBatch(RIGHT.cu_q_lens[:-1], RIGHT.kv_lens, RIGHT.page_table, RIGHT.num_seqs)}, "a batch of"),
        (
            {"batch": RaggedBatch(RIGHT.cu_q_lens, RIGHT.kv_lens + 4, RIGHT.page_table, RIGHT.num_seqs)},
            "row 0: kv_len 6",
        ),
    ],
)
def test_insert_refuses(changed: dict[str, Any], says: str) -> None:
    key, value = tokens(0)
    arguments = {"state": init(CACHE), "layer": 0, "batch": RIGHT, "key": key, "value": value} | changed
    with pytest.raises(AttnOpsError, match=says):
        insert(**arguments)


def test_traced_nonsense_is_dropped_and_never_clamped() -> None:
    key, value = tokens(4)
    nonsense = [
        ([0, 2, 5, 5, 5], [2, 3, 0, 0], [[-1], [99]], 2),  # ids out of range
        ([0, 2, 5, 5, 5], [2**31 - 1, 1, 0, 0], [[0], [1]], 2),  # behind the table; more queries than keys
        ([0, 2, 5, 5, 5], [2, 3, 0, 0], [[0], [1]], -1),
        ([5, 2, 0, 0, 0], [2, 3, 0, 0], [[0], [1]], 2),
    ]
    written = []
    for starts, lens, table, count in nonsense:
        ids = np.full((ROWS, WIDTH), PAGES, np.int32)
        ids[:2, 0] = np.ravel(table)
        batch = RaggedBatch(*(np.asarray(x, np.int32) for x in (starts, lens, ids, count)))  # type: ignore[arg-type]
        written.append(int((np.asarray(write(init(CACHE), 0, batch, key, value).layers[0].key) != 0).any((2, 3)).sum()))
    assert written == [0, 1, 0, 0]  # the last of three tokens has position 0


@pytest.mark.filterwarnings("ignore")
def test_debug_names_the_row_of_traced_values() -> None:
    key, value = tokens(4)
    wrong = RaggedBatch(RIGHT.cu_q_lens, RIGHT.kv_lens + 4, RIGHT.page_table, RIGHT.num_seqs)
    step = jax.jit(partial(insert, debug=True), static_argnums=1)
    jax.block_until_ready(step(init(CACHE), 0, RIGHT, key, value))

    def run() -> None:
        jax.block_until_ready(step(init(CACHE), 0, wrong, key, value))
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match="row 0: kv_len 6 needs 2 pages of 4, but the table has 1"):
        run()


def test_a_donated_state_is_written_in_place_and_scanned_over() -> None:
    key, value = tokens(5)
    state = init(CACHE)

    def step(state: CacheState, _: Any) -> tuple[CacheState, None]:
        for layer in range(CACHE.layers):
            state = insert(state, layer, RIGHT, key, value)
        return state, None

    for run in (lambda s: step(s, None)[0], lambda s: jax.lax.scan(step, s, length=3)[0]):
        memory = jax.jit(run, donate_argnums=0).lower(state).compile().memory_analysis()
        pages = sum(x.nbytes for x in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes == pages
    done = jax.jit(lambda s: jax.lax.scan(step, s, length=3)[0], donate_argnums=0)(state)
    assert state.layers[0].key.is_deleted()
    np.testing.assert_array_equal(done.layers[1].key[1, :3], key[2:5])


# -- pages as a whole ------------------------------------------------------------------------------------------------


def filled(cache: KVCache = CACHE, mesh: Any = None) -> CacheState:
    random = np.random.default_rng(6)
    return jax.tree.map(
        lambda x: jax.device_put(random.integers(1, 100, x.shape).astype(x.dtype), x.sharding), init(cache, mesh)
    )


QUANTISED = KVCache(**FIELDS, quantised={"dtype": "int8"})


@pytest.mark.parametrize(
    "cache", [pytest.param(CACHE, id="float32", marks=pytest.mark.slow), pytest.param(QUANTISED, id="int8")]
)
def test_copy_and_scrub(cache: KVCache) -> None:
    state = filled(cache)
    pairs = np.array([[3, 4], [4, 5], [PAGES, PAGES], [0, 0]])
    copied = jax.jit(copy)(state, pairs)
    jax.tree.map(np.testing.assert_array_equal, copied, copy(state, pairs))
    cleared = jax.jit(scrub)(state, np.array([2, 7, PAGES, -1, 99]))
    jax.tree.map(np.testing.assert_array_equal, cleared, scrub(state, [2, 7]))
    for before, after, gone in zip(*map(jax.tree.leaves, (state, copied, cleared)), strict=True):
        wanted = np.array(before)
        wanted[[4, 5]] = wanted[[3, 4]]
        np.testing.assert_array_equal(after, wanted)
        wanted = np.array(before)
        wanted[[2, 7]] = 0
        np.testing.assert_array_equal(gone, wanted)
    traced = jax.jit(copy)(state, np.array([[99, 4], [-1, 5], [3, -2], [3, 77]]))
    jax.tree.map(np.testing.assert_array_equal, traced, state)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: copy(s, [[0, 17]]), r"pairs\[0, 1\] is 17; wanted 0 to 15, or 16 for padding"),
        (lambda s: copy(s, [[0, 1], [2, 1]]), "page 1 is written twice"),
        (lambda s: copy(s, [[16, 1]]), "16, the id of padding, is copied to page 1"),
        (lambda s: copy(s, [0, 1]), r"pairs has shape \(2,\)"),
        (lambda s: scrub(s, [-1]), r"pages\[0\] is -1"),
        (lambda s: scrub(s, [2**31]), "2147483648"),
        (lambda s: scrub(s, [0.5]), "pages has dtype float64"),
        (lambda s: scrub(s, [[0], [1], [2]]), "16 for a batch of 3 shards"),
    ],
)
def test_pages_out_of_range_are_refused(call: Any, says: str) -> None:
    with pytest.raises(AttnOpsError, match=says):
        call(init(CACHE))


def _jitted(function: Any) -> Any:
    return jax.jit(function, static_argnums=2)


@pytest.mark.parametrize(
    ("cache", "wrap"),
    [
        pytest.param(CACHE, lambda f: f, id="float32-eager"),
        pytest.param(QUANTISED, _jitted, id="int8-jitted"),
        pytest.param(CACHE, _jitted, id="float32-jitted", marks=pytest.mark.slow),
        pytest.param(QUANTISED, lambda f: f, id="int8-eager", marks=pytest.mark.slow),
    ],
)
def test_extract_and_restore(cache: KVCache, wrap: Any) -> None:
    state, empty = filled(cache), init(cache)
    batch = make([1, 1], [9, 6], [[3, 1, 8], [5, 2]])
    saved = wrap(extract)(state, batch, 0)
    assert int(saved.length) == 9
    for pages, own in zip(state.layers, saved.layers, strict=True):
        for stored, kept in zip(jax.tree.leaves(pages), jax.tree.leaves(own), strict=True):
            rows = kept.reshape(-1, *kept.shape[2:])
            np.testing.assert_array_equal(rows[:9], stored[np.array([3, 1, 8])].reshape(-1, *stored.shape[2:])[:9])
            assert not np.asarray(rows[9:], np.float32).any()
    other = make([1, 1], [6, 10], [[5, 2], [0, 9, 4]])
    back = jax.jit(restore, static_argnums=3)(empty, saved, other, 1)
    jax.tree.map(np.testing.assert_array_equal, back, restore(empty, jax.device_get(saved), other, 1))
    again = extract(back, make([1], [9], [[0, 9, 4]]), 0)
    for kept, once_more in zip(jax.tree.leaves(saved), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(kept[:3] if kept.ndim else kept, once_more)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s, b, k: extract(s, b, 4), "sequence=4; wanted 0 to 3"),
        (lambda s, b, k: extract(s, b, (0, 1)), r"sequence=\(0, 1\); wanted 0 to 3"),
        (lambda s, b, k: extract(s, b, 0.5), "wanted an int"),
        (lambda s, b, k: restore(s, k, make([1], [5], [[0, 1]]), 0), "9 tokens need 3 pages"),
        (lambda s, b, k: restore(s, k, make([1], [8], [[0, 1, 2]]), 0), "kv_len is 8, but 9 tokens were saved"),
        (
            lambda s, b, k: restore(s, k, make([1, 1], [10, 5], [[0, 1, 2], [0, 4]]), 0),
            "page 0 is row 1's too",
        ),
        (lambda s, b, k: restore(init(QUANTISED), k, b, 0), "layer 0, key: saved"),
    ],
)
def test_offloading_refuses(call: Any, says: str) -> None:
    state, batch = filled(), make([1], [9], [[3, 1, 8]])
    with pytest.raises(AttnOpsError, match=says):
        call(state, batch, extract(state, batch, 0))


# -- meshes ----------------------------------------------------------------------------------------------------------


def two_shards() -> tuple[RaggedBatch, list[Any]]:
    parts = [([2, 3], [2, 7], [[0], [3, 1]]), ([4], [4], [[7]])]
    plan = KVCache(**FIELDS, pages_axis="dp").plan(virtual_mesh({"dp": 2, "tp": 2}))
    made = [
        RaggedBatch.make(plan, cu_q_lens=np.cumsum([0, *q]), kv_lens=lens, page_table=table, tokens=TOKENS // 2)
        for q, lens, table in [parts[0], parts[1]]
    ]
    return RaggedBatch.stack(made), parts


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("quantised", [None, {"dtype": "int8"}])
def test_sharded_is_unsharded(explicit: bool, quantised: Any) -> None:
    """Over dp and tp, placed by the shardings: nothing is sent, and the pages are those of each shard alone."""
    mesh = virtual_mesh({"dp": 2, "tp": 2}, explicit=explicit)
    cache = KVCache(**FIELDS, pages_axis="dp", quantised=quantised)
    places, (batch, parts), (key, value) = shardings(cache, mesh), two_shards(), tokens(7)
    assert jax.tree.structure(places.state) == jax.tree.structure(init(cache))
    step = jax.jit(
        lambda s, b, k, v: insert(s, 1, b, k, v),
        in_shardings=(places.state, places.batch, places.key, places.value),
        out_shardings=places.state,
        donate_argnums=0,
    )
    state = jax.device_put(init(cache, mesh), places.state)
    given = jax.device_put((batch, key, value), (places.batch, places.key, places.value))
    with jax.set_mesh(mesh):
        compiled = step.lower(state, *given).compile()
        done = compiled(state, *given)
    text = compiled.as_text()
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if name in text]
    assert compiled.memory_analysis().alias_size_in_bytes == cache.plan(mesh).bytes_of(
        "key_pages", "value_pages", "key_scale", "value_scale"
    )
    assert done.layers[1].key.sharding.spec == P("dp", None, "tp", None)
    if quantised is None:
        for stored, new in ((done.layers[1].key, key), (done.layers[1].value, value)):
            halves = np.split(np.asarray(stored), 2), np.split(new, 2)
            for pages, own, part in zip(*halves, parts, strict=True):
                np.testing.assert_array_equal(pages, model(np.zeros_like(pages), own, *part))
    else:
        alone = write(init(cache), 1, batch, key, value)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(done), jax.device_get(alone))


def test_local_parts_in_a_shard_map() -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    cache = KVCache(**FIELDS, pages_axis="dp")
    places, (batch, _), (key, value) = shardings(cache, mesh), two_shards(), tokens(8)
    specs = jax.tree.map(lambda place: place.spec, places)
    step = partial(jax.shard_map, mesh=mesh, out_specs=specs.state)

    def body(state: CacheState, batch: RaggedBatch, key: jax.Array, value: jax.Array) -> CacheState:
        return insert(state, 0, batch, key, value)

    local = step(body, in_specs=(specs.state, specs.batch, specs.key, specs.value))
    done = jax.jit(local)(init(cache, mesh), batch, key, value)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(done), jax.device_get(write(init(cache), 0, batch, key, value))
    )
    whole_heads = step(body, in_specs=(specs.state, specs.batch, P("dp"), P("dp")))
    with pytest.raises(InputError, match="key is the same on all devices of 'tp'"):
        jax.jit(whole_heads)(init(cache, mesh), batch, key, value)


@pytest.mark.slow
@needs_jax_0_10("jit splits arguments of no sharding unevenly, and then refuses that")
def test_fewer_heads_than_devices_are_repeated_in_the_cache() -> None:
    mesh = virtual_mesh({"tp": 4})
    places, (key, value) = shardings(CACHE, mesh), tokens(9)
    state = init(CACHE, mesh)
    assert state.layers[0].key.shape == (PAGES, PAGE, 4, DIM)
    assert places.query.spec == P(None, "tp", None)
    assert places.key.spec == P(None, None, None)
    done = jax.jit(lambda s, k, v: insert(s, 0, RIGHT, k, v), out_shardings=places.state)(state, key, value)
    one = write(init(CACHE), 0, RIGHT, key, value)
    np.testing.assert_array_equal(done.layers[0].key, np.repeat(one.layers[0].key, 2, axis=2))
    np.testing.assert_array_equal(insert(state, 0, RIGHT, *(np.repeat(x, 2, 1) for x in (key, value))).layers[0].value,
                                  done.layers[0].value)  # fmt: skip


@pytest.mark.slow
def test_shards_of_pages_in_every_function() -> None:
    mesh = virtual_mesh({"dp": 2, "tp": 2})
    cache = KVCache(**FIELDS, pages_axis="dp")
    state, (batch, _) = filled(cache, mesh), two_shards()
    pairs = np.array([[[1, 2]], [[3, 0]]])
    before, after = (np.array(s.layers[0].key) for s in (state, jax.jit(copy)(state, pairs)))
    before[[2, 8]] = before[[1, 11]]
    np.testing.assert_array_equal(after, before)
    gone = np.asarray(scrub(state, np.array([[1], [8]])).layers[1].value)
    assert np.flatnonzero((gone == 0).all((1, 2, 3))).tolist() == [1]  # 8 is the second shard's padding
    saved = extract(state, batch, (1, 0))
    np.testing.assert_array_equal(saved.layers[0].key[0], state.layers[0].key[15])
    back = restore(init(cache, mesh), saved, batch, (1, 0))
    np.testing.assert_array_equal(back.layers[0].key[15], state.layers[0].key[15])
    with pytest.raises(InputError, match="shard 1, row 0: kv_len 8 needs 2"):
        insert(state, 0, RaggedBatch(batch.cu_q_lens, batch.kv_lens + np.array([[0], [4]], np.int32), batch.page_table,
                                     batch.num_seqs), *tokens(1))  # fmt: skip
    with pytest.raises(InputError, match="stack takes"):
        RaggedBatch.stack([batch])


@pytest.mark.parametrize(
    ("fields", "scales", "says"),
    [
        ({"quantised": {"dtype": "int8", "scale": "head"}}, {}, "key_scale is missing"),
        ({"quantised": {"dtype": "int8"}}, {"key_scale": 1}, "scales are per token and head"),
        ({}, {"value_scale": 1}, "the cache isn't quantised"),
        ({"quantised": {"dtype": "int8", "scale": "head"}}, {"key_scale": [1, 2, 3]}, r"broadcasts to \(2, 2\)"),
        ({"quantised": {"dtype": "int8", "scale": "tensor"}}, {"key_scale": 0}, "finite numbers above 0"),
    ],
)
def test_scales_of_init(fields: dict[str, Any], scales: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        init(KVCache(**FIELDS, **fields), **scales)


def test_an_abstract_mesh_holds_nothing() -> None:
    with pytest.raises(ShardingError, match="a mesh of devices"):
        init(CACHE, virtual_mesh({"tp": 2}).abstract_mesh)  # type: ignore[arg-type]


# -- dense caches ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-6, 12), min_size=3, max_size=3), st.sampled_from([1, 3]), st.booleans())
def test_dense_insert_is_the_model(start: list[int], q_len: int, traced: bool) -> None:
    length, random = 8, np.random.default_rng(0)
    caches = [random.standard_normal((3, length, 2, dim), np.float32) for dim in (3, 5)]
    new = [random.standard_normal((3, q_len, 2, dim), np.float32) for dim in (3, 5)]
    if not traced and any(not 0 <= s <= length - q_len for s in start):
        row = next(row for row, s in enumerate(start) if not 0 <= s <= length - q_len)
        with pytest.raises(InputError, match=f"row {row}: {q_len} tokens from {start[row]} on in a cache of 8"):
            dense_insert(*caches, *new, np.array(start))
        return
    run = jax.jit(dense_insert, donate_argnums=(0, 1)) if traced else dense_insert
    got = run(*map(jnp.asarray, caches), *new, np.array(start))
    for cache, own, found in zip(caches, new, got, strict=True):
        wanted = cache.copy()
        for row, first in enumerate(start):
            for i in range(q_len):
                if 0 <= first + i < length:
                    wanted[row, first + i] = own[row, i]
        np.testing.assert_array_equal(found, wanted)


def test_dense_insert_refuses_and_drops() -> None:
    cache, new = jnp.zeros((2, 8, 2, 3)), jnp.ones((2, 2, 2, 3))
    for arguments, says in (
        ((cache, cache, new.astype("bfloat16"), new, 0), "key is bfloat16, but its cache is float32"),
        ((cache, cache, new[:1], new, 0), "key has shape"),
        ((cache, cache[:, :4], new, new, 0), "the same number of rows"),
        ((cache, cache, new, new, jnp.zeros(3, int)), r"start has shape \(3,\)"),
        ((cache, cache, new, new, 0.5), "start has dtype"),
        ((cache, cache, new, new, 7), "row 0: 2 tokens from 7 on"),
    ):
        with pytest.raises(AttnOpsError, match=says):
            dense_insert(*arguments)  # type: ignore[arg-type]
    far = jax.jit(dense_insert)(cache, cache, new, new, np.array([2**31 - 1, -(2**31)], np.int32))
    assert not np.asarray(far[0]).any()
    assert np.asarray(dense_insert(cache, cache, new, new, 6)[0]).sum() == new.size


# -- small floats, which a CPU writes another way --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_floats_are_written_as_float32_is(dtype: str) -> None:
    """In every function, dropped tokens too."""
    wide, narrow = filled(), filled(KVCache(**FIELDS | {"dtype": dtype}))  # whole numbers, exact in both
    random = np.random.default_rng(0)
    key, value = (random.integers(1, 99, (TOKENS, HEADS, dim)).astype(np.float32) for dim in (DIM, 5))
    batch = make([2, 3], [6, 3], [[3, 1], [5]])
    outside = RaggedBatch(batch.cu_q_lens, batch.kv_lens + 50, batch.page_table, batch.num_seqs)

    def every(state: CacheState, key: Any, value: Any, batch: Any, outside: Any) -> CacheState:
        state = insert(insert(state, 0, batch, key, value), 1, outside, key, value)
        state = scrub(copy(state, jnp.array([[3, 4], [99, 5]])), jnp.array([0, -1, 99]))
        return restore(state, extract(state, batch, 0), RaggedBatch(batch.cu_q_lens, batch.kv_lens, batch.page_table + 7,
                                                                    batch.num_seqs), 0)  # fmt: skip

    wanted = jax.jit(every)(wide, key, value, batch, outside)
    step = jax.jit(every, donate_argnums=0)
    arguments = (narrow, jnp.asarray(key, dtype), jnp.asarray(value, dtype), batch, outside)
    memory = step.lower(*arguments).compile().memory_analysis()
    pages = sum(x.nbytes for x in jax.tree.leaves(narrow))
    assert memory.alias_size_in_bytes == pages
    for exact, stored in zip(*map(jax.tree.leaves, (wanted, step(*arguments))), strict=True):
        np.testing.assert_array_equal(np.asarray(stored, np.float32), exact)
    caches, new = [jnp.zeros((3, 8, 2, 3)), jnp.ones((3, 2, 2, 3))], jnp.array([-1, 3, 7])
    dense = [
        jax.jit(dense_insert)(*[caches[0].astype(d)] * 2, *[caches[1].astype(d)] * 2, new)[0]
        for d in (dtype, "float32")
    ]
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in dense))
