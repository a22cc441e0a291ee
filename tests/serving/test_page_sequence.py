"""page_sequence_axis: the pages of one sequence on several devices. Steps against float64, places, pools, plans and refusals."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from test_steps import DIM, FIELDS, HEADS, LATENT, Served

from attnops import Causal, Chunked, InputError, OperationMetadata, OperationRegistry, RefusedError
from attnops.errors import AttnOpsError, CapacityError
from attnops.operators.paged import tpu_kernel
from attnops.operators.paged.declared_step import declared_step
from attnops.operators.paged_cache import RaggedBatch, attend, copy, extract, init, insert, restore, scrub, shardings
from attnops.planning.cache.kv_cache import KVCache
from attnops.planning.paged.page_reads import page_reads, step_flops
from attnops.planning.traffic import Need, Traffic
from attnops.registry.declaration import Declaration
from attnops.serving import PagePool
from attnops.sharding import virtual_mesh
from attnops.verify.collectives import Collective
from attnops.verify.paged_step import PlannedStep, step_traffic, unneeded
from attnops.verify.passes import target_reports
from attnops.verify.targets import target_of

SPLIT = {"page_sequence_axis": "sp"}
SINKS = {"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}
INT8 = {"quantised": {"dtype": "int8"}}
WAYS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "sp": (SPLIT, {"sp": 2}, SINKS),
    "sp4_window": (SPLIT | {"max_length": 68}, {"sp": 4}, {"sliding_window": (6, 0)} | SINKS),
    "dp_sp_int8": (SPLIT | INT8 | {"pages_axis": "dp"}, {"dp": 2, "sp": 2}, {"logits_soft_cap": 5.0}),
    "heads_tp": (SPLIT | {"layout": "heads"}, {"sp": 2, "tp": 2}, {"sliding_window": (9, 0)}),
    "packed_int8": (SPLIT | INT8 | {"layout": "packed", "value_dim": DIM}, {"sp": 4}, SINKS),
    "packed_tp": (SPLIT | {"layout": "packed", "value_dim": DIM}, {"sp": 2, "tp": 2}, {"sliding_window": (6, 0)}),
    "joined_tp": (SPLIT | {"layout": "joined"}, {"sp": 2, "tp": 2}, {"logits_soft_cap": 5.0}),
    "latent_int8": (SPLIT | INT8 | LATENT | {"pages_axis": "dp"}, {"dp": 2, "sp": 2}, {"sliding_window": (9, 0)}),
    "latent_tp": (SPLIT | LATENT, {"sp": 2, "tp": 2}, SINKS),
    "sp4_chunk": (SPLIT | {"max_length": 68}, {"sp": 4}, {"chunk": 10} | SINKS),
    "two_axes": ({"page_sequence_axis": ("sp", "ep")}, {"ep": 2, "sp": 2}, {"sliding_window": (9, 0)}),
    "beside_others": (SPLIT | {"pages_axis": "dp", "layout": "heads"}, {"dp": 2, "sp": 2, "tp": 2}, SINKS),
}
QUICK = ("sp4_window", "dp_sp_int8", "latent_tp")


def described(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    return virtual_mesh(sizes)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS])
def test_steps_of_growing_sequences(way: str) -> None:
    """Unwritten slots hold NaN; sequences of one page leave devices without a key."""
    served = Served(*WAYS[way])
    served.serve()
    names = {name: 1 for name in served.history if name in served.pools[0]}
    served.run([names, *[{}] * (served.shards - 1)], longest=1)


def test_tokens_lie_on_the_device_of_their_page_number() -> None:
    """Held against the arrays of each device: page number p on shard p % n, an id g at g // n there."""
    served = Served({**SPLIT, "pages_axis": "dp"}, {"dp": 2, "sp": 2}, {})
    served.run([{"a": 9, "b": 3}, {"z": 14}])
    found = served.state.layers[1].key
    for shard in found.addressable_shards:
        place = np.argwhere(served.mesh.devices == shard.device)[0]  # type: ignore[union-attr]
        own, pool = np.asarray(shard.data), served.pools[place[0]]
        assert own.shape == (12, 4, 2, DIM)
        written = np.zeros((12, 4), bool)
        for name in ("a", "b") if place[0] == 0 else ("z",):
            for position, key in enumerate(served.history[name][0]):
                number = position // 4
                if number % 2 == place[1]:
                    at = pool.pages_of(name)[number] // 2, position % 4
                    np.testing.assert_array_equal(own[at], key)
                    written[at] = True
        assert np.isnan(own[~written]).all()


