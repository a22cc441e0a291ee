"""Every field of SplashConfig is found in what is lowered for the TPU, or refused. Generated from the class."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from attnops import Causal, ConfigError, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.compat import abstract_device
from attnops.operators.splash import SplashConfig
from attnops.operators.splash.splash_config import LACKING
from attnops.planning.notes import has_note


def _mesh(kind: str) -> AbstractMesh:
    return AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, "tpu"))


MESH = _mesh("TPU v5 lite")
LAYOUTS = dict.fromkeys(("q_layout", "k_layout", "v_layout"), "seq_minor")
BASE: dict[str, dict[str, Any]] = {
    "attnops": {
        "block_q": 256, "block_kv": 512, "block_kv_compute": 256, "block_kv_compute_in": 256, "heads_per_tile": 1,
        "block_q_dkv": 256, "block_kv_dkv": 512, "block_kv_dkv_compute": 256, "block_q_dq": 256, "block_kv_dq": 256,
        "block_kv_dq_compute": 256, "use_fused_bwd_kernel": False, "vmem_limit_bytes": 32 << 20, "products_ahead": 0,
        "products_ahead_dkv": 0,
    },
    "jax": {
        "kernel": "jax", "block_q": 256, "block_kv": 256, "block_kv_compute": 256, "block_q_dkv": 256, "block_kv_dkv": 256,
        "block_kv_dkv_compute": 256, "block_q_dq": 256, "block_kv_dq": 256,
    },
    "tokamax": {
        "kernel": "tokamax", "block_q": 256, "block_kv": 256, "block_kv_compute": 256, "block_q_dkv": 256, "block_kv_dkv": 256,
        "block_kv_dkv_compute": 256,
    },
}  # fmt: skip
NEEDS_TOKAMAX = pytest.mark.skipif(find_spec("tokamax") is None, reason="pip install 'attnops[tokamax]'")
COMMON: dict[str, Any] = {
    "block_q": 128, "block_kv_dkv_compute": 128, "block_q_dkv": 128, "block_q_dq": 128, "block_kv_dq": 128,
    "use_fused_bwd_kernel": True, **LAYOUTS, "residual_checkpoint_name": "splash_residuals", "interpret": True,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "attnops": COMMON | {
        "kernel": "jax", "block_kv": 256, "block_kv_compute": 512, "block_kv_compute_in": 128, "heads_per_tile": 2,
        "block_kv_dkv": 256, "use_base2_exp": False, "fuse_reciprocal": False, "use_experimental_scheduler": True,
        "sum_by_product": True, "vmem_limit_bytes": 48 << 20, "stationary_weights": True, "block_kv_dkv_sums": 256,
        "block_kv_dq_compute": 128, "block_q_compute": 128, "block_q_dkv_compute": 128, "transposed_tiles": True,
        "products_ahead": 1, "products_ahead_dkv": 1,
    },
    "jax": COMMON | {"kernel": "attnops", "block_q": 64, "block_kv": 512, "block_kv_compute": 128, "block_kv_dkv": 512},
    "tokamax": COMMON | {
        "kernel": "jax", "block_q": 64, "block_kv": 512, "block_kv_compute": 128, "block_kv_dkv": 512, "use_base2_exp": False,
        "fuse_reciprocal": False, "use_experimental_scheduler": True,
    },
}  # fmt: skip
FIELDS = [f for f in SplashConfig.model_fields if f not in ("operation", "schema_version")]


class Program(NamedTuple):
    """Forward and gradient: traced, and for the TPU."""

    traced: str
    lowered: str


def _program(config: dict[str, Any], lower: bool = True) -> Program:
    metadata = OperationMetadata(mesh=MESH, operation_configs={"splash": config}, fallback="error")
    attend = OperationRegistry.create("splash", metadata)
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    function = jax.jit(jax.grad(lambda q: attend(q, q, q, mask=Causal()).attention_outputs.astype(jnp.float32).sum()))
    traced = function.trace(x)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text() if lower else ""
    return Program(_cleaned(str(traced.jaxpr)), _cleaned(lowered))


def _cleaned(text: str) -> str:
    text = "\n".join(line for line in text.splitlines() if " at 0x" not in line)
    # jax's kernel also writes its sizes into the profiler's notes; those are no proof that anything reads them
    return re.sub(r"xprof_metadata.*", "", text)


@pytest.fixture(scope="module", params=["attnops", "jax", pytest.param("tokamax", marks=NEEDS_TOKAMAX)])
def kernel(request: pytest.FixtureRequest) -> tuple[str, Program]:
    """A kernel, and its program for the base config."""
    return request.param, _program(BASE[request.param])


def test_base_is_stable(kernel: tuple[str, Program]) -> None:
    assert _program(BASE[kernel[0]]) == kernel[1]


# Of these the program for the TPU is read; of others it is made only where the traced one is the same.
READ = (
    "residual_checkpoint_name", "interpret", "use_fused_bwd_kernel", "block_kv_dkv_sums", "vmem_limit_bytes",
    "use_experimental_scheduler",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_field_reaches_the_kernel(field: str, kernel: tuple[str, Program]) -> None:
    name, base = kernel
    if field in LACKING[name] or (name, field) == ("tokamax", "use_fused_bwd_kernel"):
        given = CHANGES["attnops"][field] if field in LACKING[name] else False
        with pytest.raises(ConfigError, match=f"{field}=.* can't be carried by kernel='{name}'"):
            SplashConfig.coerce(BASE[name] | {field: given})
        return
    changed = BASE[name] | {field: CHANGES[name][field]}  # a new field without a change here fails
    if field == "use_fused_bwd_kernel":
        changed = {n: value for n, value in changed.items() if "_dq" not in n}
    if field == "block_kv_dq" and name == "attnops":  # what lies in it goes with it
        changed["block_kv_dq_compute"] = changed[field]
    if field == "block_kv_dkv_sums":  # of the fused backward alone
        fused = {n: value for n, value in changed.items() if "_dq" not in n}
        fused |= {"use_fused_bwd_kernel": True, "block_kv_dkv": 256}
        base = _program({n: value for n, value in fused.items() if n != field})
        changed = fused
    if field == "kernel":
        changed = {n: value for n, value in changed.items() if n not in LACKING[changed["kernel"]]}
    if field not in READ and _program(changed, lower=False).traced != base.traced:
        return
    got = _program(changed)
    assert got != base
    if field == "residual_checkpoint_name":
        assert "splash_residuals" in got.traced
    if field == "use_experimental_scheduler":
        flag = "'XLA_TPU_FORCE_LP_LLO_SCHEDULER': True"
        assert flag not in base.traced + base.lowered
        # tokamax has it in its forward pass alone
        assert (got.traced + got.lowered).count(flag) == (1 if name == "tokamax" else 3)
    got, base = got.lowered, base.lowered
    if field == "interpret":
        assert "tpu_custom_call" in base
        assert "tpu_custom_call" not in got
    if field == "use_fused_bwd_kernel":
        assert (base.count("custom_call @tpu_custom_call"), got.count("custom_call @tpu_custom_call")) == (3, 2)
    if field == "block_kv_dkv_sums":
        assert (base.count("custom_call @tpu_custom_call"), got.count("custom_call @tpu_custom_call")) == (2, 3)
    if field == "vmem_limit_bytes":
        assert _limits(base) == [32 << 20] * 3
        assert _limits(got) == [48 << 20] * 3


def _limits(text: str) -> list[int]:
    """Each kernel's declared VMEM limit."""
    return [int(size) for size in re.findall(r"scoped_memory_configs[^\]]*?size\\?[^\]]*?: (\d+)\}\]", text)]


