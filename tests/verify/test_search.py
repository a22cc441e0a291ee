"""The search: what it tries, how tiles are counted, the compiler's cycles, and going on where it stood."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import (
    Causal,
    Chunked,
    ConfigError,
    Full,
    OperationMetadata,
    OperationRegistry,
    Plan,
    Positions,
    SlidingWindow,
    register_mask_function,
)
from attnops.devices import vmem_of
from attnops.masks import MaskFunction
from attnops.operators.splash.candidates import BACKWARD, FORWARD
from attnops.operators.splash.passes import splash_passes
from attnops.planning import tune_cache
from attnops.planning.tuning import tune_key
from attnops.sharding import virtual_mesh
from attnops.verify import tune as tune_module
from attnops.verify.clock_worker import ClockWorker, Outcome
from attnops.verify.local_call import LocalProblem
from attnops.verify.static_clock import TileCycles
from attnops.verify.tile_counts import kernel_cycles, matrix_cycles
from attnops.verify.topology import described_mesh
from attnops.verify.tune import tune_plan

SHAPES = json.loads((Path(__file__).parents[1] / "data" / "model_shapes.json").read_text())["shapes"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tune_cache.ENVIRONMENT, str(tmp_path))
    return tmp_path


def _described(target: str = "v5e:2x2") -> Any:
    pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")
    return described_mesh(target)


def _plan(
    q_len: int = 256,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 128,
    config: Any = None,
    mesh: Any = None,
    **call: Any,
) -> Plan:
    mesh = _described() if mesh is None else mesh
    configs = {"splash": config or {}}
    metadata = OperationMetadata(
        mesh=mesh, operation_configs=configs, fallback="error", runtime_dtype="bfloat16", tuning="off"
    )
    q = jax.ShapeDtypeStruct((1, q_len, heads, dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, q_len, kv_heads, dim), jnp.bfloat16)
    return OperationRegistry.create("splash", metadata).plan(q, k, k, **call)


def _candidates(decided: Plan) -> dict[str, tuple[dict[str, Any], ...]]:
    assert decided.method is not None
    return dict(decided.runs.candidates(decided.problem, decided.placement))


def test_the_heuristics_choice_is_the_first_candidate() -> None:
    decided = _plan(q_len=2048)
    found = _candidates(decided)
    for part, names in (("forward", FORWARD), ("backward", BACKWARD)):
        first = found[part][0]
        assert set(first) <= set(names)
        assert first == {n: getattr(decided.config, n) for n in names if getattr(decided.config, n) is not None}
        assert len({tuple(sorted(way.items())) for way in found[part]}) == len(found[part]) > 5


def test_what_is_declared_is_not_searched() -> None:
    decided = _plan(q_len=2048, config={"block_q": 512, "use_fused_bwd_kernel": True, "block_kv_dkv": None})
    found = _candidates(decided)
    assert not {"block_q", "use_fused_bwd_kernel", "block_kv_dkv"} & {
        n for ways in found.values() for w in ways for n in w
    }
    assert "block_q" not in decided.runs.tuned_fields(decided.problem, decided.placement)


def test_without_a_gradient_only_the_forward_pass_is_searched() -> None:
    assert list(_candidates(_plan(mode="prefill"))) == ["forward"]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(s, id=s["name"], marks=[] if i % 4 == 0 else [pytest.mark.slow])
        for i, s in enumerate(s for s in SHAPES if s["seq_q"] > 1)
    ],
)
def test_candidates_fit_and_mean_something_for_real_models(shape: dict[str, Any]) -> None:
    mask: Any = Causal() if shape["causal"] else Full()
    if shape["window"]:
        mask = mask & SlidingWindow(*shape["window"])
    if shape["chunk"]:
        mask = mask & Chunked(shape["chunk"])
    q = jax.ShapeDtypeStruct((1, shape["seq_q"], shape["hq"], shape["head_dim"]), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, shape["seq_kv"], shape["hkv"], shape["head_dim"]), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((1, shape["seq_kv"], shape["hkv"], shape["head_dim_v"]), jnp.bfloat16)
    metadata = OperationMetadata(mesh=_described("tpu7x:2x2x1"), fallback="error", tuning="off")
    decided = OperationRegistry.create("splash", metadata).plan(q, k, v, mask=mask)
    found = _candidates(decided)
    assert set(found) == {"forward", "backward"}
    most = vmem_of("TPU7x").maximum
    for part, ways in found.items():
        for way in ways[:12]:
            config = decided.problem.config.with_fields(way)
            block_q, block_kv = ("block_q", "block_kv") if part == "forward" else ("block_q_dkv", "block_kv_dkv")
            # The blocks of query, key and value alone, twice, are within what there is.
            bytes_moved = 2 * 2 * (getattr(config, block_q) + getattr(config, block_kv)) * shape["head_dim"]
            assert bytes_moved < most
            assert getattr(config, block_q) <= -(-shape["seq_q"] // 128) * 128


def test_cycles_are_counted_by_tiles_blocks_and_heads() -> None:
    decided = _plan(q_len=1024, heads=8, kv_heads=2, config={"block_q": 256, "block_kv": 256, "block_q_dkv": 512})
    cycles = TileCycles((3000, 3100), block=50, step=7, head=3)

    def count(part: str, products: str, config: Any) -> int:
        (kernel,) = (one for one in splash_passes(config, part == "backward") if one.products == products)
        return kernel_cycles(decided.problem, decided.placement, config, kernel, cycles)

    # Causal over 4 x 4 blocks: 6 tiles wholly visible, 4 on the diagonal; 8 query heads, 2 kv heads.
    assert count("forward", "forward", decided.config) == 8 * (6 * 3007 + 4 * 3107 + 4 * 50) + 2 * 3
    paired = decided.config.with_fields({"heads_per_tile": 2})
    assert count("forward", "forward", paired) == 4 * (6 * 3007 + 4 * 3107 + 4 * 50) + 2 * 3
    units = {"block_q_dkv_compute": 512, "block_kv_dkv_compute": 256}
    both = decided.config.with_fields({"block_kv_dkv": 256, "use_fused_bwd_kernel": None, **units})
    # 2 x 4 blocks: of the first row's two, both are cut by the diagonal; the second row has two full ones before its two.
    assert count("backward", "dkv", both) == 8 * (2 * 3007 + 4 * 3107 + 4 * 50) + 2 * 3


def test_what_is_known_at_run_time_counts_as_masked() -> None:
    """Segment ids: the kernel has a path for visible tiles, one for the diagonal, one that masks all; the last counts."""
    config = {"block_q": 256, "block_kv": 256, "block_q_compute": 128, "block_kv_compute": 128}
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    decided = _plan(q_len=1024, heads=2, kv_heads=2, config=config, q_segment_ids=ids, kv_segment_ids=ids)
    cycles = TileCycles((30000, 20000, 90000), block=50, step=7)
    problem, placement = decided.problem, decided.placement
    got = kernel_cycles(problem, placement, decided.config, *splash_passes(decided.config, False), cycles)
    heads = placement.local.batch * 2
    assert got == heads * (10 * 90007 + 4 * 50)


def test_each_part_of_the_keys_goes_over_all_queries() -> None:
    config = {"block_q_dkv": 256, "block_kv_dkv": 256, "block_kv_dkv_sums": 512}
    decided = _plan(q_len=1024, heads=2, kv_heads=1, config=config)
    cycles = TileCycles((3000, 3100), block=50, step=7, head=3, turn=11)
    kernels = splash_passes(decided.config, True)
    got = kernel_cycles(decided.problem, decided.placement, decided.config, *kernels, cycles)
    # Two parts, in each of which four query blocks are started and ended, and the sums of a kv head: 512 keys at a time.
    assert got == 2 * (6 * 3007 + 4 * 3107 + 2 * 4 * 50) + 2 * 3 + 2 * 11


def test_the_first_part_of_the_keys_may_have_fewer_bodies_than_the_mask() -> None:
    """Keys after the row: the first block of them is seen by the rows of the diagonal alone, and its kernel has one path."""
    config = {"block_q_dkv": 256, "block_kv_dkv": 256, "block_kv_dkv_compute": 128, "block_q_dkv_compute": 128}
    decided = _plan(q_len=1024, heads=1, kv_heads=1, config=config | {"block_kv_dkv_sums": 256}, mask=~Causal(0))
    cycles = TileCycles((3000,), block=0, step=0)
    kernels = splash_passes(decided.config, True)
    got = kernel_cycles(decided.problem, decided.placement, decided.config, *kernels, cycles)
    # Three of a diagonal tile's four units are computed, two of them with the mask, which makes them cost a quarter more.
    assert got == pytest.approx(4 * 3000 + 6 * 3000 / 0.875, abs=6)


@pytest.mark.parametrize(
    ("kind", "products", "dims", "columns", "a_cycle"),
    [
        # Four units of 128 x 128 take that many multiplications a cycle: 197e12 / 2 / 1.5e9.
        ("TPU v5 lite", "forward", (128, 128), 2 * 128, 4 * 128 * 128),
        ("TPU v5 lite", "backward", (128, 128), 5 * 128, 4 * 128 * 128),
        # Logits, and the weights' gradient, sum over 64 rows of a unit that has 128; what has 64 rows to stream needs no more.
        ("TPU v5 lite", "backward", (64, 64), 2 * 128 + 3 * 64, 4 * 128 * 128),
        ("TPU v5 lite", "forward", (192, 128), 256 + 128, 4 * 128 * 128),
        ("TPU v6 lite", "dkv", (256, 256), 4 * 256, 16 * 128 * 128),  # 918e12 / 2 / 1.75e9
        # Units of 256 x 256: products of 16 rows, 8 cycles each on two units.
        ("TPU v6 lite", "dq", (192, 128), 256 + 256 + 192, 16 * 128 * 128),
        ("TPU v6 lite", "forward", (128, 128), 256 + 128, 2 * 16 * 256 * 256 // 8),
        ("TPU7x", "backward", (64, 64), 2 * 256 + 3 * 64, 2 * 16 * 256 * 256 // 8),
    ],
)
def test_the_matrix_units_need_their_cycles(
    kind: str, products: str, dims: tuple[int, int], columns: int, a_cycle: int
) -> None:
    assert matrix_cycles(kind, products, 512, 1024, *dims) == 512 * 1024 * columns // a_cycle


def test_a_tile_costs_no_less_than_its_products() -> None:
    """A schedule that issues products faster than the units' peak is no gain."""
    units = {"block_q_compute": 512, "block_kv_compute": 1024}
    config = {"block_q": 512, "block_kv": 1024, "heads_per_tile": 2, **units}
    decided = _plan(q_len=1024, heads=2, kv_heads=2, config=config)
    cycles = TileCycles((10,), block=0, step=0)
    kind, problem = decided.problem.device_kind, decided.problem
    least = 2 * matrix_cycles(kind, "forward", 512, 1024, problem.head_dim, problem.value_dim)
    assert least > 100
    # Both rows of blocks hold one tile, for both heads at once.
    kernels = splash_passes(decided.config, False)
    assert kernel_cycles(problem, decided.placement, decided.config, *kernels, cycles) == 2 * least