@pytest.mark.slow
def test_a_fork_and_a_shared_prefix() -> None:
    """The last page is copied on its own device, and both go on."""
    served = Served(SPLIT, {"sp": 2}, {"sliding_window": (7, 0)})
    pool = served.pools[0]
    served.run([{"a": 10}])
    pool.fork("a", "b")
    served.history["b"] = served.history["a"]
    grown = pool.append_count("b", 1)
    assert len(grown.copies) == 1
    served.state = copy(served.state, grown.copies)
    pool.truncate("b", 10)
    served.run([{"a": 3, "b": 2}])
    pool.check()


def test_pages_move_by_their_ids() -> None:
    """copy, scrub, extract and restore take the host's ids; the arrays after them are those of NumPy."""
    cache, mesh = KVCache(**FIELDS | {**SPLIT, "pages": 12, "max_length": 20, "layers": 1}), mesh_of(sp=2)
    plan = cache.plan(mesh)
    stored = lambda g: g % 2 * 6 + g // 2  # noqa: E731
    random = np.random.default_rng(0)
    fill = lambda x: jax.device_put(random.standard_normal(x.shape, np.float32), x.sharding)  # noqa: E731
    state = jax.tree.map(fill, init(cache, mesh))
    want = np.array(state.layers[0].key)
    got = copy(state, np.array([[3, 7], [4, 2], [12, 12]]))
    want[[stored(7), stored(2)]] = want[[stored(3), stored(4)]]
    np.testing.assert_array_equal(got.layers[0].key, want)
    traced = jax.jit(copy)(state, np.array([[3, 7], [4, 2], [3, 4], [0, 13]], np.int32))  # the last two go nowhere
    np.testing.assert_array_equal(traced.layers[0].key, want)
    got = scrub(got, [5, 12])
    want[stored(5)] = 0
    np.testing.assert_array_equal(got.layers[0].key, want)
    assert got.layers[0].key.sharding.is_equivalent_to(state.layers[0].key.sharding, 4)

    make = lambda table, lens: RaggedBatch.make(  # noqa: E731
        plan, cu_q_lens=[0] * (len(lens) + 1), kv_lens=lens, page_table=table
    )
    batch = make([[6, 3, 10, 1]], [14])
    for own in (batch, jax.device_put(batch, shardings(cache, mesh).batch)):
        saved = extract(got, own, 0)
        whole = np.asarray(saved.layers[0].key)
        tokens = want[[stored(g) for g in (6, 3, 10, 1)]].reshape(-1, 2, DIM)[:14]
        np.testing.assert_array_equal(whole.reshape(-1, 2, DIM)[:14], tokens)
        assert not whole.reshape(-1, 2, DIM)[14:].any()
    back = restore(got, saved, make([[4, 9, 2, 7]], [15]), 0)
    np.testing.assert_array_equal(extract(back, make([[4, 9, 2, 7]], [14]), 0).layers[0].key, saved.layers[0].key)
    np.testing.assert_array_equal(back.layers[0].key[stored(9)], want[stored(3)])
    with pytest.raises(InputError, match=r"page 9 is row 1's too"):
        restore(got, saved, make([[4, 9, 2, 7], [8, 9]], [15, 8]), 0)
    with pytest.raises(InputError, match=r"page 3 is copied to page 4, which lies on another of 2 sequence shards"):
        copy(state, [[3, 4]])