@pytest.mark.parametrize("name", ["block_q_dq", "block_kv_dq", "block_kv_dq_compute"])
def test_dq_blocks_are_refused_with_the_fused_backward(name: str) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        SplashConfig.coerce({name: 128, "use_fused_bwd_kernel": True})


def _resolved(config: dict[str, Any], length: int = 4096, kind: str = "TPU v5 lite", dim: int = 128) -> Any:
    metadata = OperationMetadata(mesh=_mesh(kind), operation_configs={"splash": config})
    x = jax.ShapeDtypeStruct((1, length, 2, dim), jnp.bfloat16)
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x)
    assert plan.method == "forward_tpu", plan.refusal()
    return plan.config


@pytest.mark.parametrize(
    ("kind", "dim", "expected"),
    [
        ("TPU v5 lite", 64, True),
        ("TPU v5 lite", 128, False),
        ("TPU v6 lite", 128, True),
        ("TPU v6 lite", 256, False),
        ("TPU7x", 64, True),
        ("TPU7x", 128, True),
    ],
)
def test_weights_stay_where_a_head_dim_leaves_columns_idle(kind: str, dim: int, expected: bool) -> None:
    assert _resolved({}, kind=kind, dim=dim).stationary_weights is expected
    assert _resolved({"stationary_weights": not expected}, kind=kind, dim=dim).stationary_weights is not expected


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (
            {},
            {
                "block_q": 1024,
                "block_kv": 1024,
                "block_kv_compute": 512,
                "block_kv_compute_in": 512,
                "heads_per_tile": 1,
            },
        ),
        ({}, {"block_q_dkv": 1024, "block_kv_dkv_compute": 512, "use_fused_bwd_kernel": True, "block_q_dq": None}),
        ({"block_q": 256}, {"block_q": 256, "block_q_dkv": 256, "block_kv": 1024}),
        ({"block_q": None}, {"block_q": 128}),  # the kernel's own default
        ({"block_kv_dkv_sums": 3072}, {"block_kv_dkv_sums": 3072, "block_kv_dkv": 1024, "use_fused_bwd_kernel": True}),
        ({"block_kv_dkv_sums": 640}, {"block_kv_dkv": 640}),
        ({"block_kv_dkv_sums": None}, {"block_kv_dkv_sums": None, "block_kv_dkv": 1024}),
        ({"block_kv_compute": None, "block_kv": 1024}, {"block_kv_compute": 1024}),
        ({"block_kv": 2048}, {"block_kv_compute": 512}),
        ({"use_fused_bwd_kernel": None}, {"use_fused_bwd_kernel": False, "block_q_dq": 1024, "block_kv_dq": 512}),
        ({"block_kv_dq": 256}, {"use_fused_bwd_kernel": False, "block_kv_dq": 256, "block_kv_dq_compute": 256}),
        ({"block_kv_dq": 1024}, {"block_kv_dq": 1024, "block_kv_dq_compute": 512}),
        ({"block_kv_dq": 1024, "block_kv_dq_compute": None}, {"block_kv_dq_compute": 1024}),
        ({"block_kv_dq_compute": 384}, {"use_fused_bwd_kernel": False, "block_kv_dq": 384}),
        ({"block_q_dq": None}, {"use_fused_bwd_kernel": False, "block_q_dq": 128}),
        ({"block_kv_compute_in": 256}, {"block_kv": 1024, "block_kv_compute": 512, "block_kv_compute_in": 256}),
        ({"block_kv_compute_in": 384}, {"block_kv": 384, "block_kv_compute": 384}),
        (
            {"vmem_limit_bytes": None},
            {"vmem_limit_bytes": None, "block_q": 1024, "block_kv_dkv_sums": None},
        ),  # of 16 MiB
        ({"kernel": "jax"}, {"block_q": 512, "block_kv_compute": 512, "block_q_dq": 512}),
        ({"kernel": "jax", "block_q": 256}, {"block_q": 256, "block_q_dkv": 256, "block_kv": 512}),
        ({"kernel": "jax", "use_fused_bwd_kernel": True}, {"block_q_dq": None, "block_kv_dq": None}),
        pytest.param(
            {"kernel": "tokamax", "block_q": 256},
            {"block_q_dkv": 256, "block_kv": 512, "use_fused_bwd_kernel": True},
            marks=NEEDS_TOKAMAX,
        ),
    ],
)
def test_unset_is_chosen_and_none_is_the_kernels_default(given: dict[str, Any], resolved: dict[str, Any]) -> None:
    config = _resolved(given)
    assert {name: getattr(config, name) for name in resolved} == resolved


