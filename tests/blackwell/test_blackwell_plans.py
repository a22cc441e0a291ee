"""When a plan chooses the Blackwell kernel, with which sizes, and why not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from mosaic_plans import B200, GATHERED, GB200, H100, codes_against, mosaic_plan

from attnops import (
    T5,
    Causal,
    ConfigError,
    MaskFunction,
    OperationMetadata,
    OperationRegistry,
    RelativeBias,
    register_mask_function,
)
from attnops.compat import abstract_device
from attnops.operators.blackwell.kernel.blackwell_sizes import apart, shared_bytes, tensor_columns
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.mosaic.kernel import linker
from attnops.operators.mosaic.kernel.mosaic_sizes import MosaicSizes
from attnops.operators.mosaic.mosaic_sizes import tiles_of

SHARED, COLUMNS = 232448, 512  # bytes that a block of threads may request, and columns of tensor memory
JAX = "blackwell.jax"


def _plan(kind: str = B200, *, call: dict[str, Any] | None = None, **given: Any) -> Any:
    return mosaic_plan(kind, **{"lengths": (4096, 4096)} | given, call={"mode": "prefill"} | (call or {}))


def _codes(plan: Any) -> set[str]:
    """Why the Blackwell kernel doesn't run, apart from this jax."""
    return codes_against(plan, "forward_blackwell") - {JAX}


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this jax has what the kernel needs")
def test_an_older_jax_is_the_reason_for_triton() -> None:
    plan = _plan()
    assert (plan.kind, plan.method) == ("platform", "forward_cuda")
    ((name, reasons),) = plan.rejected
    assert (name, [reason.code for reason in reasons]) == ("flash_attn2.forward_blackwell", [JAX])


@pytest.mark.usefixtures("new_jax")
def test_hopper_does_not_ask_it() -> None:
    assert not any(one.implementation.endswith("blackwell") for one in _plan(H100).rejected)
    assert _plan(H100, config={"kernel": "blackwell"}).method != "forward_hopper"


REFUSED = {
    "blackwell.kernel": {"config": {"kernel": "triton"}},
    "blackwell.dtype": {"dtype": "float32"},
    "blackwell.softmax_dtype": {"runtime_softmax_dtype": "bfloat16"},
    "blackwell.head_dim": {"dims": (320, 128)},
    "blackwell.padding": {"dims": (20, 20)},
    "blackwell.block_q": {"config": {"block_q": 64}},
    "blackwell.block_kv": {"config": {"block_kv": 256}},
    "blackwell.num_warps": {"config": {"num_warps": 8}},
    "blackwell.num_warps_dkv": {"config": {"num_warps_dkv": 8}},
    "blackwell.block_q_dkv": {"config": {"block_q_dkv": 256}},
    "blackwell.block_kv_dkv": {"config": {"block_kv_dkv": 64}},
    "blackwell.block_q_dq": {"config": {"block_q_dq": 64}},
    "blackwell.block_kv_dq": {"config": {"block_kv_dq": 256}},
    "feature.return_weights": {"call": {"return_weights": True}},
    "blackwell.mask_function_operation": {"call": {"mask": "sine"}},
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("code", REFUSED)
def test_triton_runs_what_it_refuses(code: str) -> None:
    given = dict(REFUSED[code])
    call = dict(given.pop("call", {}))
    if call.get("mask") == "sine":
        register_mask_function("blackwell.sine", override=True)(lambda x, j: jnp.sin(x.astype(jnp.float32)) < j)
        call["mask"] = MaskFunction("blackwell.sine")
    plan = _plan(call=call, **given)
    assert plan.method != "forward_blackwell"
    assert code in _codes(plan)


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("mode", ["prefill", "train"])
@pytest.mark.parametrize("name", GATHERED)
def test_numbers_of_tables_and_products(name: str, mode: str) -> None:
    plan = _plan(call=GATHERED[name](4096) | {"mode": mode})
    assert (plan.method, plan.rejected) == ("forward_blackwell", ())


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_callers_shard_map(check_vma: bool) -> None:
    mesh = AbstractMesh((2,), ("dp",), (AxisType.Auto,), abstract_device=abstract_device(B200, 1, "gpu"))
    metadata = OperationMetadata(mesh=mesh, tuning="off", runtime_dtype="bfloat16")
    attend, plans = OperationRegistry.create("flash_attn2", metadata), list[Any]()

    def part(x: jax.Array) -> jax.Array:
        plans.append(attend.plan(x, x, x, mask=Causal(), mode="prefill"))
        return x

    spec = PartitionSpec("dp")
    x = jax.ShapeDtypeStruct((2, 4096, 32, 128), "bfloat16")
    jax.eval_shape(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma), x)
    assert plans[0].method == ("forward_cuda" if check_vma else "forward_blackwell")
    assert ("blackwell.check_vma" in _codes(plans[0])) == check_vma


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("kernel", ["mosaic", "blackwell"])
def test_what_triton_only_does_better_can_be_declared(kernel: str) -> None:
    given = dict(REFUSED["blackwell.padding"])
    assert _plan(**given, config={"kernel": kernel}).method == "forward_blackwell"