@pytest.mark.slow
def test_without_its_mesh_the_same_comes_out() -> None:
    """A state and a batch of a mesh, brought to one device: shard after shard, joined in the same way."""
    cache, mesh = KVCache(**FIELDS | SPLIT), mesh_of(sp=2)
    random = np.random.default_rng(1)
    query, key, value = (random.standard_normal((8, n, d), np.float32) for n, d in ((HEADS, DIM), (2, DIM), (2, 8)))
    made = RaggedBatch.make(cache.plan(mesh), cu_q_lens=[0, 7], kv_lens=[7], page_table=[[4, 1]])
    places = shardings(cache, mesh)
    arrays = jax.device_put((made, query, key, value), (places.batch, places.query, places.key, places.value))
    call = {"sinks": SINKS["sinks"], "logits_soft_cap": 3.0}
    on_mesh = jax.jit(lambda s, *x: attend(s, 1, *x, mesh=mesh, **call))(init(cache, mesh), *arrays)
    state = jax.device_get(init(cache, mesh))
    alone = jax.jit(lambda s, *x: attend(s, 1, *x, **call))(state, made, query, key, value)
    np.testing.assert_allclose(alone.output, on_mesh.output, rtol=0, atol=1e-6)
    np.testing.assert_allclose(alone.lse, on_mesh.lse, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(alone.state.layers[1].key, on_mesh.state.layers[1].key)


@pytest.mark.slow
def test_where_nothing_is_split_the_program_is_the_same() -> None:
    """On one device, and on a mesh without the axis, page_sequence_axis changes no letter of the program."""

    def text(fields: dict[str, Any], mesh: Any) -> str:
        cache = KVCache(**FIELDS | fields)
        paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
        batch = RaggedBatch.make(cache.plan(mesh), cu_q_lens=[0, 5, 6], kv_lens=[5, 3], page_table=[[2, 5], [4]])
        shapes = [np.zeros((8, n, d), np.float32) for n, d in ((HEADS, DIM), (2, DIM), (2, 8))]

        def step(state: Any, batch: Any, query: Any, key: Any, value: Any) -> Any:
            found = paged(query, key, value, state=state, layer=0, batch=batch, return_lse=True)
            return found.attention_outputs, found.lse, found.state

        return jax.jit(step, donate_argnums=0).lower(init(cache, mesh), batch, *shapes).as_text()

    for mesh in (None, mesh_of(sp=1), mesh_of(tp=2)):
        assert text(SPLIT, mesh) == text({}, mesh)
    assert text(SPLIT, mesh_of(sp=2)) != text({}, mesh_of(sp=2))


@pytest.mark.parametrize(
    ("lens", "table", "said"),
    [
        (
            [5, 6],
            [[2, 5], [4, 6]],
            r"row 1: page number 1 has id 6, which lies on sequence shard 0 of 2; wanted an id g",
        ),
        ([5, 3], [[2, 5], [7]], r"row 1: page number 0 has id 7, which lies on sequence shard 1 of 2"),
        ([5, 3], [[2, 49], [4]], r"row 0: page id 49; wanted 0 to 47, or 48 for padding"),
        ([5, 3], [[2], [4]], r"row 0: kv_len 5 needs 2 pages of 4, but the table has 1"),
        ([5, 3], [[2, 5], [2]], r"row 0: its tokens go to page 2, which row 1 reads too"),
    ],
)
def test_wrong_ids_are_refused_with_the_row(lens: list[int], table: list[list[int]], said: str) -> None:
    plan = KVCache(**FIELDS | SPLIT).plan(described(sp=2))
    with pytest.raises(InputError, match=said):
        RaggedBatch.make(plan, cu_q_lens=[0, 5, 6], kv_lens=lens, page_table=table)


def test_a_table_of_local_ids_is_checked_too() -> None:
    """Known, and with debug while a step runs."""
    cache, mesh = KVCache(**FIELDS | SPLIT), mesh_of(sp=2)
    made = RaggedBatch.make(cache.plan(mesh), cu_q_lens=[0, 7], kv_lens=[7], page_table=[[4, 1]])
    assert made.page_table.shape == (2, 8, 8)
    assert made.sequence_shards == 2
    assert [made.page_table[0, 0, 0], made.page_table[1, 0, 0], made.page_table[0, 0, 1]] == [2, 0, 24]
    table = made.page_table.copy()
    table[1, 0, 0] = 30
    wrong = dataclasses.replace(made, page_table=table)
    key, value = np.ones((8, 2, DIM), np.float32), np.ones((8, 2, 8), np.float32)
    with pytest.raises(InputError, match=r"row 0: page id 61; wanted 0 to 47"):
        insert(init(cache, mesh), 0, wrong, key, value)
    run = jax.jit(lambda s, b: insert(s, 0, b, key, value, debug=True))
    with pytest.raises(Exception, match=r"row 0: page id 61; wanted 0 to 47"):
        jax.block_until_ready(run(init(cache, mesh), wrong))
    jax.block_until_ready(run(init(cache, mesh), made))


def test_a_state_and_a_batch_of_different_meshes_are_refused() -> None:
    cache, mesh = KVCache(**FIELDS | SPLIT), mesh_of(sp=2)
    call = [np.ones((8, n, d), np.float32) for n, d in ((HEADS, DIM), (2, DIM), (2, 8))]
    make = lambda plan: RaggedBatch.make(plan, cu_q_lens=[0, 7], kv_lens=[7], page_table=[[4, 1]])  # noqa: E731
    with pytest.raises(InputError, match="for 1 sequence shards, but the state has 2"):
        insert(init(cache, mesh), 0, make(cache.plan()), *call[1:])
    with pytest.raises(InputError, match="for 2 sequence shards, but the state has 1"):
        extract(init(cache), make(cache.plan(mesh)), 0)
    with pytest.raises(InputError, match=r"state has 1 sequence shards, but on the mesh sp=2"):
        attend(init(cache), 0, make(cache.plan()), *call, mesh=mesh)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
    with pytest.raises(InputError, match=r"state has 1 sequence shards, but on the mesh sp=2"):
        paged(*call, state=init(cache), layer=0, batch=make(cache.plan()))


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_a_pool_gives_ids_of_the_page_numbers_shard() -> None:
    pool = PagePool(9, 2, sequence_shards=3)
    assert pool.alloc("a", 7).new_pages == (0, 1, 2, 3)
    assert pool.alloc("b", 2).new_pages == (6,)
    with pytest.raises(CapacityError, match=r"needs 1 page on sequence shard 0 of 3 .*; 0 of 3 are available") as error:
        pool.alloc("c", 1)
    assert (error.value.wanted, error.value.available, pool.available) == (1, 0, 4)
    assert "c" not in pool
    pool.free("b")
    assert pool.alloc("c", 3).new_pages == (6, 4)
    pool.check()
    with pytest.raises(InputError, match="7 pages for sequence_shards=2; wanted a multiple"):
        PagePool(7, 2, sequence_shards=2)


def _of_another_shard(pool: PagePool) -> None:
    pool._sequences["a"].pages[0] = 1


def _free_elsewhere(pool: PagePool) -> None:
    pool._owners.returned[0].append(pool._owners.returned[1].pop())


def _cached_elsewhere(pool: PagePool) -> None:
    pool._index.unused[1].update(pool._index.unused[0])
    pool._index.unused[0].clear()


def _miscounted(pool: PagePool) -> None:
    pool._owners.used[0] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_of_another_shard, "sequence 'a' has page 1 of shard 1 as number 0, of shard 0"),
        (_free_elsewhere, r"pages \[1\] are free on shard 0, where they don't belong"),
        (_cached_elsewhere, "page 2 is cached on shard 1, where it doesn't belong"),
        (_miscounted, "shard 0 counts 2 used pages, but has 1"),
    ],
)
def test_a_pool_proves_where_its_pages_lie(change: Any, said: str) -> None:
    pool = PagePool(8, 2, sequence_shards=2)
    pool.alloc("a", 2)
    pool.alloc("b", 4)
    pool.append("b", [1, 2, 3])
    pool.publish("b")
    pool.alloc("c", 4)
    pool.free("c")
    pool.free("b")  # 2 is cached; 1, 3 and 4 were returned
    pool.check()
    change(pool)
    with pytest.raises(AttnOpsError, match=f"contradicts itself: .*{said}"):
        pool.check()


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "mesh", "code"),
    [
        ({"pages": 49}, described(sp=2), "unfit"),
        ({"pages": 16, "max_length": 68}, described(sp=4), "pages"),
        ({"page_sequence_axis": "cores"}, described(sp=2), "unfit"),
        ({}, AbstractMesh((2,), ("sp",), axis_types=(AxisType.Manual,)), "page_sequence_axis"),
    ],
)
def test_what_cannot_be_split_is_refused(fields: dict[str, Any], mesh: AbstractMesh, code: str) -> None:
    plan = KVCache(**FIELDS | SPLIT | fields).plan(mesh, device_kind="cpu")
    assert [reason.code for reason in plan.refused] == [code]
    with pytest.raises(RefusedError, match=rf"\[{code}\]"):
        plan.require()