@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize(
    ("dim", "length", "mask", "small"),
    [
        (128, 32768, Full(), True),
        (256, 32768, Full(), False),
        (256, 32768, Causal(0), False),
        (256, 4096, Causal(0), True),
        (256, 32768, Causal(0) & SlidingWindow(1023, 0, offset=0), True),
        (512, 4096, Causal(0), False),
    ],
)
def test_where_products_fill_the_backward_pass_its_units_are_small_only_at_edges(
    kind: str, dim: int, length: int, mask: Mask, small: bool
) -> None:
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=_mesh(kind), tuning="off"))
    config = attend.plan(x, x, x, mask=mask).config
    assert (config.products_ahead_dkv, config.block_kv_dkv_compute) == ((2, 256) if small else (0, 512))
    assert config.block_q_dkv_compute == 512 or small


_LOCAL = Causal(0) & SlidingWindow(1023, 0, offset=0)


@pytest.mark.parametrize(
    ("kind", "dim", "length", "mask", "forward", "backward"),
    [
        ("TPU v6 lite", 64, 32768, Full(), (256, 256), (256, 256)),
        ("TPU v6 lite", 128, 32768, _LOCAL, (256, 256), (256, 256)),
        ("TPU v6 lite", 256, 32768, Full(), (256, 256), (512, 512)),
        ("TPU7x", 64, 32768, Full(), (256, 256), (512, 256)),
        ("TPU7x", 128, 32768, Full(), (256, 512), (512, 256)),
        ("TPU7x", 128, 32768, Causal(0), (256, 512), (512, 256)),
        ("TPU7x", 128, 32768, _LOCAL, (256, 256), (256, 256)),
        ("TPU7x", 192, 32768, Full(), (256, 256), (512, 256)),
        ("TPU7x", 256, 32768, Full(), (256, 256), (512, 512)),
        ("TPU7x", 256, 8192, Causal(0), (256, 256), (512, 512)),
        ("TPU v5 lite", 64, 32768, _LOCAL, (256, 256), (512, 512)),
        ("TPU v5 lite", 128, 32768, _LOCAL, (256, 256), (256, 256)),
        ("TPU v5 lite", 128, 32768, Causal(0), (512, 512), (512, 512)),
        ("TPU v4", 128, 4096, Full(), (256, 256), (256, 256)),
        ("TPU v4", 64, 65536, Causal(0), (256, 256), (256, 256)),  # separate backward passes
        ("TPU v5p", 256, 32768, _LOCAL, (256, 256), (256, 256)),
        ("TPU v5p", 256, 32768, Full(), (512, 512), (512, 512)),
    ],
)
def test_small_units_where_the_mask_leaves_out_more_than_they_cost(
    kind: str, dim: int, length: int, mask: Mask, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """As the static cycles of compiled kernels have it: docs/splash.md, Units and code length."""
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=_mesh(kind), tuning="off"))
    config = attend.plan(x, x, x, mask=mask).config
    assert (config.block_q_compute, config.block_kv_compute) == forward
    assert (config.block_q_dkv_compute, config.block_kv_dkv_compute) == backward