@pytest.mark.usefixtures("new_jax")
def test_numbers_by_distance() -> None:
    call = {"score": RelativeBias(buckets=T5()), "table": jax.ShapeDtypeStruct((32, 32), "float32")}
    plan = _plan(call=call)
    assert (plan.method, plan.rejected) == ("forward_blackwell", ())


LATENTS = {
    (576, 512, 1, 128): (128, 32, 2),
    (576, 512, 4096, 16): (128, 32, 2),
    (320, 256, 1, 64): (128, 64, 2),
    (160, 128, 4096, 16): (256, 64, 4),
}


def _of_latents(dims: tuple[int, int], q_len: int, heads: int, mode: str = "prefill") -> Any:
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(B200, 1, "gpu"))
    attend = OperationRegistry.create(
        "flash_attn2", OperationMetadata(mesh=mesh, tuning="off", runtime_dtype="bfloat16")
    )
    q, k = (jax.ShapeDtypeStruct((2, n, h, dims[0]), "bfloat16") for n, h in ((q_len, heads), (4096, 1)))
    offset = {"query_offset": 4096 - q_len} if mode == "prefill" else {"query_offset": 0}
    return attend.plan(q, k, KeyColumns(dims[1]), mask=Causal(), mode=mode, softmax_scale=0.1, **offset)


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_latents_fit(case: tuple[int, int, int, int]) -> None:
    """Of 512 columns of an output a block of threads has 256."""
    dim, value_dim, q_len, heads = case
    plan = _of_latents((dim, value_dim), q_len, heads)
    assert (plan.method, plan.rejected) == ("forward_blackwell", ())
    sizes = tiles_of(plan.config).forward
    assert sizes == LATENTS[case]
    parts = plan.runs.memory(plan.problem, plan.placement, plan.config)["attnops_blackwell_forward"]
    assert (parts["query"], parts["key"]) == (2 * sizes.block_q * dim, 2 * sizes.stages * sizes.block_kv * dim)
    assert parts["value"] == 0
    assert sum(parts.values()) <= SHARED
    assert tensor_columns(sizes, min(value_dim, 256)) <= COLUMNS


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("mode", ["prefill", "train"])
def test_latents_that_triton_runs(mode: str) -> None:
    plan = _of_latents((640, 512), 4096, 16, mode)
    assert (plan.method, _codes(plan)) == ("forward_cuda", {"blackwell.latent_dim"})