def test_the_local_call_is_one_devices_part() -> None:
    mesh = virtual_mesh({"fsdp": 2, "tp": 4})
    decided = _plan(heads=8, kv_heads=4, mesh=mesh, config={"interpret": True}, logits_soft_cap=4.0)
    local = LocalProblem.of(decided.problem, decided.placement)
    assert local.arguments["query"].shape == (1, 256, 2, 128)
    assert local.arguments["key"].shape == (1, 256, 1, 128)
    again = pickle.loads(pickle.dumps(local))
    assert again.metadata == local.metadata
    assert again.make({"block_q": 128}).plan(**again.arguments).config.block_q == 128


def test_the_local_call_computes_what_the_call_does() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 160, 2, 16)), jnp.float32)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, 160))), jnp.int32)
    places = jnp.asarray(rng.permutation(160)[None].repeat(2, 0), jnp.int32)
    call = {"mask": Positions(places, places, left=50), "q_segment_ids": ids, "kv_segment_ids": ids, "return_lse": True}
    attend = OperationRegistry.create("vanilla", OperationMetadata(tuning="off"))
    want = attend(x, x, x, **call, bias=x[:1, None, :, 0, :1].astype(jnp.float32))
    local = LocalProblem.of(want.plan.problem, want.plan.placement)
    function, shapes = local.program({}, "forward")
    # The arrays of the mask come in the order of the plan's leaves.
    leaves = {"q_segment_ids": ids, "kv_segment_ids": ids, "q_positions": places, "kv_positions": places}
    names = {id(leaf.array): leaf.name for leaf in local.arguments["mask"].split()[1]}
    bias = x[:1, None, :, 0, :1]
    arrays = [leaves[names[id(s)]] if id(s) in names else bias if s.shape == bias.shape else x for s in shapes]
    output, lse = function(arrays)
    np.testing.assert_array_equal(output, want.attention_outputs)
    np.testing.assert_array_equal(lse, want.lse)
    drawn = dict(zip([names.get(id(s), "") for s in shapes], local.arrays(shapes), strict=True))
    assert (np.asarray(drawn["q_segment_ids"]) == 0).all()
    assert (np.asarray(drawn["q_positions"][1]) == np.arange(160)).all()