@pytest.mark.parametrize(
    ("declared", "forward", "backward"),
    [
        ({}, (256, 256), (256, 256)),
        ({"block_kv_compute": 512}, (512, 512), (256, 256)),
        ({"block_q_compute": 512, "block_q_dkv_compute": 256}, (512, 512), (256, 256)),
        ({"block_q_compute": 1024, "block_kv_dkv_compute": 512}, (1024, 512), (512, 512)),
        ({"block_q_compute": 128, "block_kv_compute": 128}, (128, 128), (256, 256)),
    ],
)
def test_units_go_with_what_is_declared_of_them(
    declared: dict[str, int], forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """256 queries with 512 keys would take more cycles than either unit."""
    x = jax.ShapeDtypeStruct((1, 8192, 1, 128), jnp.bfloat16)
    metadata = OperationMetadata(mesh=_mesh("TPU v5 lite"), tuning="off", operation_configs={"splash": declared})
    config = OperationRegistry.create("splash", metadata).plan(x, x, x, mask=_LOCAL).config
    assert (config.block_q_compute, config.block_kv_compute) == forward
    assert (config.block_q_dkv_compute, config.block_kv_dkv_compute) == backward


@pytest.mark.parametrize(
    ("queries", "mode", "expected"),
    [(128, "prefill", 8), (256, "prefill", 4), (384, "insert", 2), (640, "prefill", 1), (128, "train", 1)],
)
def test_heads_of_a_group_share_a_tile_of_few_queries(queries: int, mode: str, expected: int) -> None:
    """As many of eight as make up 1024 rows."""
    q, k = (jax.ShapeDtypeStruct((1, n, heads, 128), jnp.bfloat16) for n, heads in ((queries, 8), (4096, 1)))
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=_mesh("TPU v5 lite")))
    plan = attend.plan(q, k, k, mode=mode, query_offset=4096 - queries)
    assert plan.config.heads_per_tile == expected