@pytest.mark.parametrize("how_many", [{"pages": 48}, {"pages": None, "bytes_per_device": 60_000}])
def test_bytes_are_those_of_the_arrays(how_many: dict[str, Any]) -> None:
    """And the table of a device, which scalar memory holds, is its own pages'."""
    fields = SPLIT | INT8 | {"pages_axis": "dp", "max_length": 36} | how_many
    cache, mesh = KVCache(**FIELDS | fields), mesh_of(dp=2, sp=2, tp=2)
    plan = cache.plan(mesh).require()
    assert (plan.table_width, plan.page_table_bytes) == (10, 4 * 4 * 5)
    rows = [RaggedBatch.make(plan, cu_q_lens=[0], kv_lens=[], page_table=[], num_seqs=0) for _ in range(plan.shards)]
    batch = jax.device_put(RaggedBatch.stack(rows), shardings(cache, mesh).batch)
    arrays = jax.tree.leaves((init(cache, mesh), batch))
    assert batch.page_table.shape == plan["page_table"].fitted.shape == (2, 2, 4, 5)
    for device in mesh.devices.flat:
        held = sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)
        assert held == plan.bytes_per_device
    if "bytes_per_device" in how_many:
        assert plan.pages % 4 == 0
        one = plan.bytes_of("key_pages", "value_pages", "key_scale", "value_scale") // (plan.pages // 4)
        assert plan.bytes_per_device <= 60_000 < plan.bytes_per_device + one


