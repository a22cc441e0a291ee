"""splash for TPUs on a machine without one: lowered everywhere, compiled by the real TPU compiler where libtpu is there.

What compiles is not thereby numerically right: the numbers are held against the reference in Pallas' interpreter.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, Prefix, SlidingWindow
from attnops.compat import abstract_device
from attnops.planning.notes import has_note
from attnops.verify.topology import TOPOLOGIES, described_mesh

V5E = AbstractMesh((2, 2), ("fsdp", "tp"), abstract_device=abstract_device("TPU v5 lite", 1, "tpu"))


def _program(mesh: Any, mask: Mask, dtype: str, config: dict[str, Any] | None, shape: tuple[int, ...], **call: Any):
    """(function of q, k, v giving loss and gradients, arguments laid out as planned, plan)."""
    batch, length, heads, kv_heads, dim = shape
    configs = {"splash": config} if config else {}
    attend = OperationRegistry.create(
        "splash", OperationMetadata(mesh=mesh, operation_configs=configs, fallback="error")
    )
    q, k = (jax.ShapeDtypeStruct((batch, length, h, dim), dtype) for h in (heads, kv_heads))
    plan = attend.plan(q, k, k, mask=mask, **call)

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        loss = lambda *x: attend(*x, mask=mask, **call).attention_outputs.astype(jnp.float32).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    laid_out = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, plan.placement.fitted[tensor].spec))
        for tensor, x in (("query", q), ("key", k), ("value", k))
    ]
    return both, laid_out, plan


def test_plan_for_a_described_tpu() -> None:
    _, _, plan = _program(V5E, Causal(), "bfloat16", None, (2, 1024, 8, 4, 128))
    assert plan.implementation == "splash.forward_tpu"
    assert plan.problem.platform_source == "the mesh's devices"
    assert "splash.forward_tpu" in plan.explain()


def test_lowers_for_tpu_without_libtpu() -> None:
    function, arguments, plan = _program(V5E, Causal() & SlidingWindow(left=200), "bfloat16", None, (2, 512, 8, 4, 64))
    assert plan.method == "forward_tpu"
    exported = jax.export.export(jax.jit(function), platforms=("tpu",))(*arguments)
    text = exported.mlir_module()
    assert text.count("tpu_custom_call") == 2  # forward, and the three gradients in one
    assert exported.nr_devices == 4


topology = pytest.importorskip("libtpu", reason="pip install 'attnops[tpu]'")


@pytest.fixture(scope="module")
def v5e() -> Any:
    return described_mesh("v5e:2x2", {"fsdp": 2, "tp": 2})


MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": Causal() & SlidingWindow(left=100),
    "chunked_100": Causal() & Chunked(100),
    "prefix": Causal() | Prefix(70),
}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("causal", 600),
        *((name, 200) for name in MASKS if name != "causal"),
        *(pytest.param(name, 600, marks=pytest.mark.slow) for name in MASKS if name != "causal"),
    ],
)
def test_compiles_for_v5e(v5e: Any, name: str, length: int) -> None:
    function, arguments, plan = _program(v5e, MASKS[name], "bfloat16", None, (2, length, 8, 4, 128))
    assert (plan.method, plan.problem.device_kind) == ("forward_tpu", "TPU v5 lite")
    compiled = jax.jit(function).lower(*arguments).compile()
    text = compiled.as_text()
    assert text.count("tpu_custom_call") >= 2
    assert not [op for op in ("all-gather(", "all-to-all(", "collective-permute(") if op in text]


JAX = {"kernel": "jax"}


@pytest.mark.parametrize("length", [256, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "dim", "config", "call"),
    [
        ("float32", 128, None, {}),
        pytest.param("bfloat16", 72, None, {}, marks=pytest.mark.slow),
        ("bfloat16", 256, None, {"logits_soft_cap": 30.0}),
        ("bfloat16", 64, {"use_fused_bwd_kernel": False}, {}),
        ("bfloat16", 128, {"q_layout": "seq_minor", "k_layout": "seq_minor", "v_layout": "seq_minor"}, {}),
        ("bfloat16", 128, {"block_q": 256, "block_kv": 512, "block_kv_compute": 256, "block_kv_compute_in": 128}, {}),
        ("bfloat16", 128, {"heads_per_tile": 4, "use_base2_exp": False, "fuse_reciprocal": False}, {}),
        pytest.param("bfloat16", 128, {"block_kv_dkv": 256, "block_kv_dkv_sums": 256}, {}, marks=pytest.mark.slow),
        ("bfloat16", 128, {"use_experimental_scheduler": True, "vmem_limit_bytes": 24 << 20}, {}),
        pytest.param("float32", 128, JAX, {}, marks=pytest.mark.slow),
        ("bfloat16", 256, JAX, {"logits_soft_cap": 30.0}),
        ("bfloat16", 64, JAX | {"use_fused_bwd_kernel": True}, {}),
        ("bfloat16", 128, JAX | {"q_layout": "seq_minor", "k_layout": "seq_minor", "v_layout": "seq_minor"}, {}),
        ("bfloat16", 128, JAX | {"block_q": 256, "block_kv": 384, "block_kv_compute": 128, "block_kv_dkv": 128}, {}),
        ("bfloat16", 128, JAX | {"block_q": 64, "block_q_dkv": 128, "block_q_dq": 128}, {}),
    ],
)
def test_compiles_with_what_is_declared(v5e: Any, dtype: str, dim: int, config: Any, call: Any, length: int) -> None:
    function, arguments, plan = _program(v5e, Causal(), dtype, config, (2, length, 8, 4, dim), **call)
    assert plan.method == "forward_tpu"
    for name, value in (config or {}).items():
        assert getattr(plan.config, name) == value
    assert jax.jit(function).lower(*arguments).compile().as_text().count("tpu_custom_call") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("size", "topology"), [(2048, "v5p:2x2x1"), (2048, "v6e:2x2"), (4096, "v5p:2x2x1")])
def test_large_blocks_compile(size: int, topology: str) -> None:
    """Those of long sequences, in the VMEM that is asked for: here declared, for lists of such lengths compile for minutes."""
    blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dq", "block_kv_dq"), size)
    mesh = described_mesh(topology, {"fsdp": 2, "tp": 2})
    function, arguments, plan = _program(mesh, Causal(), "bfloat16", blocks, (2, 2 * size, 2, 2, 128))
    assert not has_note(plan.notes, "splash.vmem")
    assert size > 2048 or plan.config.block_kv_dq_compute == 512
    assert jax.jit(function).lower(*arguments).compile().as_text().count("tpu_custom_call") == 3


@pytest.mark.slow
def test_dropout_of_many_rows_and_heads_compiles() -> None:
    """4096 rows of 32 heads a device: a key for each would be a MiB of scalar memory, which is all that there is."""
    mesh = described_mesh("v5p:2x2x1", {"fsdp": 4})
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, fallback="error", tuning="off"))

    def loss(q: jax.Array, rng: jax.Array) -> jax.Array:
        made = attend(q, q, q, dropout_prob=0.1, dropout_rng=rng, deterministic=False)
        return made.attention_outputs.astype(jnp.float32).sum()

    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("fsdp"), PartitionSpec()))
    x = jax.ShapeDtypeStruct((4 * 4096, 128, 32, 64), jnp.bfloat16, sharding=rows)
    rng = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=everywhere)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(x, rng).compile()
    assert compiled.as_text().count("tpu_custom_call") == 2


SEED = jax.eval_shape(lambda: jax.random.key(0))


def _traced(n: int) -> dict[str, dict[str, Any]]:
    """What is traced, for a length of n."""
    operands: dict[str, dict[str, Any]] = {
        "segment_ids": {"q_segment_ids": jax.ShapeDtypeStruct((2, n), jnp.int32)},
        "kv_lengths": {"kv_lengths": jax.ShapeDtypeStruct((2,), jnp.int32)},
        "query_offset": {"query_offset": jax.ShapeDtypeStruct((2,), jnp.int32)},
        "sinks": {"softmax_aux": jax.ShapeDtypeStruct((8,), jnp.float32)},
        "bias": {"bias": jax.ShapeDtypeStruct((1, 8, n, n), jnp.float32)},
        "bias_of_keys": {"bias": jax.ShapeDtypeStruct((2, 1, 1, n), jnp.bfloat16)},
        "dense_mask": {"mask": jax.ShapeDtypeStruct((2, 1, n, n), jnp.bool_)},
        "dense_mask_of_rows": {"mask": jax.ShapeDtypeStruct((1, 8, n, 1), jnp.bool_)},
        "dropout": {"dropout_rng": SEED, "dropout_prob": 0.1, "deterministic": False},
    }
    together = ("segment_ids", "kv_lengths", "query_offset", "sinks")
    return operands | {"together": {n: x for of in together for n, x in operands[of].items()}}


# The larger the blocks, the longer the compiler takes: blocks of 256 in `make test`, of 640 in `make test-all`.
SHORT, LONG = 200, 600
TRACED = {n: _traced(n) for n in (SHORT, LONG)}
# What `make test` compiles, with the passes fused.
TRACED_OFTEN = ("together", "bias", "dense_mask_of_rows", "dropout")


@pytest.mark.parametrize(
    ("name", "fused", "length"),
    [
        *(pytest.param(n, True, SHORT, id=f"{n}-fused-{SHORT}") for n in TRACED_OFTEN),
        *(
            pytest.param(n, fused, LONG, id=f"{n}-{kind}-{LONG}", marks=pytest.mark.slow)
            for n in TRACED[LONG]
            for fused, kind in ((True, "fused"), (False, "apart"))
        ),
    ],
)
def test_traced_operands_compile(v5e: Any, name: str, fused: bool, length: int) -> None:
    """One program for all lengths, ids and places: they are operands."""
    configs = {"splash": {"use_fused_bwd_kernel": fused}}
    attend = OperationRegistry.create(
        "splash", OperationMetadata(mesh=v5e, operation_configs=configs, fallback="error")
    )
    sharding = NamedSharding(v5e, jax.P())
    laid_out = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    x = laid_out(jax.ShapeDtypeStruct((2, length, 8, 128), jnp.bfloat16))
    given = TRACED[length][name]
    traced = {n: laid_out(v) for n, v in given.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {n: v for n, v in given.items() if n not in traced}

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, traced: Any) -> jax.Array:
        out = attend(q, k, v, return_lse=True, **traced, **static)
        return out.attention_outputs.astype(jnp.float32).sum() + out.lse.sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, traced).compile()
    assert compiled.as_text().count("tpu_custom_call") >= (2 if fused else 3)


def _generation(topology: str) -> Any:
    often = topology.startswith("v6e")
    return pytest.param(topology, marks=[] if often else [pytest.mark.slow])


@pytest.mark.parametrize("topology", [_generation(t) for t in TOPOLOGIES if t != "v5e:4x4"])
@pytest.mark.parametrize(
    "dim", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("key", "value", "config"),
    [
        ("int8", "int8", None),
        ("float8_e4m3fn", "float8_e5m2", {"k_layout": "seq_minor", "v_layout": "seq_minor"}),
        pytest.param("float8_e5m2", "int8", {"heads_per_tile": 4}, marks=pytest.mark.slow),
        pytest.param("int8", "bfloat16", {"block_kv_compute": 256, "block_kv_compute_in": 128}, marks=pytest.mark.slow),
    ],
)
def test_quantised_keys_and_values_compile(topology: str, dim: int, key: str, value: str, config: Any) -> None:
    """int8 and fp8 become bfloat16 in the kernel on every generation; the forward kernel takes them as they are."""
    mesh = Mesh(described_mesh(topology).devices.reshape(-1)[:1], ("one",))
    configs = {"splash": config or {}}
    attend = OperationRegistry.create(
        "splash", OperationMetadata(mesh=mesh, operation_configs=configs, fallback="error")
    )
    there = NamedSharding(mesh, jax.P())
    length = SHORT if topology.startswith("v6e") and dim == 128 else LONG
    shape = lambda heads, n, dtype: jax.ShapeDtypeStruct((2, length, heads, n), jnp.dtype(dtype), sharding=there)  # noqa: E731
    arrays = {"query": shape(8, dim, "bfloat16"), "key": shape(2, dim, key), "value": shape(2, dim, value)}
    arrays["key_scale"] = shape(2, 1, "float32")
    if value != "bfloat16":
        arrays["value_scale"] = shape(2, 1, "float32")
    smooth = ("query", "key_scale", "value_scale")

    def both(arrays: dict[str, Any]) -> Any:
        def loss(part: dict[str, Any]) -> jax.Array:
            return attend(**(arrays | part)).attention_outputs.astype(jnp.float32).sum()

        return jax.value_and_grad(loss)({n: arrays[n] for n in smooth if n in arrays})

    text = jax.jit(both).lower(arrays).compile().as_text()
    assert text.count("tpu_custom_call") >= 2
    forward = next(line for line in text.splitlines() if "attnops_splash_forward" in line and "custom-call(" in line)
    words = {"int8": "s8[", "float8_e4m3fn": "f8e4m3fn[", "float8_e5m2": "f8e5m2[", "bfloat16": "bf16["}
    assert all(words[dtype] in forward for dtype in (key, value))


@pytest.mark.parametrize("precision", ["highest", pytest.param("high", marks=pytest.mark.slow)])
def test_the_global_precision_does_not_reach_bfloat16(v5e: Any, precision: str) -> None:
    """Mosaic takes bfloat16 operands at the default precision only."""
    function, arguments, _ = _program(v5e, Causal(), "bfloat16", None, (2, 256, 8, 4, 128))
    with jax.default_matmul_precision(precision):
        assert "tpu_custom_call" in jax.jit(function).lower(*arguments).compile().as_text()


WITH_64_BITS: dict[str, tuple[Any, ...]] = {  # config, names of traced operands
    "plain": (None,),
    "operands": (None, "segment_ids", "kv_lengths", "query_offset", "sinks", "bias", "dropout"),
    "apart": ({"use_fused_bwd_kernel": False}, "kv_lengths"),
    "jax": (JAX, "segment_ids", "sinks"),
    "tokamax": ({"kernel": "tokamax"}, "kv_lengths"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("apart", "jax") else [pytest.mark.slow]) for n in WITH_64_BITS]
)
def test_compiles_with_64_bits(v5e: Any, name: str) -> None:
    """Mosaic has no integers of 64 bits, which Python numbers are with jax_enable_x64."""
    if name == "tokamax":
        pytest.importorskip("tokamax")
    config, *operands = WITH_64_BITS[name]
    length = SHORT if name in ("apart", "jax") else LONG
    there = NamedSharding(Mesh(v5e.devices.reshape(-1)[:1], ("one",)), jax.P())
    attend = OperationRegistry.create(
        "splash",
        OperationMetadata(
            mesh=there.mesh, operation_configs={"splash": config} if config else {}, fallback="error", tuning="off"
        ),
    )
    given: dict[str, Any] = {}
    for operand in operands:
        given |= TRACED[length][operand]
    laid_out = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)  # noqa: E731
    traced = {n: laid_out(v) for n, v in given.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {n: v for n, v in given.items() if n not in traced}
    x = laid_out(jax.ShapeDtypeStruct((2, length, 8, 128), jnp.bfloat16))
    smooth = [n for n in ("bias", "softmax_aux") if n in traced]

    def loss(tensors: Any, part: Any, traced: Any) -> jax.Array:
        return attend(*tensors, **(traced | part), **static).attention_outputs.astype(jnp.float32).sum()

    with jax.enable_x64(True):
        program = jax.jit(jax.grad(loss, (0, 1)))
        compiled = program.lower((x, x, x), {n: traced[n] for n in smooth}, traced).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 2
    wanted = (*(jnp.bfloat16,) * 3, *(traced[n].dtype for n in smooth))
    assert tuple(g.dtype for g in jax.tree.leaves(compiled.out_info)) == wanted


@pytest.mark.parametrize(
    "axes", [{"fsdp"}, pytest.param({"fsdp", "tp"}, marks=pytest.mark.slow)], ids=["part", "whole"]
)
def test_compiles_inside_a_checked_shard_map(v5e: Any, axes: set[str]) -> None:
    """check_vma=True in the caller's shard_map, over a part of the mesh or all of it."""
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=v5e, fallback="error"))
    spec = jax.P("fsdp", None, "tp" if "tp" in axes else None)
    inner = jax.shard_map(
        lambda *x: attend(*x).attention_outputs,
        mesh=v5e,
        in_specs=spec,
        out_specs=spec,
        axis_names=axes,
        check_vma=True,
    )
    x = jax.ShapeDtypeStruct((2, SHORT, 8, 128), jnp.bfloat16, sharding=NamedSharding(v5e, spec))
    loss = jax.grad(lambda *x: inner(*x).astype(jnp.float32).sum(), (0, 1, 2))
    assert jax.jit(loss).lower(x, x, x).compile().as_text().count("tpu_custom_call") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "layout", "mode"),
    [
        *((target, "bthd", "train") for target in ("v4:2x2x1", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")),
        *((target, "bhtd", "train") for target in ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")),
        *((target, "bthd", "prefill") for target in ("v4:2x2x1", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")),
    ],
)
def test_projections_make_tensors_in_the_kernels_order(target: str, layout: str, mode: str) -> None:
    """In either layout: nothing of the size of a query, key or value is copied or transposed on its way, forward or back."""
    one = Mesh(described_mesh(target).devices.reshape(-1)[:1], ("fsdp",))
    attend = OperationRegistry.create("splash", OperationMetadata(mesh=one, fallback="error", tuning="off"))
    batch, length, heads, kv_heads, dim, width = 4, 4096, 16, 4, 128, 2048
    of_heads = "bthk" if layout == "bthd" else "bhtk"

    def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
        *projections, out = weights
        q, k, v = (jnp.einsum(f"btd,dhk->{of_heads}", x, w) for w in projections)
        output = attend(q, k, v, mask=Causal(), layout=layout, mode=mode).attention_outputs
        return jnp.einsum(f"{of_heads},hkd->btd", output, out).astype(jnp.float32).sum()

    shapes = [(batch, length, width), *((width, n, dim) for n in (heads, kv_heads, kv_heads)), (heads, dim, width)]
    sharding = NamedSharding(one, PartitionSpec())
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    program = jax.jit(jax.grad(loss, range(5)) if mode == "train" else loss)
    text = program.lower(*given).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    copied = [shape.split(",") for shape in re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", entry)]
    assert "tpu_custom_call" in entry
    assert not [shape for shape in copied if str(length) in shape]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_units_of_a_whole_block_compile(target: str) -> None:
    """Tested square by square at the diagonal, such units kept the compiler busy for minutes on tpu7x."""
    one = Mesh(described_mesh(target).devices.reshape(-1)[:1], ("fsdp",))
    sides = ("q", "kv", "q_dkv", "kv_dkv")
    fields = {f"block_{side}{inner}": 1024 for side in sides for inner in ("", "_compute")}
    configs = {"splash": fields | {"use_fused_bwd_kernel": True}}
    attend = OperationRegistry.create(
        "splash", OperationMetadata(mesh=one, operation_configs=configs, fallback="error")
    )
    x = jax.ShapeDtypeStruct((1, 2048, 1, 64), jnp.bfloat16, sharding=NamedSharding(one, PartitionSpec()))

    def loss(*qkv: jax.Array) -> jax.Array:
        return attend(*qkv, mask=Causal()).attention_outputs.astype(jnp.float32).sum()

    assert "tpu_custom_call" in jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().as_text()