@pytest.mark.parametrize("layout", ["bthd", pytest.param("bhtd", marks=pytest.mark.slow), "thd"])
def test_the_local_call_of_quantised_keys_and_values(layout: str) -> None:
    """Dtypes and scales as they are given, a device's part of them; integers get no gradient, and scales have one."""
    x = {"bthd": (2, 160, 4, 16), "bhtd": (2, 4, 160, 16), "thd": (160, 4, 16)}[layout]
    q, k, v = (jax.ShapeDtypeStruct(x, jnp.dtype(d)) for d in ("bfloat16", "int8", "float8_e5m2"))
    scale = jax.ShapeDtypeStruct(tuple(1 if a == "d" else n for a, n in zip(layout, x, strict=True)), jnp.bfloat16)
    call = {"layout": layout} | ({"q_segment_ids": jax.ShapeDtypeStruct((160,), jnp.int32)} if layout == "thd" else {})
    mesh = {"tp": 2} if layout == "thd" else {"fsdp": 2, "tp": 2}
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, tuning="off"))
    decided = attend.plan(q, k, v, key_scale=scale, **call)
    local = LocalProblem.of(decided.problem, decided.placement)
    assert (local.arguments["key"].dtype, local.arguments["value"].dtype) == (jnp.int8, jnp.float8_e5m2)
    assert local.arguments["key_scale"].shape == ((1, 2, 160, 1) if layout == "bhtd" else (1, 160, 2, 1))
    assert "value_scale" not in local.arguments
    function, shapes = local.program({}, "backward")
    arrays = local.arrays(shapes)
    assert local.arguments["key_scale"].dtype == jnp.bfloat16
    assert {a.dtype.name for a in arrays} >= {"bfloat16", "int8", "float8_e5m2"}
    assert all(a.any() for a in arrays if a.dtype != jnp.int32)
    _, gradients = function(arrays)
    assert set(gradients) == {"query", "value", "key_scale"}
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients.values())