# Two rows of a batch and 148 multiprocessors: parts of the keys fill those that the other blocks leave, of 256 keys at least.
FEW = {
    "decoding": ({"lengths": (1, 32768)}, (True, 128, 148 // 16)),
    "decoding, a kv head each": ({"lengths": (1, 32768), "heads": (8, 8)}, (False, 128, 148 // 16)),
    "40 queries of 4 heads": ({"lengths": (40, 8192)}, (True, 256, 148 // 16)),
    "100 queries of 4 heads": ({"lengths": (100, 8192)}, (True, 256, 148 // 32)),
    "a chunk": ({"lengths": (256, 8192), "heads": (8, 4)}, (False, 256, 148 // 16)),
    "few keys": ({"lengths": (1, 600)}, (True, 128, 2)),
    "enough rows": ({"lengths": (2048, 8192)}, (False, 256, 1)),
    "declared": ({"lengths": (1, 32768), "config": {"fold": False, "kv_splits": 3}}, (False, 128, 3)),
}


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("name", FEW)
def test_few_queries_fold_their_heads_and_divide_the_keys(name: str) -> None:
    given, expected = FEW[name]
    plan = _plan(**given)
    assert (plan.method, plan.rejected) == ("forward_blackwell", ())
    assert (plan.config.fold, plan.config.block_q, plan.config.kv_splits) == expected


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("kind", [B200, GB200])
@pytest.mark.parametrize("operation", ["flash_attn2", "splash", "blocksparse", "ring", "ulysses"])
def test_every_operation_of_the_gpu_kernels_chooses_it(operation: str, kind: str) -> None:
    plan = _plan(kind, operation=operation)
    assert (plan.kind, plan.method, plan.rejected) == ("platform", "forward_blackwell", ())
    passes = [(size.kernel, size.loading) for part in (False, True) for size in plan.runs.passes(plan.config, part)]
    assert passes == [(f"attnops_blackwell_{which}", 8) for which in ("forward", "dkv", "dq")]


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (128, 64), (96, 96), (32, 32), (80, 80)],
)
@pytest.mark.parametrize("lengths", [(2048, 2048), (2048, 40), (100, 5000)])
def test_chosen_sizes_fit(dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    plan = _plan(dims=dims, lengths=lengths, heads=(64, 64))
    assert plan.method == "forward_blackwell", plan.rejected
    sizes = tiles_of(plan.config).forward
    assert sizes.block_q == (128 if dims[1] > 192 or lengths[0] <= 128 else 256)
    assert sizes.block_kv in (64, 128)
    assert sizes.stages >= (1 if dims[1] > 192 else 2)
    parts = shared_bytes(sizes, *dims)
    assert plan.runs.memory(plan.problem, plan.placement, plan.config) == {"attnops_blackwell_forward": parts}
    assert sum(parts.values()) <= SHARED
    assert tensor_columns(sizes, dims[1]) <= COLUMNS


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize("lengths", [(4096, 4096), (1, 4096)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_numbers_of_8_bits_have_places_beside_the_widened_ones(dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    key, value = (jax.ShapeDtypeStruct((2, lengths[1], 8, dim), "int8") for dim in dims)
    scale = jax.ShapeDtypeStruct((2, lengths[1], 8, 1), "float32")
    call = {"key": key, "value": value, "key_scale": scale, "value_scale": scale}
    plan = _plan(dims=dims, lengths=lengths, config={"kernel": "mosaic"}, call=call)
    assert (plan.method, plan.rejected) == ("forward_blackwell", ())
    sizes = tiles_of(plan.config).forward
    assert sizes.block_q == 128 or sizes.block_kv == 64
    parts = plan.runs.memory(plan.problem, plan.placement, plan.config)["attnops_blackwell_forward"]
    assert sum(parts.values()) <= SHARED
    assert tensor_columns(sizes, dims[1]) <= COLUMNS
    for name, dim in zip(("key", "value"), dims, strict=True):
        assert 2 * parts[f"{name}_raw"] == parts[name] == 2 * sizes.stages * sizes.block_kv * dim


def test_memory_by_hand() -> None:
    """Of 16-bit numbers: 256 rows of a query, and two stages of 128 keys and values. Of 32-bit columns: sums, logits and half as
    many for weights; at 128 those of both tiles don't fit beside the sums."""
    counted = shared_bytes(MosaicSizes(256, 128, 2), 128, 128)
    assert (counted["query"], counted["key"], counted["value"]) == (65536, 65536, 65536)
    assert shared_bytes(MosaicSizes(256, 64, 3), 192, 128)["query"] == 98304
    assert [tensor_columns(MosaicSizes(256, 128, 2), dim) for dim in (64, 128)] == [512, 512]
    assert [apart(MosaicSizes(256, 128, 2), dim) for dim in (64, 128)] == [True, False]
    assert tensor_columns(MosaicSizes(128, 64, 2), 256) == 256 + 2 * (64 + 32)
    assert tensor_columns(MosaicSizes(128, 128, 1), 256) == 256 + 2 * 128


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"block_kv": 128, "num_stages": 8}, "bytes of shared memory"),
        ({"block_q": 256}, "columns of tensor memory"),
        ({"block_kv": 32}, "widened at once"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: dict[str, Any], words: str) -> None:
    call: dict[str, Any] = {}
    if "widened" in words:
        call["key"] = jax.ShapeDtypeStruct((2, 4096, 8, 64), "int8")
        call["key_scale"] = jax.ShapeDtypeStruct((2, 4096, 8, 1), "float32")
    plan = _plan(dims=(64, 256), config={"kernel": "mosaic"} | config, call=call, fallback="error")
    assert _codes(plan) == {"config"}
    with pytest.raises(ConfigError, match=words):
        plan.operation.implementation("forward_blackwell", plan.problem.config).resolve(plan.problem, plan.placement)


@pytest.mark.usefixtures("new_jax")
def test_what_a_search_tries() -> None:
    plan = _plan()
    assert plan.runs.tuned_fields(plan.problem, plan.placement) == ("block_q", "block_kv", "num_stages")
    ways = plan.runs.candidates(plan.problem, plan.placement)
    assert set(ways) == {"forward"}
    assert ways["forward"][0] == {name: getattr(plan.config, name) for name in ways["forward"][0]}
    assert len({tuple(way.items()) for way in ways["forward"]}) == len(ways["forward"]) > 3
    for way in ways["forward"]:
        sizes = MosaicSizes(way["block_q"], way["block_kv"], way["num_stages"])
        assert sum(shared_bytes(sizes, 128, 128).values()) <= SHARED
        assert tensor_columns(sizes, 128) <= COLUMNS


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(("linked", "keys"), [(None, 128), (("nvidia-nvjitlink", "13.5.37"), 64)])
def test_a_linker_has_tiles_of_fewer_registers(
    linked: tuple[str, str] | None, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker, "linker", lambda: linked)
    assert _plan(dims=(128, 128)).config.block_kv == keys


@pytest.mark.usefixtures("new_jax")
@pytest.mark.parametrize(
    ("stored", "rows", "kernel", "refused"),
    [
        ("int8", 4, None, True),
        ("int8", 4, "mosaic", False),
        ("int8", 5, None, False),
        ("float8_e4m3fn", 4, None, False),
    ],
)
def test_few_rows_of_int8_run_in_triton(stored: str, rows: int, kernel: str | None, refused: bool) -> None:
    key = jax.ShapeDtypeStruct((2, 8192, 8, 128), stored)
    scale = jax.ShapeDtypeStruct((2, 8192, 8, 1), "float32")
    call = {"key": key, "value": key, "key_scale": scale, "value_scale": scale}
    plan = _plan(lengths=(rows, 8192), config={"kernel": kernel} if kernel else None, call=call)
    assert ("blackwell.few_int8" in _codes(plan)) == refused
    assert (plan.method == "forward_blackwell") == (not refused)
