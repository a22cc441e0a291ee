"""Pages that somebody else owns: the three signatures against the float64 reference, and against JAX's own definition."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention as jaxs,
)
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ref_ragged_paged_attention as jaxs_definition,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import ConfigError, InputError, RefusedError
from attnops.adapters.ragged_paged import (
    ragged_paged_attention_sglang,
    ragged_paged_attention_v2,
    ragged_paged_attention_v3,
)
from attnops.errors import InputTypeError
from attnops.planning.notes import has_note
from attnops.verify.closeness import row_error, row_sizes
from attnops.verify.paged_reference import paged_reference

SEQUENCES = ((5, 5), (1, 17), (9, 30), (1, 8), (3, 11))  # (queries, keys after the step)
TOLERANCE = {"float32": 4e-6, "bfloat16": 1.5e-2}  # as paged publishes
PAGE, WIDTH, ROWS, SPARE = 8, 5, 7, 3
INT = np.int32
_FP8 = ("float8_e4m3fn", "float8_e5m2")


class Case(NamedTuple):
    """heads: of queries and of keys. dtype: of the queries; stored: of the pages, the queries' if None."""

    heads: tuple[int, int] = (4, 2)
    dim: int = 128
    dtype: str = "float32"
    stored: str | None = None
    layout: str = "packed"

    @property
    def kept(self) -> Any:
        return jnp.dtype(self.stored or self.dtype)


