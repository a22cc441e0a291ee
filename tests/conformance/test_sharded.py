"""On eight devices the answer is the unsharded one, forward and gradient, however the mesh splits the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from versions import JAX_0_9

from attnops import InputError
from attnops.verify.closeness import row_error, row_sizes

from . import cases, harness

MESHES = {
    "dp2_fsdp2_tp2": {"dp": 2, "fsdp": 2, "tp": 2},
    "fsdp2_tp2_sp2": {"fsdp": 2, "tp": 2, "sp": 2},
    "tp8": {"tp": 8},
    "sp8": {"sp": 8},
    "tp4_sp2": {"tp": 4, "sp": 2, "dp": 1},
    "fsdp8": {"fsdp": 8},
}
CASES = {  # and the layout that each is tried in
    "causal": "bthd",
    "causal_window": "bhtd",
    "gqa": "bthd",
    "segment_ids": "bthd",
    "kv_lengths": "bhtd",
    "sinks_per_kv_head": "bthd",
    "prefix": "thd",
    "everything": "bthd",
    "bias_broadcast": "bthd",
    "dense_mask": "bhtd",
    "cache": "bthd",
    "int8_kv": "bthd",
    "fp8_kv": "bhtd",
    "blocks_of_heads": "bthd",
    "chosen_blocks": "bhtd",
}
SIZES = cases.Sizes(batch=4, heads=8, kv_heads=2, length=64)  # every mesh axis divides it


def _mesh(sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def _check(which: str, case: cases.Case, mesh: Any, layout: str, placed: Any = None) -> None:
    implementation = harness.RUNNABLE[which]
    attend = implementation.make("float32", mesh)
    tensors = harness.draw(case, "float32")
    got = harness.run(attend, case, tensors, "float32", layout, placed)
    published = implementation.capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward, shards=True)


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# What `make test` runs of the product; the rest is for `make test-all`.
OFTEN = {
    *((name, "fsdp2_tp2_sp2", list(KINDS)[i % 2]) for i, name in enumerate(CASES)),
    *(("segment_ids", "fsdp2_tp2_sp2", kind) for kind in KINDS),
    *((("gqa", "everything", "causal")[i % 3], mesh, "auto") for i, mesh in enumerate(MESHES)),
}
SPLASH_CASES = {name: layout for name, layout in CASES.items() if name != "everything"} | {
    "bias": "bthd",
    "lse": "bthd",
}
OFTEN_SPLASH = {
    ("bias", "fsdp2_tp2_sp2", "auto"),
    ("causal_window", "fsdp2_tp2_sp2", "explicit"),
    ("segment_ids", "sp8", "auto"),
    ("blocks_of_heads", "fsdp2_tp2_sp2", "auto"),
}
LONGER = replace(SIZES, length=320)
# Work is repeated over some of these meshes; tests/planning/test_declared_split.py is about the warning.
pytestmark = pytest.mark.filterwarnings("ignore::attnops.ShardingWarning")
SLOW = pytest.mark.slow


def _product(names: Iterable[str], often: set[tuple[str, str, str]]) -> list[Any]:
    return [
        pytest.param(name, mesh, kind, id=f"{name}-{mesh}-{kind}", marks=[] if key in often else [pytest.mark.slow])
        for key in covering(itertools.product(names, MESHES, KINDS), 2, often)
        for name, mesh, kind in [key]
    ]


@pytest.mark.parametrize(("name", "mesh", "kind"), _product(CASES, OFTEN))
def test_vanilla(name: str, mesh: str, kind: str) -> None:
    layout = CASES[name]
    _check("vanilla.forward_native", cases.build(name, layout, SIZES), _mesh(MESHES[mesh], KINDS[kind]), layout)


@pytest.mark.parametrize(
    ("name", "mesh", "kind"),
    _product(SPLASH_CASES, OFTEN_SPLASH),
)
def test_splash(name: str, mesh: str, kind: str) -> None:
    # 320 queries: with the sequence split two and more ways, several blocks a shard and a masked rest
    layout, often = SPLASH_CASES[name], (name, mesh, kind) in OFTEN_SPLASH
    sizes = replace(LONGER, batch=2, heads=4) if often else LONGER
    _check("splash.forward_tpu", cases.build(name, layout, sizes), _mesh(MESHES[mesh], KINDS[kind]), layout)


FLASH_CASES = SPLASH_CASES | {"value_dim": "bthd", "dense_mask": "bhtd"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) == ("causal_window", "auto") else [pytest.mark.slow])
        for name, kind in itertools.product(FLASH_CASES, KINDS)
    ],
)
def test_flash(name: str, kind: str) -> None:
    layout, sizes = FLASH_CASES[name], replace(LONGER, length=160)
    mesh = _mesh(MESHES["fsdp2_tp2_sp2"], KINDS[kind])
    _check("flash_attn2.forward_cuda", cases.build(name, layout, sizes), mesh, layout)


@pytest.mark.parametrize(
    "name",
    ["segment_ids"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("prefix", "causal_window", "kv_lengths", "sinks_per_kv_head")],
)
@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kernel",
    [pytest.param("jax", marks=SLOW), pytest.param("tokamax", marks=[SLOW, harness.NEEDS_TOKAMAX])],
)
def test_splash_of_others(kernel: str, name: str, kind: str) -> None:
    case = cases.build(name, CASES[name], replace(LONGER, batch=2, heads=4))
    _check(f"splash.forward_tpu {kernel}", case, _mesh(MESHES["fsdp2_tp2_sp2"], KINDS[kind]), CASES[name])


# 160 keys and, with the sequence split in two, 80 rows: several blocks, the last one short, at offsets known at run time.
PATH_CASES = {
    "causal": "bthd", "causal_window": "bhtd", "gqa": "bthd", "segment_ids": "bthd", "kv_lengths": "bhtd",
    "sinks_per_kv_head": "bthd", "prefix": "thd", "bias": "bthd", "dense_mask": "bhtd", "cache": "bthd", "lse": "bthd",
    "int8_kv": "bhtd", "fp8_kv": "bthd",
}  # fmt: skip

# Each kind of operand, and what each path has of its own; test_vanilla splits the others.
PATHS_OFTEN = {
    "vanilla.forward_native blockwise": ("causal", "kv_lengths", "dense_mask", "lse"),
    "vanilla.forward_native decode": ("causal_window", "segment_ids", "bias", "int8_kv"),
    "vanilla.forward_native decode_rows": ("causal", "gqa", "dense_mask", "fp8_kv"),
}


@pytest.mark.parametrize(
    ("which", "name", "kind"),
    [
        pytest.param(
            *(which, name, kind),
            id=f"{which}-{name}-{kind}",
            marks=[] if kind == "auto" and name in PATHS_OFTEN[which] else [pytest.mark.slow],
        )
        for which, name, kind in covering(
            itertools.product(harness.PATHS, PATH_CASES, KINDS),
            2,
            [(which, name, "auto") for which, names in PATHS_OFTEN.items() for name in names],
        )
    ],
)
def test_native_paths(which: str, name: str, kind: str) -> None:
    case = cases.build(name, PATH_CASES[name], replace(SIZES, length=160))
    _check(which, case, _mesh(MESHES["fsdp2_tp2_sp2"], KINDS[kind]), PATH_CASES[name])


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(*key, marks=[] if key in (("gqa", "tp8"), ("segment_ids", "fsdp2_tp2_sp2")) else [SLOW])
        for key in itertools.product(("gqa", "segment_ids", "causal", "dense_mask"), ("fsdp2_tp2_sp2", "tp8"))
    ],
)
def test_sdpa(name: str, mesh: str) -> None:
    _check("sdpa.forward_native", cases.build(name, CASES[name], SIZES), _mesh(MESHES[mesh]), CASES[name])


@pytest.mark.parametrize(
    ("kinds", "which"),
    [
        ((AxisType.Explicit, AxisType.Auto), "vanilla.forward_native"),
        ((AxisType.Auto, AxisType.Explicit), "splash.forward_tpu"),
        pytest.param((AxisType.Explicit, AxisType.Auto), "splash.forward_tpu", marks=SLOW),
        pytest.param((AxisType.Auto, AxisType.Explicit), "vanilla.forward_native", marks=SLOW),
    ],
)
def test_mixed_axis_types(kinds: tuple[AxisType, AxisType], which: str) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=kinds)
    _check(which, cases.build("gqa", "bthd", SIZES), mesh, "bthd")


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        pytest.param(AxisType.Auto, "splash.forward_tpu", id="auto-splash"),
        pytest.param(AxisType.Explicit, "vanilla.forward_native", id="explicit-vanilla"),
        pytest.param(AxisType.Explicit, "splash.forward_tpu", id="explicit-splash", marks=SLOW),
        pytest.param(AxisType.Auto, "vanilla.forward_native", id="auto-vanilla", marks=SLOW),
    ],
)
def test_inputs_already_laid_out_otherwise(kind: AxisType, which: str) -> None:
    mesh = _mesh(MESHES["fsdp2_tp2_sp2"], kind)
    elsewhere = NamedSharding(mesh, PartitionSpec("tp", None, "fsdp" if kind is AxisType.Auto else None))
    case = cases.build("causal", "bthd", SIZES)
    _check(which, case, mesh, "bthd", lambda arrays: jax.device_put(arrays, elsewhere))


@pytest.mark.parametrize("name", ["causal", pytest.param("gqa", marks=SLOW), "everything"])
def test_lengths_and_heads_that_divide_by_nothing(name: str) -> None:
    sizes = cases.Sizes(batch=3, heads=6, kv_heads=3, length=45)
    _check("vanilla.forward_native", cases.build(name, "bthd", sizes), _mesh(MESHES["fsdp2_tp2_sp2"]), "bthd")


# Computed in `make test`: fewer, as many and more kv heads than devices. Of the others the plan is looked at there.
TP_OFTEN = ((4, 1), (8, 2), (4, 4), (2, 8))


@pytest.mark.parametrize(
    ("tp", "kv_heads", "computed"),
    [
        pytest.param(*key, computed, id=f"tp{key[0]}-kv{key[1]}-{'computed' if computed else 'planned'}", marks=marks)
        for key in itertools.product((2, 4, 8), (1, 2, 4, 8))
        for computed, marks in (((True, []),) if key in TP_OFTEN else ((False, []), (True, [SLOW])))
    ],
)
def test_tp_below_at_and_above_the_kv_heads(tp: int, kv_heads: int, computed: bool) -> None:
    sizes = replace(SIZES, kv_heads=kv_heads)
    case = cases.build("gqa", "bthd", sizes)
    case.features = frozenset({"gqa", "causal"})
    mesh = _mesh({"fsdp": 8 // tp, "tp": tp})
    if computed:
        _check("vanilla.forward_native", case, mesh, "bthd")
    attend = harness.RUNNABLE["vanilla.forward_native"].make("float32", mesh)
    tensors = harness.draw(case, "float32")
    # the least common multiple of heads and devices, over the heads
    assert attend.plan(*tensors[:3]).placement.kv_repeat == max(1, tp // kv_heads)


MODES_OFTEN = (("one_query", "prefill"), ("one_query", "autoregressive"), ("cache", "train"), ("cache", "insert"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(*key, marks=[] if key in MODES_OFTEN else [SLOW])
        for key in itertools.product(("one_query", "cache"), ("train", "prefill", "autoregressive", "insert"))
    ],
)
def test_modes_with_a_cache(name: str, mode: str) -> None:
    case = cases.build(name, "bthd", SIZES)
    case.call["mode"] = mode
    if name == "cache" and mode in ("train", "prefill"):
        case.call["query_offset"] = case.call["kv_lengths"] - case.q_len
    _check("vanilla.forward_native", case, _mesh(MESHES["fsdp2_tp2_sp2"]), "bthd")


@pytest.mark.parametrize("how", ["set_mesh", "with_mesh", "inside_jit"])
def test_the_mesh_of_the_context(how: str) -> None:
    mesh = _mesh(MESHES["fsdp2_tp2_sp2"])
    case = cases.build("causal", "bthd", SIZES)
    if how == "with_mesh":
        with nullcontext() if JAX_0_9 else pytest.warns(DeprecationWarning, match="with mesh"), mesh:
            _check("vanilla.forward_native", case, None, "bthd")
        return
    with jax.set_mesh(mesh):
        attend = harness.RUNNABLE["vanilla.forward_native"].make("float32")
        tensors = harness.draw(case, "float32")
        plans = []

        def call(*x: jax.Array) -> Any:
            result = attend(*x)
            plans.append(result.plan)
            return result

        result = (jax.jit(call) if how == "inside_jit" else call)(*tensors[:3])
    assert plans[0].placement.q_axes == ("sp",)
    assert result.attention_outputs.sharding.shard_shape((4, 64, 8, 16)) == (2, 32, 4, 16)


# Pallas' interpreter can't be traced under check_vma=True; test_tpu_compile.py compiles that.
@pytest.mark.parametrize(
    ("which", "check_vma"),
    [("vanilla.forward_native", True), ("vanilla.forward_native", False), ("splash.forward_tpu", False)],
)
def test_inside_the_callers_own_shard_map(check_vma: bool, which: str) -> None:
    """Manual axes are left alone: the arrays are local to them. Batch is split by the caller, heads by attnops."""
    mesh = _mesh({"fsdp": 2, "tp": 4})
    case = cases.build("causal", "bthd", SIZES)
    tensors = harness.draw(case, "float32")
    attend = harness.RUNNABLE[which].make("float32", mesh)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        inner = jax.shard_map(
            lambda *x: attend(*x).attention_outputs,
            mesh=mesh,
            in_specs=PartitionSpec("fsdp"),
            out_specs=PartitionSpec("fsdp"),
            axis_names={"fsdp"},
            check_vma=check_vma,
        )
        return (inner(q, k, v) * tensors.d_output).sum()

    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(*(jnp.asarray(x) for x in tensors[:3]))
    want = harness.expect(case, tensors)
    for got, name in zip(gradients, ("query", "key", "value"), strict=True):
        assert row_error(got, want.gradients[name], row_sizes(want.gradients[name], want.sizes[name])) < 2e-5


def test_a_manual_sequence_axis_needs_an_offset() -> None:
    mesh = _mesh({"sp": 8})
    attend = harness.RUNNABLE["vanilla.forward_native"].make("float32", mesh)
    x = jnp.ones((1, 64, 2, 8))
    local = jax.shard_map(
        lambda q: attend(q, q, q).attention_outputs,
        mesh=mesh,
        in_specs=PartitionSpec(None, "sp"),
        out_specs=PartitionSpec(None, "sp"),
    )
    with pytest.raises(InputError, match="pass query_offset"):
        jax.jit(local)(x)


@pytest.mark.parametrize("which", ["vanilla.forward_native", "splash.forward_tpu"])
@pytest.mark.parametrize(  # one that splits everything, and for `make test-all` others
    "sizes",
    [{"fsdp": 2, "tp": 2, "sp": 2}, *(pytest.param(s, marks=SLOW) for s in ({"fsdp": 8}, {"tp": 4, "sp": 2}))],
    ids=str,
)
def test_dropout_drops_the_same_weights_on_every_mesh(sizes: dict[str, int], which: str) -> None:
    case = cases.build("causal", "bthd", replace(SIZES, batch=8))
    tensors = harness.draw(case, "float32")
    call = {"dropout_prob": 0.4, "dropout_rng": jax.random.key(3), "deterministic": False}
    alone = harness.RUNNABLE["vanilla.forward_native"].make("float32")(*tensors[:3], **call)
    split = harness.RUNNABLE[which].make("float32", _mesh(sizes))(*tensors[:3], **call)
    np.testing.assert_allclose(alone.attention_outputs, split.attention_outputs, atol=2e-6)
