"""Sizes of a step over pages searched by static clock: what a batch makes the kernels do, and what their schedules say."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from attnops import Causal, Chunked, ConfigError, KVCache, OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.operators.paged.declared_step import DeclaredStep
from attnops.operators.paged.tpu_kernel import tpu_call
from attnops.operators.paged_cache import RaggedBatch
from attnops.planning.paged.step_tuning import step_key
from attnops.verify.paged_clock import LocalStep, StepCycles, Visits, kernels_of_step, step_visits
from attnops.verify.static_clock import Region
from attnops.verify.topology import described_mesh
from attnops.verify.tune_step import tune_step

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
PAGE = 16
LENGTHS = st.integers(1, 700)
ROWS = st.lists(st.tuples(LENGTHS, LENGTHS).map(lambda two: (min(two), max(two))), min_size=1, max_size=6)


def _step(rows: list[tuple[int, int]], mesh: Any, options: dict[str, Any], **cache: Any) -> tuple[Any, DeclaredStep]:
    """(operation, step) of these (queries, keys) of sequences."""
    fields = {"layers": 1, "kv_heads": 2, "head_dim": 128, "page_size": PAGE, "pages": 512, "max_sequences": 8,
              "max_length": 1024, "layout": "heads"}  # fmt: skip
    declared = KVCache(**fields | cache)
    tokens = sum(q for q, _ in rows)
    batch = RaggedBatch.make(
        declared.plan(), cu_q_lens=np.cumsum([0, *(q for q, _ in rows)]), kv_lens=[n for _, n in rows], tokens=tokens,
        page_table=[[64 * i + j for j in range(-(-n // PAGE))] for i, (_, n) in enumerate(rows)],
    )  # fmt: skip
    shape = lambda heads, dim: jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16)  # noqa: E731
    dims = declared.head_dim, declared.head_dim, declared.value_size
    arrays = [shape(h, d) for h, d in zip((4, 2, 2), dims, strict=True)]
    operation = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))
    named = dict(zip(("query", "key", "value"), arrays, strict=True))
    return operation, DeclaredStep(declared, 0, named, batch, options)


def _abstract() -> AbstractMesh:
    device = abstract_device("TPU v5 lite", 1, "tpu")
    return AbstractMesh((1,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=device)


@given(
    rows=ROWS,
    window=st.sampled_from([None, (0, 0), (40, 0), (300, 0)]),
    chunk=st.sampled_from([None, 16, 100, 256]),
    pages=st.sampled_from([1, 3, 8, 32]),
    queries=st.sampled_from([16, 48, 128]),
)
def test_counts_the_blocks_that_the_kernels_visit(
    rows: list[tuple[int, int]], window: tuple[int, int] | None, chunk: int | None, pages: int, queries: int
) -> None:
    """Against a matrix of what each row sees."""
    chunked = {} if chunk is None else {"mask": Causal() & Chunked(chunk)}
    operation, step = _step(rows, _abstract(), chunked | ({} if window is None else {"sliding_window": window}))
    plan = operation.plan(**step.arrays, cache=step.cache, batch=step.batch, **step.options)
    geometry, options = tpu_call(plan.problem, plan.problem.config)
    local = LocalStep(geometry, replace(options, pages_per_block=pages, queries_per_block=queries))
    counted = {"attnops_paged_decode": np.zeros(3, int), "attnops_paged_chunks": np.zeros(3, int)}
    for q, n in rows:
        keys = np.arange(n)
        for at in range(0, q, queries if q > 1 else 1):
            places = np.arange(n - q + at, n - q + at + (1 if q == 1 else queries))[:, None]
            sees = keys <= places
            if window is not None:
                sees &= keys >= places - window[0]
            if chunk is not None:
                sees &= keys // chunk == places // chunk
            real = sees[places[:, 0] < n]
            live = np.flatnonzero([real[:, p : p + PAGE].any() for p in range(0, n, PAGE)])
            blocks = [range(first, min(first + pages, live[-1] + 1)) for first in range(live[0], live[-1] + 1, pages)]
            whole = 0
            for block in blocks if q > 1 else ():
                part = sees[:, block[0] * PAGE : (block[-1] + 1) * PAGE]
                whole += part.all() and part.shape[1] == pages * PAGE
            name = "attnops_paged_chunks" if q > 1 else "attnops_paged_decode"
            counted[name] += whole, len(blocks) - whole, 1
    found = step_visits(plan.problem, local, step.batch)
    assert set(found) == set(kernels_of_step(local))
    assert {name: tuple(x) for name, x in found.items()} == {n: tuple(x) for n, x in counted.items() if n in found}


@given(
    rows=ROWS,
    window=st.sampled_from([None, (0, 0), (300, 0)]),
    count=st.sampled_from([1, 40, 2000]),
    layout=st.sampled_from(["split", "heads"]),
)
def test_counts_the_blocks_of_selected_keys(
    rows: list[tuple[int, int]], window: tuple[int, int] | None, count: int, layout: str
) -> None:
    """As many as keys can make that lie as far from one another as they can: one of each 8, or alone where tokens come first."""
    options = {} if window is None else {"sliding_window": window}
    operation, step = _step(rows, _abstract(), options, layout=layout)
    chosen = jax.ShapeDtypeStruct((sum(q for q, _ in rows), count), jnp.int32)
    plan = operation.plan(**step.arrays, selected=chosen, cache=step.cache, batch=step.batch, **options)
    geometry, sized = tpu_call(plan.problem, plan.problem.config)
    local = LocalStep(geometry, replace(sized, pages_per_block=4))
    tokens_a_piece = 1 if layout == "split" else 8
    most = min(4 * PAGE // tokens_a_piece, 128, count)  # pieces in a block
    blocks = 0
    for q, n in rows:
        for position in range(n - q, n):
            seen = range(0 if window is None else max(0, position - window[0]), position + 1)
            blocks += -(-min(len({j // tokens_a_piece for j in seen}), count) // most)
    assert step_visits(plan.problem, local, step.batch) == {
        "attnops_paged_selected": Visits(0, blocks, sum(q for q, _ in rows))
    }
    assert kernels_of_step(local) == ("attnops_paged_selected",)


@given(
    rows=ROWS,
    window=st.sampled_from([None, (40, 0)]),
    pages=st.sampled_from([1, 3]),
    queries=st.sampled_from([16, 48]),
    stride=st.sampled_from([2, 4]),
    count=st.sampled_from([None, 9]),
)
def test_counts_the_blocks_of_the_device_with_most(
    rows: list[tuple[int, int]], window: Any, pages: int, queries: int, stride: int, count: int | None
) -> None:
    """Of pages that are on several devices in turn; against a matrix of what each row sees."""
    options = {} if window is None else {"sliding_window": window}
    operation, step = _step(rows, _abstract(), options)
    chosen = {} if count is None else {"selected": jax.ShapeDtypeStruct((sum(q for q, _ in rows), count), jnp.int32)}
    plan = operation.plan(**step.arrays, **chosen, cache=step.cache, batch=step.batch, **options)
    geometry, sized = tpu_call(plan.problem, plan.problem.config)
    sized = replace(sized, pages_per_block=pages, queries_per_block=queries, stride=stride)
    found = step_visits(plan.problem, LocalStep(geometry, sized), step.batch)
    totals = []
    for device in range(stride):
        counted = {"attnops_paged_decode": 0, "attnops_paged_chunks": 0, "attnops_paged_selected": 0}
        for q, n in rows:
            size = 1 if q == 1 or count else queries
            for at in range(0, q, size):
                places = np.arange(n - q + at, min(n - q + at + size, n))[:, None]
                keys = np.arange(n)
                sees = ((keys <= places) & (keys >= places - (n if window is None else window[0]))).any(axis=0)
                if count is None:
                    live = [
                        p
                        for p in range(-(-n // PAGE))
                        if p % stride == device and sees[p * PAGE : p * PAGE + PAGE].any()
                    ]
                    name = "attnops_paged_decode" if q == 1 else "attnops_paged_chunks"
                    counted[name] += -(-len(live) // pages)
                else:
                    mine = np.flatnonzero(sees & (keys // PAGE % stride == device))
                    counted["attnops_paged_selected"] += -(-min(count, len({*(mine // 8)})) // min(2 * pages, count))
        totals.append(counted)
    most = max(totals, key=lambda counted: sum(counted.values()))
    blocks = {name: counted.whole + counted.masked for name, counted in found.items()}
    assert sum(blocks.values()) == sum(most.values())
    assert {n: x for n, x in blocks.items() if x} in [{n: x for n, x in one.items() if x} for one in totals]


def test_a_kernel_that_writes_is_tuned_apart() -> None:
    operation, step = _step([(1, 40)], _abstract(), {"max_q_len": 1})
    keys = []
    for update in ("before", "fused"):
        plan = operation.plan(**step.arrays, cache=step.cache, batch=step.batch, update=update)
        keys.append(step_key(plan.method, plan.problem))
        assert tpu_call(plan.problem, plan.problem.config)[1].writes == (update == "fused")
    assert keys[0] != keys[1]


def _tree(start: int, end: int, *inside: Region, loop: bool = False, products: int = 0) -> Region:
    return Region(start, end, loop, products, 0, list(inside))


def test_reads_the_cycles_of_each_path() -> None:
    """Of 900 cycles around a block: a loop of 50 over single pages, and two paths of 100 and 200, mostly loops over heads."""
    operation, step = _step([(20, 40)], _abstract(), {})
    plan = operation.plan(**step.arrays, cache=step.cache, batch=step.batch)
    local = LocalStep(*tpu_call(plan.problem, plan.problem.config))
    paths = [
        _tree(300, 400, _tree(305, 395, loop=True, products=50), products=50),
        _tree(400, 600, _tree(410, 600, loop=True, products=52), products=52),
    ]
    walk = _tree(100, 1000, _tree(150, 200, loop=True), *paths, loop=True, products=102)
    root = _tree(0, 1200, _tree(10, 1190, walk, loop=True, products=102), products=102)
    rest = 900 - 50 - 100 - 200
    assert local.read("attnops_paged_chunks", root) == StepCycles(rest + 100 + 90, rest + 200 + 190, 1200 - 900)
    assert Visits(3, 2, 1).cycles(StepCycles(10, 20, 7)) == 77
    with pytest.raises(ConfigError, match="no loop over blocks"):
        local.read("attnops_paged_chunks", _tree(0, 10, products=4))


CALLS: dict[str, tuple[list[tuple[int, int]], dict[str, Any], dict[str, Any]]] = {
    "decode": ([(1, 500), (1, 64)], {"max_q_len": 1}, {}),
    "mixed": ([(1, 500), (64, 200)], {"sliding_window": (99, 0)}, {"layout": "joined"}),
    "split": ([(1, 500), (64, 200)], {}, {"layout": "split"}),
    "chunked": ([(1, 500), (64, 200)], {"mask": Causal() & Chunked(128)}, {}),
    "int8": ([(1, 500), (64, 200)], {"update": "fused"}, {"quantised": {"dtype": "int8"}}),
    "selected": ([(1, 500), (2, 64)], {"selected": jax.ShapeDtypeStruct((3, 128), jnp.int32)}, {"layout": "joined"}),
    "int8_head": ([(1, 500)], {"max_q_len": 1}, {"quantised": {"dtype": "int8", "scale": "head"}, "page_size": 32}),
}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("decode", "v5e:2x2"),
        ("selected", "v5e:2x2"),
        *(pytest.param(n, "v5e:2x2", marks=pytest.mark.slow) for n in CALLS if n not in ("decode", "selected")),
        *(pytest.param("int8", t, marks=pytest.mark.slow) for t in ("v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")),
    ],
)
def test_a_search_by_static_clock(name: str, topology: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks take more cycles, and the fastest is what later plans use."""
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    rows, options, cache = CALLS[name]
    whole = described_mesh(topology)
    mesh = jax.sharding.Mesh(whole.devices.reshape(-1)[:1], ("tp",))
    operation, step = _step(rows, mesh, options, **{k: v for k, v in cache.items() if k != "page_size"})
    report = tune_step(operation, step, how="static", most=2)
    measured = report.measured("step")
    assert [one.failure for one in measured] == [None] * len(report.candidates["step"])
    assert all(one.detail["cycles"] > 0 for one in measured)
    best = min(measured, key=lambda one: one.seconds or 0.0)
    plan = operation.plan(**step.arrays, cache=step.cache, batch=step.batch, **options)
    assert plan.tuning.source == "cache"
    assert {name: getattr(plan.config, name) for name in best.fields} == best.fields


def test_a_search_that_cannot_be_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path))
    operation, step = _step([(1, 40)], _abstract(), {"max_q_len": 1}, page_size=PAGE)
    with pytest.raises(ConfigError, match="this machine has cpu"):
        tune_step(operation, step, how="device")
    if find_spec("libtpu") is not None:
        empty = step.batch.__class__.make(
            step.cache.plan(), cu_q_lens=[0], kv_lens=[], page_table=[], tokens=step.arrays["query"].shape[0]
        )
        with pytest.raises(ConfigError, match="no queries"):
            tune_step(operation, step._replace(batch=empty), how="static")
    if find_spec("libtpu") is not None:
        operation, step = _step([(1, 40)], _abstract(), {"max_q_len": 1}, head_dim=64)
        with pytest.raises(ConfigError, match="only the kernels for TPUs"):
            tune_step(operation, step, how="static")
