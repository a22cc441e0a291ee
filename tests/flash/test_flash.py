"""The parts of the kernels for GPUs: visited tiles, head dims, fp8 from bits; the config, the plan, and who runs them where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from attnops import (
    T5,
    ALiBi,
    Blocks,
    Causal,
    ConfigError,
    Full,
    Mask,
    OperationMetadata,
    OperationRegistry,
    Prefix,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SlidingWindow,
    register_score_function,
)
from attnops.compat import abstract_device
from attnops.devices import gpu_specs, gpu_variant
from attnops.operators.flash import FlashAttention2Config, flash_sizes
from attnops.operators.flash.kernel.flash_sizes import dim_parts
from attnops.operators.flash.kernel.fp8 import as_bits, from_bits
from attnops.operators.flash.kernel.tile_schedule import TileSchedule, tile_schedule
from attnops.operators.kernels.local_mask import LocalMask
from attnops.planning.notes import has_note, is_info
from attnops.verify import reference_gradients
from attnops.verify.devices import tracing_on
from attnops.verify.local_call import LocalProblem

MASKS = (
    Full(), Causal(), ~Causal(), SlidingWindow(20, 3), SlidingWindow(5) & Causal(), Prefix(30) | Causal(), ~SlidingWindow(20, 20),
    ~Full(),
)  # fmt: skip


def _visited(table: TileSchedule, row: int, part: int, parts: int) -> list[tuple[int, bool]]:
    """(tile, masked) in the order of the kernel's loops, by the arithmetic of a program that isn't traced."""
    found: list[tuple[int, bool]] = []
    array = np.asarray(table.table)

    def visit(tile: jax.Array, carry: jax.Array, masked: bool) -> jax.Array:
        jax.debug.callback(lambda n: found.append((int(n), masked)), tile, ordered=True)
        return carry

    with jax.disable_jit():
        table.fold_tiles(jnp.asarray(array), 0, 0, row, part, parts, visit, jnp.zeros(()))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MASKS), st.integers(1, 150), st.integers(1, 150), st.sampled_from((16, 32)), st.sampled_from((16, 64)),
    st.sampled_from(("q", "kv")), st.integers(0, 40), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_every_live_tile_is_visited_once(
    mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, slow: str, start: int, parts: int, asks: bool
) -> None:
    _check_visits(mask, (q_len, kv_len), (block_q, block_kv), slow, start, parts, asks=asks)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("mask", "kv_len", "asked"),
    [
        (Causal(), 128, True),  # one tile of eight has a mask
        (Causal(), 112, False),  # one of seven
        (Full(), 150, True),  # the padded one of ten
        (Full(), 160, False),  # none
        (Prefix(3) | Causal(), 320, False),  # no span to ask for
        (~Prefix(3) & Causal(), 320, False),
    ],
    ids=str,
)
def test_few_tiles_with_a_mask_have_no_loop_of_their_own(mask: Mask, kv_len: int, asked: bool, parts: int) -> None:
    """Where the kernel asks what they hide: of the last 17 queries, and tiles of 16 keys."""
    start = kv_len - 17
    table = tile_schedule(LocalMask(mask, start, 17, kv_len, 0), 17, 16, "q", asks=True)
    assert (table.asked, table.some_full) == (asked, not asked)
    assert not tile_schedule(LocalMask(mask, start, 17, kv_len, 0), 17, 16, "q").asked
    _check_visits(mask, (17, kv_len), (17, 16), "q", start, parts, asks=True)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("slow", ["q", "kv"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_live_tile_is_visited_once_in_long_rows(mask: Mask, slow: str, parts: int) -> None:
    """Rows with tiles of both kinds, as ends and as lists."""
    _check_visits(mask, (150, 170), (16, 16), slow, 0, parts)


def _check_visits(
    mask: Mask,
    lengths: tuple[int, int],
    block: tuple[int, int],
    slow: str,
    start: int,
    parts: int,
    *,
    asks: bool = False,
) -> None:
    (q_len, kv_len), (block_q, block_kv) = lengths, block
    local = LocalMask(mask, start, q_len, kv_len, 0)
    table = tile_schedule(local, block_q, block_kv, slow, asks=asks)
    rows, keys = np.arange(q_len)[:, None] + start, np.arange(kv_len)[None]
    seen = np.broadcast_to(np.asarray(mask.test(rows, rows, keys)), (q_len, kv_len))
    blocks = -(-(q_len if slow == "q" else kv_len) // (block_q if slow == "q" else block_kv))
    for row in range(blocks):
        found = [tile for part in range(parts) for tile in _visited(table, row, part, parts)]
        assert len({tile for tile, _ in found}) == len(found)
        others = -(-(kv_len if slow == "q" else q_len) // (block_kv if slow == "q" else block_q))
        assert {tile for tile, _ in found} <= set(range(others))
        for other in range(others):
            q, kv = (row, other) if slow == "q" else (other, row)
            tile = seen[q * block_q : (q + 1) * block_q, kv * block_kv : (kv + 1) * block_kv]
            masked = dict(found).get(other)
            assert (masked is None) <= (not tile.any()), "a live tile is passed over"
            if tile.any() and not masked:
                assert tile.all(), "a tile that the mask cuts is taken as whole"
                assert (kv + 1) * block_kv <= kv_len, "a padded tile is taken as whole"
            if masked is not None:
                assert tile.any(), "a dead tile is visited"


@given(st.integers(1, 600))
def test_a_head_dim_is_cut_into_powers_of_two(dim: int) -> None:
    parts = dim_parts(dim)
    assert [p.start for p in parts] == [sum(p.width for p in parts[:n]) for n in range(len(parts))]
    assert all(p.width >= 16 and p.width & (p.width - 1) == 0 for p in parts)
    assert sum(p.inside for p in parts) == dim
    assert all(p.inside == p.width for p in parts[:-1])
    assert sum(p.width for p in parts) - dim < 16


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_every_fp8_number_comes_from_its_bits(stored: str, wanted: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = bits.view(getattr(ml_dtypes, stored)).astype(np.float32)
    got = from_bits(as_bits(jnp.asarray(bits.view(getattr(ml_dtypes, stored)))), stored, jnp.dtype(wanted))
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected.astype(jnp.dtype(wanted)).astype(np.float32))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_q": 100}, "block_q=100; wanted a power of two from 16 to 1024"),
        ({"block_kv_dq": 8}, "block_kv_dq=8; wanted a power of two from 16 to 1024"),
        ({"num_warps": 3}, "num_warps=3; wanted a power of two from 1 to 16"),
        ({"num_warps_dkv": True}, "num_warps_dkv=True; wanted a power of two from 1 to 16"),
        ({"num_stages": 0}, "num_stages=0: Input should be greater than or equal to 1"),
        ({"kv_splits": 0}, "kv_splits=0"),
        ({"blokc_q": 64}, "unknown field 'blokc_q'"),
    ],
)
def test_wrong_sizes_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("'", ".")):
        FlashAttention2Config.coerce(fields)


QUERY = jax.ShapeDtypeStruct((2, 2048, 16, 128), jnp.bfloat16)
ONE = jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16)
CACHE = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)


def _plan(
    operation: str,
    kind: str,
    *arrays: jax.ShapeDtypeStruct,
    configs: dict | None = None,
    call: dict | None = None,
    **fields: object,
):
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, platform))
    metadata = OperationMetadata(mesh=mesh, operation_configs=configs or {}, **fields)
    return OperationRegistry.create(operation, metadata).plan(*(arrays or (QUERY,) * 3), **call or {})


H100 = "NVIDIA H100 80GB HBM3"
TRITON = {"kernel": "triton"}  # from jax 0.12 on, a plan chooses another one on Hopper


@pytest.mark.parametrize("operation", ["flash_attn2", "splash", "ring", "ulysses"])
def test_who_runs_them(operation: str) -> None:
    plan = _plan(operation, H100, configs={"flash_attn2": {"block_q": 64, "num_warps": 4}})
    assert (plan.kind, plan.method, plan.problem.platform) == ("platform", "forward_cuda", "cuda")
    assert (plan.config.operation, plan.config.block_q, plan.config.num_warps) == ("flash_attn2", 64, 4)


def test_splash_sizes_for_tpus_are_said_to_be_unread_on_a_gpu() -> None:
    plan = _plan("splash", H100, configs={"splash": {"block_q": 512}})
    assert plan.config.block_q != 512
    assert (
        "operation_configs['splash'] (block_q) is not read by splash on cuda, which runs flash_attn2's kernels"
        in plan.notes
    )


def test_on_a_tpu_it_is_splash() -> None:
    configs = {"splash": {"block_q": 256, "block_kv": 256}, "flash_attn2": {"num_stages": 2}}
    plan = _plan("flash_attn2", "TPU v5 lite", configs=configs)
    assert (plan.implementation, plan.config.operation) == ("flash_attn2.forward_tpu", "splash")
    assert plan.config.block_q == 256
    assert any("operation_configs['flash_attn2'] (num_stages) is not read" in note for note in plan.notes)


def test_elsewhere_it_is_the_native_path() -> None:
    plan = OperationRegistry.create("flash_attn2", OperationMetadata(backend="cpu")).plan(QUERY, QUERY, QUERY)
    assert (plan.kind, plan.implementation) == ("native", "flash_attn2.forward_native")
    plan = OperationRegistry.create("flash_attn2", OperationMetadata(backend="rocm")).plan(QUERY, QUERY, QUERY)
    assert plan.kind == "fallback"
    assert [reason.code for reason in plan.rejected[0].reasons] == ["flash.rocm"]


def test_one_query_fills_the_device() -> None:
    plan = _plan("flash_attn2", H100, ONE, CACHE, CACHE, configs={"flash_attn2": TRITON})
    assert (plan.config.fold, plan.config.block_q) == (True, 16)  # 4 query heads of a kv head
    assert plan.config.kv_splits == 16  # 8 kv heads on 132 multiprocessors
    assert _plan("flash_attn2", H100).config.kv_splits == 1


@pytest.mark.parametrize(
    ("fields", "config", "code"),
    [
        ({"runtime_softmax_dtype": "bfloat16"}, {}, "flash.softmax_dtype"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(fields: dict, config: dict, code: str) -> None:
    plan = _plan("flash_attn2", H100, configs={"flash_attn2": config}, fallback="error", **fields)
    assert plan.kind == "refused"
    assert code in {reason.code for one in plan.rejected for reason in one.reasons}


def test_wide_heads_are_refused() -> None:
    wide = jax.ShapeDtypeStruct((1, 128, 2, 320), jnp.bfloat16)
    plan = _plan("flash_attn2", H100, wide, wide, wide, fallback="error")
    codes = {one.implementation: [reason.code for reason in one.reasons] for one in plan.rejected}
    assert codes["flash_attn2.forward_cuda"] == ["flash.head_dim"]


def _program(config: dict, dim: int = 64, value_dim: int = 64) -> str:
    """What is traced and lowered for an H100."""
    device, auto = abstract_device(H100, 1, "gpu"), (AxisType.Auto,)
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=auto, abstract_device=device)
    configs = {"flash_attn2": {"kernel": "triton", **config}}
    metadata = OperationMetadata(mesh=mesh, operation_configs=configs, fallback="error")
    attend = OperationRegistry.create("flash_attn2", metadata)
    x, value = (jax.ShapeDtypeStruct((1, 500, 2, n), jnp.bfloat16) for n in (dim, value_dim))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v).attention_outputs.astype(jnp.float32).sum()

    with tracing_on(mesh, "cuda"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, value)
        return str(traced.jaxpr) + traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("dim", "value_dim"), [(24, 40), (72, 72), (192, 128), (8, 8)])
def test_head_dims_that_end_within_a_tile_are_lowered(dim: int, value_dim: int) -> None:
    assert "attnops_flash_dkv" in _program({}, dim, value_dim)


CHANGED = {
    **dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 32),
    **dict.fromkeys(("num_warps", "num_warps_dkv", "num_warps_dq"), 16),
    **dict.fromkeys(("num_stages", "num_stages_dkv", "num_stages_dq"), 4),
    "kv_splits": 3, "fold": True, "residual_checkpoint_name": "kept", "interpret": True,
}  # fmt: skip


# `kernel` chooses between the methods: tests/hopper.
@pytest.mark.parametrize(
    "field", sorted(set(FlashAttention2Config.model_fields) - {"operation", "schema_version", "kernel"})
)
def test_a_field_changes_what_is_lowered(field: str) -> None:
    # Folded, the queries of all heads are one tile's: these few are.
    beside = {"block_q": 512, "fold": False} if field == "fold" else {}
    assert _program(beside | {field: CHANGED[field]}) != _program(beside)


def test_what_a_search_tries() -> None:
    plan = _plan("flash_attn2", H100, configs={"flash_attn2": {"kernel": "triton", "num_warps": 4, "block_kv_dq": 32}})
    runs, problem, placement = plan.runs, plan.problem, plan.placement
    assert runs is not None
    free = runs.tuned_fields(problem, placement)
    assert "num_warps" not in free
    assert "block_kv_dq" not in free
    ways = runs.candidates(problem, placement)
    assert set(ways) == {"forward", "backward"}
    for part, suffixes in (("forward", ("",)), ("backward", ("_dkv", "_dq"))):
        assert ways[part][0] == {
            name: getattr(plan.config, name) for name in ways[part][0]
        }  # what runs without a search
        assert len({tuple(way.items()) for way in ways[part]}) == len(ways[part]) > 20
        for way in ways[part]:
            FlashAttention2Config.coerce(way)
            assert set(way) <= set(free)
            assert all(any(name.endswith(s) for s in suffixes if s) or part == "forward" for name in way)
    decode = _plan("flash_attn2", H100, ONE, CACHE, CACHE).problem
    assert runs.tuned_fields(decode, placement) == ("block_q", "block_kv", "num_warps", "num_stages", "kv_splits")


@pytest.mark.parametrize("operation", ["flash_attn2", "splash"])
@pytest.mark.parametrize("shape", [(1, 2, 1, 320), (1, 1, 320, 320), (1, 1, 1, 320)])
def test_the_gradient_of_a_bias_alone_over_many_rows(operation: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    q, k, v, d_output = (rng.standard_normal((1, 320, 2, 16)).astype(np.float32) for _ in range(4))
    bias = rng.standard_normal(shape).astype(np.float32)
    metadata = OperationMetadata(operation_configs={operation: {"interpret": True}}, fallback="error", tuning="off")
    attend = OperationRegistry.create(operation, metadata)

    def loss(bias: jax.Array) -> jax.Array:
        return (attend(q, k, v, bias=bias, causal=False).attention_outputs * d_output).sum()

    want = reference_gradients(q, k, v, d_output, scale=0.25, bias=bias)["bias"]
    got = np.asarray(jax.jit(jax.grad(loss))(bias), np.float64)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("dtype", "dim", "q_len"), [("float32", 128, 16), ("float32", 256, 10), ("bfloat16", 128, 16)])
def test_few_queries_are_folded_where_a_tile_holds_them(dtype: str, dim: int, q_len: int) -> None:
    few, keys = (jax.ShapeDtypeStruct((2, *shape, dim), dtype) for shape in ((q_len, 32), (4096, 8)))
    config = _plan("flash_attn2", H100, few, keys, keys, fallback="error", causal=False).config
    assert config.fold == (4 * q_len <= config.block_q)


@pytest.mark.parametrize("heads", [1, 8])
def test_queries_folded_into_one_tile_stay_there_under_a_mask_of_small_blocks(heads: int) -> None:
    few, keys = (jax.ShapeDtypeStruct((2, n, h, 64), "bfloat16") for n, h in ((48, heads), (160, heads)))
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(H100, 1, "gpu"))
    metadata = OperationMetadata(mesh=mesh, fallback="error", causal=False, operation_configs={"flash_attn2": TRITON})
    attend = OperationRegistry.create("flash_attn2", metadata)
    config = attend.plan(few, keys, keys, mask=Blocks(np.tri(3, 10, 7, dtype=bool), 16, 16)).config
    assert (config.fold, config.block_q) == (True, 64)


@pytest.mark.parametrize("operation", ["flash_attn2", "splash", "ring"])
def test_what_a_search_tries_first_is_what_runs_without_one(operation: str) -> None:
    plan = _plan(operation, H100, ONE, CACHE, CACHE)
    first = plan.runs.candidates(plan.problem, plan.placement)["forward"][0]
    made = LocalProblem.of(plan.problem, plan.placement).make(first, plan_mesh())
    again = made.plan(ONE, CACHE, CACHE)
    assert again.config == plan.config.with_fields(first)
    assert again.config.fold


def plan_mesh() -> AbstractMesh:
    return AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(H100, 1, "gpu"))


def test_gpus_that_triton_is_not_for() -> None:
    plan = _plan("splash", "NVIDIA T4")
    assert plan.kind == "fallback"
    assert [reason.code for reason in plan.rejected[0].reasons] == ["flash.generation"]


def test_block_sizes_of_the_metadata_are_not_for_gpus() -> None:
    plan = _plan("splash", H100, blocksize_q=512, blocksize_k=2048)
    assert plan.config.block_q == _plan("splash", H100).config.block_q
    assert "blocksize_q=512 is not read by splash" in plan.notes


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    cache = jax.ShapeDtypeStruct((24, 131072, 8, 128), jnp.float8_e4m3fn)
    query = jax.ShapeDtypeStruct((24, 1, 32, 128), jnp.bfloat16)
    plan = _plan("flash_attn2", H100, query, cache, cache, fallback="error", configs={"flash_attn2": TRITON})
    assert "3221225472 numbers of one byte" in plan.refusal()


def test_sizes_for_a_gpu_that_is_not_known_are_noted() -> None:
    assert any(note.startswith("sizes for NVIDIA L4 fit any GPU") for note in _plan("splash", "NVIDIA L4").notes)
    assert not any(note.startswith("sizes for") for note in _plan("splash", H100).notes)


@pytest.mark.parametrize(
    ("kind", "sizes", "steps"),
    [
        ("NVIDIA A100-SXM4-80GB", {}, (2, 1, 1)),
        ("NVIDIA A100-SXM4-80GB", {"block_q": 64, "num_warps": 4}, (1, 1, 1)),  # fewer rows than numbers in a head
        ("NVIDIA A100-SXM4-80GB", {"block_kv": 32}, (1, 1, 1)),
        (H100, {}, (1, 4, 8)),
        (H100, {"block_kv": 32}, (1, 2, 8)),
        (H100, {"block_q": 64, "num_warps": 8}, (1, 1, 1)),
        ("NVIDIA B200", {}, (1, 1, 1)),
    ],
)
def test_steps_through_a_tile(kind: str, sizes: dict[str, int], steps: tuple[int, int, int]) -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.bfloat16)
    plan = _plan("flash_attn2", kind, x, x, x, fallback="error", configs={"flash_attn2": TRITON | sizes})
    assert flash_sizes.steps_of(plan.problem, plan.config) == steps


@pytest.mark.parametrize(
    ("kind", "dim", "said"),
    [
        ("NVIDIA A100-SXM4-80GB", 128, ["128 keys", "2 parts of 64 keys, each with its own softmax"]),
        ("NVIDIA A100-SXM4-80GB", 64, ["64 keys", "2 parts of 32 keys", "in 8 sums"]),
        (H100, 128, ["128 keys", "4 products with the values", "in 8 sums"]),
        ("NVIDIA B200", 128, None),
    ],
)
def test_a_plan_says_how_a_tile_is_processed(kind: str, dim: int, said: list[str] | None) -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 8, dim), jnp.bfloat16)
    for operation in ("flash_attn2",) if kind == H100 else ("flash_attn2", "splash"):
        plan = _plan(operation, kind, x, x, x, fallback="error", configs={"flash_attn2": TRITON})
        assert has_note(plan.notes, "flash.steps") == (said is not None)
        for note in plan.notes:
            if has_note([note], "flash.steps"):
                assert is_info(note)
                assert all(words in note for words in said or ())


def test_quantised_keys_are_processed_in_one_step() -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn)
    for kind, block_kv in (("NVIDIA A100-SXM4-80GB", 64), (H100, 128)):
        plan = _plan("flash_attn2", kind, x, kv, kv, fallback="error", configs={"flash_attn2": TRITON})
        assert plan.config.block_kv == block_kv
        assert flash_sizes.steps_of(plan.problem, plan.config) == (1, 1, 1)


@pytest.mark.parametrize(
    ("score", "stages"), [("alibi", 3), ("t5", 2), ("table", 2), ("by_query_and_key", 2), ("by_key", 3)]
)
def test_numbers_of_a_score_for_each_pair_leave_room_for_fewer_stages(score: str, stages: int) -> None:
    """Compiled for an H100, three stages of 128 x 128 float32 numbers beside keys and values take 352 KiB of 227."""
    register_score_function("flash_sizes", override=True)(lambda x, batch, head, q, kv, added: x + added)
    made, array = {
        "alibi": (ALiBi(), {}),
        "t5": (RelativeBias(buckets=T5()), {"table": (32, 8)}),
        "table": (RelativeBias2D(grid=(64, 32)), {"table": (127 * 63, 8)}),
        "by_query_and_key": (ScoreFunction("flash_sizes", {"added": ("q_len", "kv_len")}), {"added": (2048, 2048)}),
        "by_key": (ScoreFunction("flash_sizes", {"added": ("batch", "kv_len")}), {"added": (2, 2048)}),
    }[score]
    x = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.bfloat16)
    given = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in array.items()}
    configs = {"flash_attn2": TRITON}
    plan = _plan("flash_attn2", H100, x, x, x, fallback="error", configs=configs, call={"score": made, **given})
    assert plan.config.num_stages == stages


@pytest.mark.parametrize(
    ("kind", "sizes", "least"),
    [
        ("NVIDIA A100-SXM4-80GB", {"block_kv": 128, "num_stages": 4}, 3 * 128 * 256 * 2),
        (H100, {"block_kv": 128, "num_stages": 4}, 4 * 128 * 256 * 2),
        (H100, {"block_q_dkv": 128, "num_stages_dkv": 4}, 4 * 128 * 256 * 2),
        (H100, {"block_kv_dq": 256, "num_stages_dq": 2}, 2 * 256 * 256 * 2),
    ],
)
def test_tiles_that_shared_memory_can_not_hold_are_refused(kind: str, sizes: dict[str, int], least: int) -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.bfloat16)
    plan = _plan("flash_attn2", kind, x, x, x, fallback="error", configs={"flash_attn2": TRITON | sizes})
    assert f"at least {least} bytes of shared memory" in plan.refusal()
    fewer = {n: 2 if "stages" in n else 64 for n in sizes}
    plan = _plan("flash_attn2", kind, x, x, x, fallback="error", configs={"flash_attn2": TRITON | fewer})
    assert plan.implementation == "flash_attn2.forward_cuda"


def test_the_shared_memory_of_plans_is_that_of_the_table_of_gpus() -> None:
    for spec in gpu_specs().values():
        variant = gpu_variant(spec.kind)
        assert variant is not None
        assert (variant.shared_bytes_a_block, variant.cores) == (spec.shared_bytes_a_block, spec.cores)