class Made(NamedTuple):
    """query, key, value [tokens, heads, dim]; plain pages before and after [pages, page, kv_heads, dim]; the batch."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    before: tuple[np.ndarray, np.ndarray]
    after: tuple[np.ndarray, np.ndarray]
    kv_lens: np.ndarray
    table: np.ndarray
    starts: np.ndarray

    @property
    def live(self) -> int:
        return int(self.starts[len(SEQUENCES)])


def make(case: Case, *, junk: int = 0) -> Made:
    """A step whose pages hold NaN wherever no token lies; behind a sequence's pages the table has the id `junk`."""
    random = np.random.default_rng(7)
    (heads, kv_heads), dim, tokens = case.heads, case.dim, sum(q for q, _ in SEQUENCES)

    def draw(*shape: int, dtype: Any) -> np.ndarray:
        x = random.standard_normal(shape).astype(np.float32)
        return np.round(40 * x).clip(-127, 127).astype(np.int8) if dtype == np.int8 else x.astype(dtype)

    count = tokens + SPARE
    query = draw(count, heads, dim, dtype=jnp.dtype(case.dtype))
    key, value = (draw(count, kv_heads, dim, dtype=case.kept) for _ in range(2))
    pages = ROWS * WIDTH
    empty = 99 if case.kept == np.int8 else np.nan
    before = [np.full((pages, PAGE, kv_heads, dim), empty).astype(case.kept) for _ in range(2)]
    free, table = list(random.permutation(pages)), np.full((ROWS, WIDTH), junk, INT)
    kv_lens, starts = np.full(ROWS, 5, INT), np.zeros(ROWS + 1, INT)
    starts[1 : len(SEQUENCES) + 1] = np.cumsum([q for q, _ in SEQUENCES])
    for row, (queries, length) in enumerate(SEQUENCES):
        kv_lens[row] = length
        table[row, : -(-length // PAGE)] = [free.pop() for _ in range(-(-length // PAGE))]
        for place in range(length - queries):
            for x in before:
                x[table[row, place // PAGE], place % PAGE] = draw(kv_heads, dim, dtype=case.kept)
    after = [x.copy() for x in before]
    for row, (queries, length) in enumerate(SEQUENCES):
        for n in range(queries):
            place = length - queries + n
            for x, new in zip(after, (key, value), strict=True):
                x[table[row, place // PAGE], place % PAGE] = new[starts[row] + n]
    return Made(query, key, value, (before[0], before[1]), (after[0], after[1]), kv_lens, table, starts)


def theirs(case: Case, pages: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Plain pages as one array, written out cell by cell as their packages describe it."""
    key, value = pages
    count, page, kv_heads, dim = key.shape
    if case.layout == "interleaved":
        found = np.zeros((count, page, 2 * kv_heads, dim), key.dtype)
        found[:, :, 0::2], found[:, :, 1::2] = key, value
        return found
    pack = 4 // key.dtype.itemsize
    words = -(-2 * kv_heads // pack)
    found = np.zeros((count, page, words, pack, -(-dim // 128) * 128), key.dtype)
    for head in range(kv_heads):
        for half, x in enumerate((key, value)):
            word, part = divmod(2 * head + half, pack)
            found[:, :, word, part, :dim] = x[:, :, head]
    return found


def wanted(made: Made, pages: tuple[np.ndarray, np.ndarray], **call: Any) -> Any:
    given = {"softmax_scale": 1.0, "cu_q_lens": made.starts, "kv_lens": made.kv_lens, "page_table": made.table}
    query = call.pop("query", made.query).astype(np.float64)
    return paged_reference(query, *pages, num_seqs=len(SEQUENCES), **given | call)


def agree(got: Any, want: Any, dtype: str, tolerance: float | None = None) -> None:
    error = row_error(np.asarray(got, np.float64), want.output, row_sizes(want.output, want.sizes), dtype)
    assert error <= (tolerance or TOLERANCE[dtype]), f"{error:.2e}"


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def v3_arguments(case: Case, made: Made) -> tuple[Any, ...]:
    last = np.array([1, 3, len(SEQUENCES)], INT)
    arrays = (made.query, made.key, made.value, theirs(case, made.before))
    return tuple(map(jnp.asarray, (*arrays, made.kv_lens, made.table.reshape(-1), made.starts, last)))


def sglang_arguments(case: Case, made: Made) -> tuple[Any, ...]:
    """Page ids of one sequence after the other, without gaps; each sequence's keys begin at a whole page."""
    held = [-(-length // PAGE) for _, length in SEQUENCES]
    ids = np.concatenate([made.table[row, :n] for row, n in enumerate(held)])
    cu_kv_lens = np.zeros(ROWS + 1, INT)
    cu_kv_lens[1:] = PAGE * sum(held)
    cu_kv_lens[: len(held) + 1] = PAGE * np.cumsum([0, *held])
    last = np.array([0, 0, len(SEQUENCES)], INT)
    arrays = (made.query, made.key, made.value, theirs(case, made.before))
    return tuple(map(jnp.asarray, (*arrays, made.kv_lens, ids, made.starts, cu_kv_lens, last)))


def test_the_signatures_are_theirs() -> None:
    ours, own = inspect.signature(ragged_paged_attention_v2), inspect.signature(jaxs)
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in own.parameters.values()
    ]
    blocks = dict.fromkeys(
        ("chunk_prefill_size", "d_block_sizes", "p_block_sizes", "m_block_sizes", "vmem_limit_bytes")
    )
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"))
    shared = {"sm_scale": 1.0, "sliding_window": None, "soft_cap": None, "out_dtype": None, "skip_kv_mask": False}
    shared |= {"debug_mode": False, "disable_semaphore_checks": True} | blocks | scales
    hides = -0.7 * float(np.finfo(np.float32).max)
    v3 = {"use_causal_mask": True, "update_kv_cache": True, "mask_value": None, "disable_bounds_checks": True}
    sglang = {"causal": 1, "mask_value": hides, "xai_temperature_len": None, "softmax_dtype": None}
    sglang |= {"mask_aligned_to_cu_kv": False, "attention_sink": None}
    for function, positional, defaults in (
        (
            ragged_paged_attention_v3,
            "queries keys values kv_cache kv_lens page_indices cu_q_lens distribution",
            shared | v3,
        ),
        (
            ragged_paged_attention_sglang,
            "queries keys values kv_cache_fused kv_lens page_indices cu_q_lens cu_kv_lens distribution custom_mask "
            "attention_sink",
            shared | sglang,
        ),
    ):
        parameters = inspect.signature(function).parameters
        assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional.split()
        assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == defaults


V3: list[tuple[Case, dict[str, Any]]] = [
    (Case(), {"sm_scale": 128**-0.5}),
    (Case(dtype="bfloat16"), {"sm_scale": 0.1, "sliding_window": 6}),
    (Case(dtype="float32", stored="bfloat16", heads=(6, 6), dim=64), {"sm_scale": 0.1, "soft_cap": -4.0}),
    (
        Case(dim=80, heads=(5, 1)),
        {"sm_scale": 0.1, "soft_cap": 3.0, "sliding_window": 9, "k_scale": 1.5, "v_scale": 0.5},
    ),
    (Case(heads=(3, 3)), {"sm_scale": 0.1, "use_causal_mask": False}),
    (Case(dim=64), {"sm_scale": 0.1, "use_causal_mask": False, "sliding_window": 4}),
]


@pytest.mark.parametrize(("case", "call"), V3, ids=[str(n) for n in range(len(V3))])
def test_v3_attends_and_writes(case: Case, call: dict[str, Any]) -> None:
    made = make(case, junk=-1)
    step = jax.jit(partial(ragged_paged_attention_v3, **call), donate_argnums=3)
    arrays = v3_arguments(case, made)
    output, cache = step(*arrays)
    assert arrays[3].is_deleted()
    assert (output.dtype, output.shape) == (case.dtype, made.query.shape)
    causal, window = call.get("use_causal_mask", True), call.get("sliding_window")
    want = wanted(
        made,
        made.after,
        softmax_scale=call["sm_scale"],
        causal=causal,
        sliding_window=None if window is None else (window - 1, None),
        logits_soft_cap=None if call.get("soft_cap") is None else abs(call["soft_cap"]),
        key_scale=call.get("k_scale"),
        value_scale=call.get("v_scale"),
    )
    agree(output, want, case.dtype)
    assert (np.asarray(output)[made.live :] == 0).all()
    np.testing.assert_array_equal(bits(cache), bits(theirs(case, made.after)))


@pytest.mark.parametrize(
    ("case", "call"),
    [
        (Case(dtype="bfloat16", dim=64), {"sm_scale": 0.1, "sliding_window": 6}),
        (Case((4, 1), dtype="bfloat16", stored="float8_e4m3fn"), {"sm_scale": 0.1}),
    ],
)
@pytest.mark.slow
def test_v3_on_attnops_tpu_kernel(case: Case, call: dict[str, Any]) -> None:
    """Interpreted. The last one's pages have room for a second kv head."""
    made, function = make(case), ragged_paged_attention_v3.declare(interpret=True)
    arrays = v3_arguments(case, made)
    assert function.plan(*arrays, **call).implementation == "paged.forward_tpu"
    output, cache = jax.jit(partial(function, **call))(*arrays)
    window = call.get("sliding_window")
    left = None if window is None else (window - 1, None)
    agree(output, wanted(made, made.after, softmax_scale=0.1, sliding_window=left), case.dtype)
    np.testing.assert_array_equal(bits(cache), bits(theirs(case, made.after)))


@pytest.mark.parametrize("stored", _FP8)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)])  # 1 and 3 kv heads don't fill words of 32 bits
def test_v3_keeps_quantised_keys_as_they_come(stored: str, heads: tuple[int, int]) -> None:
    case = Case(heads, dtype="bfloat16", stored=stored)
    made = make(case)
    call = {"sm_scale": 0.1, "k_scale": 0.25, "v_scale": 0.3}
    output, cache = ragged_paged_attention_v3(*v3_arguments(case, made), **call)
    want = wanted(made, made.after, softmax_scale=0.1, key_scale=0.25, value_scale=0.3)
    agree(output, want, "bfloat16")
    np.testing.assert_array_equal(bits(cache), bits(theirs(case, made.after)))

    output, _ = ragged_paged_attention_v3(*v3_arguments(case, made), **call, q_scale=0.04, soft_cap=2.0)
    most = float(jnp.finfo(stored).max)
    divided = (made.query / np.asarray(0.04, jnp.bfloat16)).astype(np.float32)
    rounded = np.asarray(jnp.asarray(divided.clip(-most, most)).astype(stored)).astype(np.float64) * 0.04
    want = wanted(
        made, made.after, query=rounded, softmax_scale=0.1, key_scale=0.25, value_scale=0.3, logits_soft_cap=2.0
    )
    agree(output, want, "bfloat16")


def test_v3_without_an_update_reads_the_pages_alone() -> None:
    case = Case()
    made = make(case)
    arrays = list(v3_arguments(case, made))
    arrays[3] = jnp.asarray(theirs(case, made.after))
    call = {"sm_scale": 0.1, "update_kv_cache": False}
    output, cache = ragged_paged_attention_v3(*arrays, **call)
    arrays[1] = arrays[2] = jnp.full_like(arrays[1], jnp.nan)
    again, _ = ragged_paged_attention_v3(*arrays, **call)
    agree(output, wanted(made, made.after, softmax_scale=0.1), "float32")
    np.testing.assert_array_equal(output, again)
    np.testing.assert_array_equal(bits(cache), bits(arrays[3]))
    assert ragged_paged_attention_v3.plan(*arrays, **call).problem.update == "none"


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bfloat16", jnp.float32), ("float32", "bfloat16"), ("bfloat16", None)]
)
def test_the_output_has_the_dtype_that_was_asked_for(dtype: str, out_dtype: Any) -> None:
    case = Case(dtype=dtype)
    made = make(case)
    output, _ = ragged_paged_attention_v3(*v3_arguments(case, made), sm_scale=0.1, out_dtype=out_dtype)
    assert output.dtype == jnp.dtype(out_dtype or dtype)
    narrow = "bfloat16" if output.dtype == jnp.bfloat16 else "float32"
    agree(output, wanted(made, made.after, softmax_scale=0.1), narrow)


V2: list[tuple[Case, dict[str, Any]]] = [
    (Case(), {"sm_scale": 0.1, "soft_cap": 5.0}),
    (Case(dtype="bfloat16", dim=64, heads=(6, 3)), {"sm_scale": 0.1, "sliding_window": 7, "mask_value": None}),
    (Case(stored="int8"), {"sm_scale": 0.02, "k_scale": 0.02, "v_scale": 0.03}),
    (Case(stored="int8", heads=(4, 1)), {"sm_scale": 3e-4}),
    (Case(stored="float8_e5m2", dtype="bfloat16"), {"sm_scale": 0.1, "k_scale": 0.5, "v_scale": 2.0}),
]


@pytest.mark.parametrize(("case", "call"), V2, ids=[str(n) for n in range(len(V2))])
@pytest.mark.parametrize("jit", [False, True])
def test_v2_attends_to_pages_that_have_the_keys(case: Case, call: dict[str, Any], jit: bool) -> None:
    case = case._replace(layout="interleaved")
    made = make(case)
    pages = theirs(case, made.after)
    arrays = (made.query, pages, made.kv_lens, made.table, made.starts, np.array([len(SEQUENCES)], INT))
    step = partial(ragged_paged_attention_v2, **call)
    output = (jax.jit(step) if jit else step)(*arrays)
    window = call.get("sliding_window")
    want = wanted(
        made,
        made.after,
        softmax_scale=call["sm_scale"],
        sliding_window=None if window is None else (window - 1, 0),
        logits_soft_cap=call.get("soft_cap"),
        key_scale=call.get("k_scale", 1.0 if case.stored else None),
        value_scale=call.get("v_scale", 1.0 if case.stored else None),
    )
    agree(output, want, case.dtype)
    if case.stored is None and case.dtype == "float32":
        own = jaxs_definition(*map(jnp.asarray, arrays), **call)
        np.testing.assert_allclose(output[: made.live], own, atol=2e-5)


def test_rows_that_only_read_may_share_the_pages_of_their_tokens() -> None:
    """Known values are checked; nothing is written, so nothing is overwritten."""
    case = Case(layout="interleaved")
    made = make(case)
    table = made.table.copy()
    table[3] = table[1]  # the single token of row 3 lies in a page of row 1
    made = made._replace(table=table)
    arrays = (made.query, theirs(case, made.after), made.kv_lens, table, made.starts, np.array([len(SEQUENCES)], INT))
    output = ragged_paged_attention_v2(*arrays, sm_scale=0.1)
    agree(output, wanted(made, made.after, softmax_scale=0.1), "float32")
    arrays_v3 = list(v3_arguments(Case(), made))
    with pytest.raises(InputError, match="its tokens go to page"):
        ragged_paged_attention_v3(*arrays_v3, sm_scale=0.1)


SGLANG: list[tuple[Case, dict[str, Any]]] = [
    (Case(), {"sliding_window": 6}),
    (Case(dtype="bfloat16", heads=(6, 3)), {"attention_sink": np.linspace(-1, 2, 6, dtype=np.float32)}),
    (Case(dim=64), {"attention_sink": 0.5, "causal": 0}),
    (Case(layout="interleaved", heads=(4, 1)), {"soft_cap": 3.0, "softmax_dtype": jnp.float32}),
    (
        Case(heads=(4, 1), dtype="bfloat16", stored="float8_e4m3fn"),
        {"attention_sink": 1.0, "k_scale": 0.5, "v_scale": 0.5},
    ),
]


@pytest.mark.parametrize(("case", "call"), SGLANG, ids=[str(n) for n in range(len(SGLANG))])
@pytest.mark.parametrize("max_length", [None, 32])
def test_sglang_attends_and_writes(case: Case, call: dict[str, Any], max_length: int | None) -> None:
    made = make(case)
    function = ragged_paged_attention_sglang.declare(max_length=max_length)
    sink = call.get("attention_sink")
    static = {name: x for name, x in call.items() if name != "attention_sink"}
    step = jax.jit(
        lambda *arrays: function(*arrays, None, None if sink is None else jnp.asarray(sink), sm_scale=0.1, **static),
        donate_argnums=3,
    )
    arrays = sglang_arguments(case, made)
    output, cache = step(*arrays)
    window = call.get("sliding_window")
    want = wanted(
        made,
        made.after,
        softmax_scale=0.1,
        causal=bool(call.get("causal", 1)),
        sliding_window=None if window is None else (window - 1, 0),
        logits_soft_cap=call.get("soft_cap"),
        sinks=None if sink is None else np.broadcast_to(sink, case.heads[:1]),
        key_scale=call.get("k_scale"),
        value_scale=call.get("v_scale"),
    )
    agree(output, want, case.dtype)
    np.testing.assert_array_equal(bits(cache), bits(theirs(case, made.after)))
    assert function.plans[0].cache.cache.max_length == (max_length or PAGE * len(arrays[5]))


def test_on_a_mesh_each_device_has_its_heads() -> None:
    case = Case(heads=(8, 4))
    made = make(case)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    alone, cache = ragged_paged_attention_v3(*v3_arguments(case, made), sm_scale=0.1)
    heads, pages = P(None, "tp"), P(None, None, "tp")
    specs = (heads, heads, heads, pages, P(), P(), P(), P())
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(v3_arguments(case, made), specs, strict=True)]
    function = ragged_paged_attention_v3.declare(mesh=mesh)
    step = jax.jit(partial(function, sm_scale=0.1), donate_argnums=3)
    assert "all-gather" not in step.lower(*placed).compile().as_text()
    output, after = step(*placed)
    np.testing.assert_allclose(output, alone, atol=2e-6)
    np.testing.assert_array_equal(bits(after), bits(cache))
    assert after.sharding.spec == P(None, None, "tp")
    (plan,) = function.plans
    assert plan.problem.local_heads == (4, 2)

    # As vLLM and SGLang call their kernels: inside a shard_map of their own, with a device's own heads.
    inside = jax.shard_map(
        partial(ragged_paged_attention_v3, sm_scale=0.1),
        mesh=mesh,
        in_specs=specs,
        out_specs=(heads, pages),
        check_vma=False,
    )
    placed[3] = jax.device_put(v3_arguments(case, made)[3], NamedSharding(mesh, pages))
    output, after = jax.jit(inside)(*placed)
    np.testing.assert_allclose(output, alone, atol=2e-6)
    np.testing.assert_array_equal(bits(after), bits(cache))
    assert ragged_paged_attention_v3.plans[-1].problem.kv_heads == 2


def test_a_plan_tells_what_is_not_read() -> None:
    case = Case()
    made = make(case)
    arrays = v3_arguments(case, made)
    blocks = {"m_block_sizes": (64, 64, 8, 8), "vmem_limit_bytes": 2**20, "chunk_prefill_size": 4}
    plan = ragged_paged_attention_v3.plan(*arrays, **blocks)
    (told,) = (note for note in plan.notes if "vmem_limit_bytes" in note)
    assert all(name in told for name in blocks)
    assert any(note.startswith("distribution") for note in plan.notes)
    assert plan.reads.queries == made.live
    assert plan.problem.softmax_scale == 1.0
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    assert ragged_paged_attention_v3.plan(*shapes, **blocks).notes == plan.notes
    assert "m_block_sizes" in ragged_paged_attention_v3.explain(*shapes, **blocks)
    assert not has_note(ragged_paged_attention_v3.plan(*shapes).notes, "foreign.unread")
    # The sizes of this package's own blocks are declared.
    own = ragged_paged_attention_v3.declare(pages_per_block=2).plan(*shapes)
    assert own.config.pages_per_block == 2


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        ({"custom_mask": np.ones(9, bool), "causal": 0}, ConfigError, "custom_mask"),
        ({"xai_temperature_len": 512.0}, ConfigError, "xai_temperature_len"),
        ({"softmax_dtype": jnp.bfloat16}, ConfigError, "softmax_dtype"),
        ({"mask_value": -10.0}, ConfigError, "mask_value"),
        ({"debug_mode": True}, ConfigError, "debug_mode"),
        ({"causal": 2}, InputError, "causal"),
        ({"sliding_window": 0}, InputError, "sliding_window"),
        ({"sliding_window": (3, 0)}, InputTypeError, "sliding_window"),
        ({"soft_cap": 0.0}, InputError, "soft_cap"),
        ({"sm_scale": float("nan")}, InputError, "sm_scale"),
        ({"k_scale": np.ones(2)}, InputTypeError, "k_scale"),
        ({"out_dtype": "int8"}, InputTypeError, "out_dtype"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(call: dict[str, Any], error: type[Exception], name: str) -> None:
    arrays = sglang_arguments(Case(), make(Case()))
    with pytest.raises(error, match=name):
        ragged_paged_attention_sglang(*arrays, **{"custom_mask": None} | call)
    others = {"mask_value", "debug_mode", "sliding_window", "soft_cap", "sm_scale", "k_scale", "out_dtype"}
    if name in others:
        with pytest.raises(error, match=name):
            ragged_paged_attention_v3.plan(*v3_arguments(Case(), make(Case())), **call)


def test_pages_of_another_form_are_refused() -> None:
    case = Case()
    arrays = list(v3_arguments(case, make(case)))
    for change, wrong in (
        (lambda x: x[..., :64], "lanes"),
        (lambda x: x[:, :, :1], "2 kv heads"),
        (lambda x: x[0], "pages"),
    ):
        with pytest.raises(InputError, match=wrong):
            ragged_paged_attention_v3(*arrays[:3], change(arrays[3]), *arrays[4:])
    with pytest.raises(InputTypeError, match="key is float32, but the cache is declared bfloat16"):
        ragged_paged_attention_v3(
            *arrays[:3], theirs(Case(stored="bfloat16"), make(Case(stored="bfloat16")).before), *arrays[4:]
        )
    with pytest.raises(InputTypeError, match="kv_lens is int64"):
        ragged_paged_attention_v3(*arrays[:4], np.asarray(arrays[4], np.int64), *arrays[5:])
    with pytest.raises(InputError, match="34 ids for 7 rows"):
        ragged_paged_attention_v3(*arrays[:5], arrays[5][:-1], *arrays[6:])
    with pytest.raises(InputError, match="skip_kv_mask"):
        ragged_paged_attention_v3(*arrays, skip_kv_mask=True)


def test_what_is_declared_is_an_operation_over_pages() -> None:
    function = ragged_paged_attention_v3
    for name, keywords, wrong in (
        ("vanilla", {}, "doesn't attend over pages"),
        ("paged", {"sliding_window": (3, 0)}, "sliding_window"),
        ("a.json", {}, "wanted the name of an operation"),
        ("paged", {"max_length": 0}, "max_length"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            function.declare(name, **keywords)
    case = Case()
    made = make(case)
    arrays = v3_arguments(case, made)
    preset = function.declare("ragged_page_attention_v3")
    np.testing.assert_array_equal(preset(*arrays)[0], function(*arrays)[0])
    with pytest.raises(RefusedError, match="stands for pages of layout 'interleaved'"):
        function.declare("ragged_page_attention_v2")(*arrays)