def test_the_generation_decides_what_fits() -> None:
    """Sums of a kv head's 65536 keys take 64 MiB: 128 MiB of VMEM hold them, 64 half of them, 16 not the eighth part."""
    found = {kind: _resolved({}, 65536, kind) for kind in ("TPU v5 lite", "TPU v5p", "TPU v4")}
    assert {kind: config.use_fused_bwd_kernel for kind, config in found.items()} == {
        "TPU v5 lite": True, "TPU v5p": True, "TPU v4": False,
    }  # fmt: skip
    assert [config.block_kv_dkv_sums for config in found.values()] == [None, 32768, None]
    # At head dimension 256 an eighth fits with half the keys in a block, which doesn't change a declared block.
    halved = _resolved({}, 8192, "TPU v4", 256)
    assert (halved.block_kv_dkv, halved.block_kv_dkv_sums, halved.use_fused_bwd_kernel) == (512, 1024, True)
    assert _resolved({"block_kv_dkv": 1024}, 8192, "TPU v4", 256).use_fused_bwd_kernel is False
    # What is said of the sums is kept, fitting or not.
    assert _resolved({"block_kv_dkv_sums": None}, 65536, "TPU v5p").use_fused_bwd_kernel is False
    assert _resolved({"block_kv_dkv_sums": 8192}, 32768, "TPU v5 lite").block_kv_dkv_sums == 8192
    assert _resolved({}, 65536, "TPU v4").vmem_limit_bytes is None
    assert 16 << 20 < _resolved({}, 32768).vmem_limit_bytes <= 128 << 20
    # a declared limit counts only as far as the device has it
    assert _resolved({"vmem_limit_bytes": 100 << 20}, 65536, "TPU v5p").block_kv_dkv_sums == 32768
    assert _resolved({}, 4096, "TPU v4", 512).block_q < _resolved({}, 4096, "TPU v6 lite", 512).block_q


def test_what_may_not_fit_is_noted() -> None:
    blocks = dict.fromkeys(("block_q", "block_q_compute", "block_kv", "block_kv_compute"), 8192)
    metadata = OperationMetadata(mesh=MESH, operation_configs={"splash": blocks})
    x = jax.ShapeDtypeStruct((1, 8192, 2, 128), jnp.bfloat16)
    attend = OperationRegistry.create("splash", metadata)
    assert any(re.search(r"MiB of VMEM.* may take 128\.0", note) for note in attend.plan(x, x, x).notes)
    small = OperationRegistry.create("splash", OperationMetadata(mesh=MESH)).plan(x, x, x)
    assert not has_note(small.notes, "splash.vmem")


@pytest.mark.parametrize(
    ("length", "block"),
    [(4096, 1024), (4100, 384), (600, 640), (577, 640), (197, 256), (77, 128), (75600, 1024), (1500, 768)],
)
def test_blocks_trade_padding_against_size(length: int, block: int) -> None:
    """The largest block that pads at most a fiftieth more than blocks of 128 would."""
    x = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
    plan = OperationRegistry.create("splash", OperationMetadata(mesh=MESH)).plan(x, x, x)
    assert plan.config.block_q == block
    assert (length + plan.padding.q_len) % block == 0
    assert plan.padding.waste == pytest.approx(1 - (length / (length + plan.padding.q_len)) ** 2)


def test_metadata_block_sizes_feed_the_config() -> None:
    metadata = OperationMetadata(mesh=MESH, blocksize_q=256, blocksize_k=384, blocksize_b=2)
    x = jax.ShapeDtypeStruct((1, 1536, 2, 128), jnp.bfloat16)
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x)
    assert (plan.config.block_q, plan.config.block_kv) == (256, 384)
    assert "blocksize_b=2 is not read by splash" in plan.notes


@pytest.mark.parametrize(
    ("layout", "fields", "said"),
    [
        ("bthd", {}, "query, key, value, output and their gradients are transposed around it, 16.0 MiB per device"),
        ("bhtd", {}, None),
        (
            "bhtd",
            {"k_layout": "seq_minor"},
            "dim]: key and their gradients are transposed around it, 4.0 MiB per device",
        ),
    ],
)
def test_what_is_transposed_around_the_kernel_is_told(layout: str, fields: dict[str, Any], said: str | None) -> None:
    metadata = OperationMetadata(mesh=_mesh("TPU v5 lite"), operation_configs={"splash": fields})
    shape = (1, 8192, 2, 128) if layout == "bthd" else (1, 2, 8192, 128)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    plan = OperationRegistry.create("splash", metadata).plan(x, x, x, layout=layout)
    notes = [note for note in plan.notes if "transposed around" in note]
    assert (len(notes), bool(said)) in ((0, False), (1, True))
    assert said is None or said in notes[0]
    assert "transposed around" not in plan.explain()