def test_a_search_by_static_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = _plan(mode="prefill", q_len=512, config={"block_kv_compute_in": 128, "sum_by_product": False})
    told: list[tuple[int, int, str]] = []
    report = tune_plan(decided, most=2, progress=lambda *args: told.append(args))
    assert report.how == "static"
    assert [done for done, _, _ in told] == [0, 1, 2]
    assert {of for _, of, _ in told} == {2}
    measured = report.measured("forward")
    assert len(measured) == 2
    for one in measured:
        assert one.failure is None
        # On a v5e a 128 x 128 x 128 product takes its matrix units 32 cycles; causal leaves at least half of the tiles.
        assert one.detail["cycles"] > 2 * 2 * 4 * 4 * 32 / 2
        assert 0 < one.detail["vmem_bytes"] < vmem_of("TPU v5 lite").default
        assert one.seconds == pytest.approx(one.detail["cycles"] / 1.5e9)
    fastest = min(measured, key=lambda one: one.seconds)
    assert report.result.choice is not None
    assert report.result.choice.fields == fastest.fields

    # What is kept is not measured again, and a plan made now takes it.
    monkeypatch.setattr(ClockWorker, "ask", lambda *args: pytest.fail("measured again"))
    again = tune_plan(decided, most=2)
    assert again.reused == 2
    assert again.result == report.result
    metadata = OperationMetadata(
        mesh=_described(),
        operation_configs={"splash": decided.problem.config},
        runtime_dtype="bfloat16",
        tuning="error",
        fallback="error",
    )
    shapes = [jax.ShapeDtypeStruct((1, 512, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    later = OperationRegistry.create("splash", metadata).plan(*shapes, mode="prefill")
    assert {name: getattr(later.config, name) for name in fastest.fields} == fastest.fields


def test_a_search_that_was_cut_off_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = _plan(mode="prefill")
    asked: list[dict[str, Any]] = []

    def answer(self: Any, kind: str, problem: Any, part: str, fields: Any) -> Any:
        asked.append(dict(fields))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return Outcome(TileCycles((1000 - len(asked),), 1, 1), 1 << 20)

    monkeypatch.setattr(ClockWorker, "ask", answer)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        tune_plan(decided, most=4)
    found = tune_cache.load(tune_key("forward_tpu", decided.problem, decided.placement))
    assert found.choice is None
    assert len(found.measured) == 2
    before = len(asked)
    report = tune_plan(decided, most=4)
    assert report.reused == 2
    assert report.result.choice is not None
    kept = [one.fields for one in found.measured]
    missing = [way for way in _candidates(decided)["forward"][:4] if way not in kept]
    # The first search's thread may have asked once more after it was cut off; nothing that was kept is asked again.
    assert {str(way) for way in asked[before:]} == {str(way) for way in missing}


def test_a_process_that_dies_is_told_and_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = _plan(mode="prefill")
    with monkeypatch.context() as changed:
        changed.setattr("attnops.verify.clock_worker.SECONDS", 0.05)
        (one,) = tune_plan(decided, most=1).measured("forward")
    assert one.failure is not None
    assert "took more than 0.05 s" in one.failure
    monkeypatch.setattr(ClockWorker, "ask", lambda *args: Outcome(TileCycles((1000,), 1, 1), 1 << 20))
    report = tune_plan(decided, most=1)
    assert report.reused == 0
    assert report.measured("forward")[0].failure is None


@pytest.mark.slow
def test_what_does_not_compile_is_kept_with_its_reason() -> None:
    report = tune_plan(_plan(mode="prefill", config={"vmem_limit_bytes": 16 << 10}), most=1)
    (one,) = report.measured("forward")
    assert one.seconds is None
    assert one.failure is not None
    assert "VMEM" in one.failure
    assert report.result.choice is None


@pytest.mark.slow
def test_a_backward_pass_of_two_kernels() -> None:
    report = tune_plan(_plan(config={"use_fused_bwd_kernel": False}), most=1)
    (one,) = report.measured("backward")
    assert one.detail["cycles"] > report.measured("forward")[0].detail["cycles"]


@register_mask_function("known_to_this_process_only")
def _mine(position: Any, key: Any) -> Any:
    return key <= position + 1


def test_a_mask_function_of_this_process_can_not_be_compiled_elsewhere() -> None:
    report = tune_plan(_plan(mode="prefill", mask=MaskFunction("known_to_this_process_only")), most=1)
    (one,) = report.measured("forward")
    assert one.failure is not None
    assert "no mask function is named 'known_to_this_process_only'" in one.failure


def test_what_can_not_be_pickled_is_told() -> None:
    worker = ClockWorker("attnops_splash_forward")
    outcome = worker.ask("TPU v5 lite", _Unknown(), "forward", {})  # type: ignore[arg-type]
    worker.close()
    assert outcome.failure is not None
    assert "can't be sent to the compiler's process" in outcome.failure


class _Unknown:
    """Known to this module only, which the other process doesn't have."""


def test_ways_of_measuring_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = _plan()
    with pytest.raises(ConfigError, match=r"planned for TPU v5 lite, and this machine has cpu; run it there"):
        tune_plan(decided, how="device")
    with pytest.raises(ConfigError, match="how='clock'; wanted 'static' or 'device'"):
        tune_plan(decided, how="clock")
    monkeypatch.setattr(tune_module, "has_libtpu", lambda: False)
    with pytest.raises(ConfigError, match=r"needs libtpu, which isn't installed; pip install 'attnops\[tpu\]'"):
        tune_plan(decided)
    here = virtual_mesh({"fsdp": 1})
    interpreted = _plan(mesh=here, config={"interpret": True})
    with pytest.raises(ConfigError, match="device kind 'cpu' is no TPU that can be described"):
        tune_plan(interpreted, how="static")
    declared = {"block_q": 128, "block_kv": 128}
    x = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32)
    attend = OperationRegistry.create("vanilla", OperationMetadata(operation_configs={"vanilla": declared}))
    with pytest.raises(ConfigError, match=r"vanilla.forward_native has no sizes to search for this call"):
        tune_plan(attend.plan(x, x, x))


def test_a_search_on_this_machine_times_the_whole_call() -> None:
    x = jax.ShapeDtypeStruct((1, 640, 2, 16), jnp.float32)
    configs = {"vanilla": {"path": "blockwise"}}
    attend = OperationRegistry.create("vanilla", OperationMetadata(operation_configs=configs, tuning="off"))
    decided = attend.plan(x, x, x)
    report = tune_plan(decided, most=2)
    assert report.how == "device"
    assert list(report.candidates) == ["backward"]
    first = report.heuristic("backward")
    assert first.fields == {"block_q": decided.route.block_q, "block_kv": decided.route.block_kv}
    assert all(one.seconds > 0 for one in report.measured("backward"))


def test_sizes_of_gpu_kernels_are_searched_by_time() -> None:
    config = {"interpret": True, "num_warps": 4, "num_stages": 1, "kv_splits": 1, "block_q": 16}
    metadata = OperationMetadata(operation_configs={"flash_attn2": config}, tuning="off")
    x = jax.ShapeDtypeStruct((1, 40, 1, 16), jnp.float32)
    decided = OperationRegistry.create("flash_attn2", metadata).plan(x, x, x, mode="prefill")
    report = tune_plan(decided, most=2)
    assert report.how == "device"
    assert [one.fields for one in report.measured("forward")] == [{"block_kv": 32}, {"block_kv": 16}]
    assert all(one.seconds is not None for one in report.measured("forward"))