@pytest.mark.parametrize(("window", "chunk"), [(None, None), ((6, 0), None), ((11, 2), None), (None, 10), ((6, 0), 4)])
def test_reads_and_products_are_those_of_the_device_with_most(window: Any, chunk: int | None) -> None:
    """Counted one by one: keys that a query sees, and the pages with one, on each device."""
    q_lens, kv_lens, n = (1, 5, 1, 9), (41, 9, 3, 33), 3
    cache = KVCache(**FIELDS | SPLIT | {"max_length": 48})
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=described(sp=n)))
    file = Declaration.from_dict({"operation": "paged", "cache": cache.to_dict(), "step": {
        "q_heads": HEADS, "q_lens": list(q_lens), "kv_lens": list(kv_lens),
    }})  # fmt: skip
    step = declared_step(file, cache.plan(described(sp=n)), "before")
    mask = Causal() if chunk is None else Causal() & Chunked(chunk)
    plan = paged.plan(**step.arrays, cache=cache, batch=step.batch, sliding_window=window, mask=mask)
    pages, pairs = np.zeros(n, int), np.zeros(n, int)
    for q_len, length in zip(q_lens, kv_lens, strict=True):
        left = None if window is None else window[0]
        row, col = np.arange(length - q_len, length)[:, None], np.arange(length)
        seen = col <= row
        seen &= (left is None) | (col >= row - (left or 0))
        seen &= (chunk is None) | (col // (chunk or 1) == row // (chunk or 1))
        for number in range(-(-length // 4)):
            own = int(seen[:, number * 4 : number * 4 + 4].sum())
            pairs[number % n] += own
            pages[number % n] += own > 0
    reads = page_reads(plan.problem, step.batch)
    assert plan.reads == reads
    assert reads.live == pages.sum()
    assert reads.device_bytes == pages.max() * 4 * 2 * (DIM + 8) * 4
    assert step_flops(plan.problem, step.batch) == 2 * pairs.max() * HEADS * (DIM + 8)
    tokens = sum(q_lens)
    assert plan.problem.merges[0].size == 4 * tokens * HEADS * (8 + 2)
    assert any("merged by their lse over sp" in note for note in plan.notes)


def test_a_compiled_step_sends_what_joins_outputs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, mesh = KVCache(**FIELDS | SPLIT | {"pages_axis": "dp"}), mesh_of(dp=2, sp=2)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
    file = Declaration.from_dict({"operation": "paged", "cache": cache.to_dict(), "step": {
        "q_heads": HEADS, "q_lens": [1, 4], "kv_lens": [17, 9],
    }})  # fmt: skip
    arguments = paged, declared_step(file, cache.plan(mesh), "before")
    *_, report = target_reports(PlannedStep(*arguments), "here")
    assert report.passed
    (one,) = report.passes
    sent = one.collectives or ()
    assert {(own.kind, own.axes) for own in sent} == {("all-reduce", ("sp",))}
    assert sum(own.result_bytes for own in sent) == report.plan.problem.merges[0].size
    least = step_traffic(report.plan.problem)
    assert least.needs == one.needs
    assert sum(own.sent_bytes for own in sent) == least.sent_bytes
    for extra in (
        Collective("all-gather", 1, 8, 2, False, ("sp",)),
        Collective("all-reduce", 1, 8, 2, False, ("dp",)),
        Collective("all-reduce", 1, 2**20, 2, False, ("sp",)),
    ):
        assert unneeded(least, (*sent, extra)) == (extra,)
        monkeypatch.setattr("attnops.verify.passes.collectives", lambda *args, extra=extra: (*sent, extra))
        *_, failing = target_reports(PlannedStep(*arguments), "here")
        assert not failing.passed
        assert failing.passes[0].differences == (f"{extra.kind}: 1 over {extra.axes[0]} that nothing needs",)


def test_not_a_byte_more_than_needed_is_sent() -> None:
    """Over three devices, whose shares aren't whole numbers; by kind and mesh axes."""
    needed = 2 * (40 + 4) * 2 / 3
    least = Traffic((Need("all-reduce", needed, "merging outputs by lse", axes=("sp", "cp")),))
    sums = tuple(Collective("all-reduce", 1, size, 3, False, ("cp", "sp")) for size in (40, 4))
    assert unneeded(least, sums) == ()
    assert unneeded(Traffic(()), sums) == sums
    for extra in (dataclasses.replace(sums[1], count=2), dataclasses.replace(sums[1], axes=("sp",))):
        assert unneeded(least, (sums[0], extra)) == (extra,)


WIDE: dict[str, Any] = {
    "kind": "latent", "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64, "pages": 16, "max_length": 512
}  # fmt: skip
KERNEL: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "joined_sinks": (SPLIT | {"layout": "joined"}, {"sp": 2}, SINKS),
    "joined_int8_tp": (SPLIT | INT8 | {"layout": "joined"}, {"sp": 2, "tp": 2}, {"logits_soft_cap": 5.0}),
    "packed_dp": (SPLIT | {"layout": "packed", "value_dim": DIM, "pages_axis": "dp"}, {"dp": 2, "sp": 2}, SINKS),
    "latent_sp4": (SPLIT | LATENT | {"max_length": 68}, {"sp": 4}, SINKS),
    "latent_dp_int8": (SPLIT | INT8 | LATENT | {"pages_axis": "dp"}, {"dp": 2, "sp": 2}, {}),
    "latent_window": (SPLIT | LATENT | {"max_length": 68}, {"sp": 4}, {"sliding_window": (6, 0), "logits_soft_cap": 5.0} | SINKS),
    "joined_chunk_tp": (SPLIT | {"layout": "joined"}, {"sp": 2, "tp": 2}, {"chunk": 10} | SINKS),
    "latent_fused_two_axes": (
        LATENT | {"page_sequence_axis": ("sp", "ep"), "pages_axis": "dp"}, {"dp": 2, "ep": 2, "sp": 2}, {"update": "fused"}
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "way", [pytest.param(x, marks=[] if x == "latent_window" else [pytest.mark.slow]) for x in KERNEL]
)
def test_the_tpu_kernels_attend_to_each_devices_pages(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, and rows of one token, whose sequences end inside, before and behind each device's pages; some are on one device
    alone."""
    fields, axes, call = KERNEL[way]
    served, kernel = (
        Served(fields, axes, call),
        Served(fields, axes, call | {"configs": {"paged": {"interpret": True}}}),
    )
    rest: list[dict[str, int]] = [{}] * (served.shards - 1)
    served.run([{"a": 13, "b": 3}, *[{"z": 6}] * len(rest)])
    served.step, ran, tables = kernel.step, tpu_kernel.paged_attention_tpu, []

    def counted(*arrays: Any, **call: Any) -> Any:
        tables.append(call["page_table"].shape)
        return ran(*arrays, **call)

    monkeypatch.setattr(tpu_kernel, "paged_attention_tpu", counted)
    served.run([{"c": 4, "a": 7, "b": 1}, *[{"z": 5}] * len(rest)])
    for new in ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1}, {"c": 1, "d": 1, "a": 1}, {"a": 1}):
        served.run([new, *[{"z": 1}] * len(rest)], longest=1)
    assert tables == [(served.plan.local_sequences, served.plan.table_width // served.plan.sequence_shards)] * 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
@pytest.mark.parametrize("target", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("longest", [1, None])
def test_steps_on_each_devices_pages_compile(target: str, longest: int | None) -> None:
    """And sends what merges the outputs, of 128 heads in float32: no keys."""
    cache = FIELDS | WIDE | {"page_sequence_axis": "sp", "layers": 1, "dtype": "bfloat16", "pages": 128}
    step = {"q_heads": 128, "kv_lens": 400, "sequences": 8, "softmax_scale": 0.1, "dtype": "bfloat16"}
    if longest is None:
        step |= {"q_lens": 6, "sliding_window": [127, 0], "logits_soft_cap": 30.0, "softmax_aux": True}
    else:
        step |= {"max_q_len": longest}
    file = Declaration.from_dict({"operation": "paged", "cache": cache, "step": step})
    mesh = target_of(target).mesh({"sp": target_of(target).count})
    operation = OperationRegistry.create("paged", OperationMetadata(mesh=mesh, fallback="error"))
    assert file.cache is not None
    declared = declared_step(file, file.cache.plan(mesh).require(), "before")
    *_, report = target_reports(PlannedStep(operation, declared), target)
    assert [one.failure for one in report.passes] == [None]
    assert report.plan.implementation == "paged.forward_tpu"
    # XLA fails to print a tpu7x's program whose sums are asynchronous, so its kernels aren't known.
    assert report.passes[0].kernels or target.startswith("tpu7x")
    assert not report.passes[0].differences


@pytest.mark.parametrize(
    "change",
    [
        {"max_q_len": 1},
        {"max_q_len": 1, "sliding_window": (8, 0)},
        {"mask": Causal() & Chunked(32)},
        {"max_q_len": 2, "draft_tree": jax.ShapeDtypeStruct((8, 2, 2), jnp.bool_)},
        {"max_q_len": 1, "update": "fused"},
        {"spans": jax.ShapeDtypeStruct((8, 2), jnp.int32), "selected": jax.ShapeDtypeStruct((8, 3), jnp.int32)},
    ],
)
def test_steps_that_the_tpu_kernel_takes(change: dict[str, Any]) -> None:
    """All that it takes of whole sequences. Keys are written first, by the device that has their page."""
    cache = KVCache(**FIELDS | SPLIT | WIDE)
    paged = OperationRegistry.create("paged", OperationMetadata(mesh=described(sp=2), platform="tpu", fallback="error"))
    shapes = [jax.ShapeDtypeStruct((8, n, 576), jnp.float32) for n in (HEADS, 1)]
    plan = paged.plan(*shapes, None, cache=cache, softmax_scale=0.1, **change)
    assert plan.implementation == "paged.forward_tpu"
    geometry, options = tpu_kernel.tpu_call(plan.problem, plan.problem.config)
    assert (options.stride, options.writes, geometry.width) == (2, False, cache.plan(described(sp=2)).table_width // 2)
    assert ("paged.fused_spans" in [note.code for note in plan.notes]) == ("update" in change)


@pytest.mark.slow
def test_rows_that_see_nothing_anywhere() -> None:
    """0 and -inf, with a sink its own; in a batch whose sequences reach fewer pages than there are devices."""
    cache, mesh = KVCache(**FIELDS | SPLIT), mesh_of(sp=4)
    made = RaggedBatch.make(cache.plan(mesh), cu_q_lens=[0, 2], kv_lens=[2], page_table=[[8]])
    query, key, value = (jnp.ones((3, n, d), jnp.float32) for n, d in ((HEADS, DIM), (2, DIM), (2, 8)))
    for sinks in (None, np.zeros(HEADS, np.float32)):
        found = jax.jit(lambda s, b, sinks=sinks: attend(s, 0, b, query, key, value, mesh=mesh, sinks=sinks))(
            init(cache, mesh), made
        )
        logit = DIM**0.5
        first = logit if sinks is None else np.log(np.exp(logit) + 1)
        np.testing.assert_allclose(found.lse[0], first, rtol=1e-6)
        np.testing.assert_allclose(found.output[0], np.exp(logit - first), rtol=1e-6)
        assert np.isneginf(np.asarray(found.lse[2])).all()
        assert not np.asarray(found.output[2]).any()
