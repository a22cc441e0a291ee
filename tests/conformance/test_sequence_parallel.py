"""Keys that travel around a ring, or heads that are split instead of the sequence, give the reference's answer and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import AxisType, PartitionSpec

from attnops import Causal, Chunked, Full, InputError, OperationMetadata, OperationRegistry, Prefix, SlidingWindow
from attnops.verify.closeness import row_error, row_sizes

from . import cases, harness

MESHES = {
    "fsdp2_tp2_sp2": {"fsdp": 2, "tp": 2, "sp": 2},
    "cp2_sp2_tp2": {"cp": 2, "sp": 2, "tp": 2},
    "cp2_sp4": {"cp": 2, "sp": 4},
    "sp4_ones": {"dp": 1, "sp": 4, "tp": 1, "ep": 1},
    "sp8": {"sp": 8},
}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TWO_AXES = {"partition_axis": {"query_sequence_axis": ["cp", "sp"], "key_sequence_axis": ["cp", "sp"]}}
FIELDS: dict[str, dict[str, Any]] = {
    "gather": {},
    "ring": {"ring_order": "contiguous"},
    # Where the mask is causal: there an unset order chooses it.
    "zigzag": {"sequence_parallel": "ring", "scan_ring_attention": True},
    "ulysses": {},
    "ulysses_ring": TWO_AXES,
}
CASES = {
    "causal": "bthd", "causal_window": "bhtd", "gqa": "bthd", "segment_ids": "bthd", "kv_lengths": "bhtd",
    "sinks_per_kv_head": "bthd", "prefix": "thd", "dense_mask": "bhtd", "lse": "bthd", "value_dim": "bthd",
    "soft_cap": "bhtd", "positions": "bthd", "mask_function": "bthd", "dynamic_query_offset": "bthd", "bias": "bthd",
    "everything": "bthd", "int8_kv": "bthd", "sinks_of_minus_infinity": "bthd", "sinks_some_of_minus_infinity": "bhtd",
    "blocks": "bthd", "blocks_of_heads": "bhtd", "chosen_blocks": "bthd",
    "relative_bias": "bthd", "forgetting": "bhtd", "score_function": "bthd",
}  # fmt: skip
_RING = {"everything": {"return_weights"}, "int8_kv": {"quantized_kv"}}
# By strategy, what is refused for its own sake.
NEVER: dict[str, dict[str, set[str]]] = {
    "gather": {},
    "ring": _RING,
    "zigzag": _RING,
    "ulysses": {"everything": {"return_weights"}},
    "ulysses_ring": _RING,
}
NATIVE, SPLASH, FLASH = "vanilla.forward_native", "splash.forward_tpu", "flash_attn2.forward_cuda"
MAIN = {strategy: "cp2_sp2_tp2" if strategy == "ulysses_ring" else "fsdp2_tp2_sp2" for strategy in FIELDS}
SIZES = cases.Sizes(batch=4, heads=8, kv_heads=4, length=160)
SLOW = pytest.mark.slow


def _product() -> Iterator[tuple[str, str, str, str, str, str]]:
    """(implementation, strategy, case, mesh, layout, kind of axis)."""
    for which, strategy, name in itertools.product((NATIVE, SPLASH, FLASH), FIELDS, CASES):
        if (
            which == FLASH
        ):  # what goes around a kernel is the same for all: one mesh tells whether it goes around this one
            yield which, strategy, name, MAIN[strategy], CASES[name], "auto"
            continue
        meshes = [m for m in MESHES if m == MAIN[strategy] or ("cp" in MESHES[m]) == (strategy == "ulysses_ring")]
        yield from itertools.product((which,), (strategy,), (name,), meshes, ("bthd", "bhtd", "thd"), KINDS)


# What `make test` runs of the product, in the case's own layout; `make test-all` runs rows in which any three of them meet.
OFTEN = {
    *((NATIVE, "ring", n, "fsdp2_tp2_sp2", "auto") for n in ("segment_ids", "bias", *_RING)),
    *((NATIVE, "ulysses", n, "fsdp2_tp2_sp2", "auto") for n in ("bias", "everything", "int8_kv")),
    *((NATIVE, "ulysses_ring", n, "cp2_sp2_tp2", "auto") for n in ("segment_ids", "bias")),
    *((NATIVE, "ulysses_ring", n, "cp2_sp2_tp2", "explicit") for n in ("lse",)),
    (NATIVE, "ring", "sinks_some_of_minus_infinity", "sp4_ones", "auto"),
    (NATIVE, "zigzag", "segment_ids", "sp4_ones", "auto"),
    (NATIVE, "gather", "int8_kv", "fsdp2_tp2_sp2", "auto"),
    *((NATIVE, "ring", n, "sp4_ones", "auto") for n in ("causal_window", "dense_mask")),
    *((NATIVE, "ring", n, "fsdp2_tp2_sp2", "auto") for n in ("blocks_of_heads", "chosen_blocks")),
    (SPLASH, "zigzag", "chosen_blocks", "fsdp2_tp2_sp2", "auto"),
    *((NATIVE, "ulysses_ring", n, "cp2_sp2_tp2", "auto") for n in ("relative_bias", "forgetting")),
    *((SPLASH, strategy, "relative_bias", "fsdp2_tp2_sp2", "auto") for strategy in ("ring", "zigzag")),
    (SPLASH, "ulysses", "score_function", "fsdp2_tp2_sp2", "auto"),
    (FLASH, "ring", "forgetting", "fsdp2_tp2_sp2", "auto"),
    (FLASH, "ulysses", "blocks_of_heads", "fsdp2_tp2_sp2", "auto"),
    (SPLASH, "ulysses", "causal_window", "fsdp2_tp2_sp2", "auto"),
    (SPLASH, "zigzag", "segment_ids", "fsdp2_tp2_sp2", "auto"),
    (FLASH, "ring", "segment_ids", "fsdp2_tp2_sp2", "auto"),
    (FLASH, "ulysses", "bias", "fsdp2_tp2_sp2", "auto"),
}
QUICK = {(*key[:4], CASES[key[2]], key[4]) for key in OFTEN}
PRODUCT = [
    pytest.param(*key, id="-".join(key), marks=[] if key in QUICK else [SLOW]) for key in covering(_product(), 3, QUICK)
]


def _mesh(sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def _fields(strategy: str) -> dict[str, Any]:
    return {"sequence_parallel": strategy, **FIELDS[strategy]}


def _check(which: str, strategy: str, case: cases.Case, mesh: Any, layout: str, **changes: Any) -> None:
    implementation = harness.RUNNABLE[which]
    attend = implementation.make("float32", mesh, **_fields(strategy) | changes)
    tensors = harness.draw(case, "float32")
    got = harness.run(attend, case, tensors, "float32", layout)
    published = implementation.capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward, shards=True)


def _plan(which: str, case: cases.Case, mesh: Any, layout: str, **fields: Any) -> Any:
    attend = harness.RUNNABLE[which].make("float32", mesh, **fields)
    tensors = harness.draw(case, "float32")
    return attend.plan(*harness.handed_over(case, tensors, "float32", layout), layout=layout, **case.call)


def _codes(plan: Any) -> set[str]:
    return {r.code for one in plan.rejected for r in one.reasons} if plan.kind == "refused" else set()


@pytest.mark.parametrize(("which", "strategy", "name", "mesh", "layout", "kind"), PRODUCT)
def test_strategies(which: str, strategy: str, name: str, mesh: str, layout: str, kind: str) -> None:
    case = cases.build(name, layout, SIZES)
    on, sizes, fields = _mesh(MESHES[mesh], KINDS[kind]), MESHES[mesh], _fields(strategy)
    prefix = fields["sequence_parallel"]
    refused = {f"{prefix}.{feature}" for feature in NEVER[strategy].get(name, ())}
    if "ulysses" in strategy and (case.kv_heads // sizes.get("tp", 1)) % sizes["sp"]:
        refused.add(f"{prefix}.kv_heads")
    plan = _plan(which, case, on, layout, **fields)
    found = _codes(plan)
    assert {code for code in found if code.startswith(prefix)} == refused
    if found:
        return
    assert plan.placement.sequence.strategy == prefix
    _check(which, strategy, case, on, layout)


# What the causal rule of a mask is worth: which cases an unset order takes a zigzag ring for.
ZIGZAG = {
    "bias", "causal", "gqa", "segment_ids", "value_dim", "soft_cap", "blocks", "blocks_of_heads", "chosen_blocks",
    "relative_bias",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in CASES if n not in _RING])
def test_causal_masks_take_a_zigzag_ring(name: str) -> None:
    layout = CASES[name]
    plan = _plan(NATIVE, cases.build(name, layout, SIZES), _mesh(MESHES["sp4_ones"]), layout, **_fields("zigzag"))
    assert plan.placement.sequence.zigzag == (name in ZIGZAG)
    assert ("in zigzag order around sp" in plan.explain()) == (name in ZIGZAG)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("which", [NATIVE, pytest.param(SPLASH, marks=pytest.mark.slow)])
def test_the_ring_scanned_or_unrolled(which: str, scan: bool) -> None:
    case, mesh = cases.build("causal", "bthd", SIZES), _mesh(MESHES["sp4_ones"])
    _check(which, "ring", case, mesh, "bthd", scan_ring_attention=scan)


@pytest.mark.parametrize(
    ("mask", "steps"),
    [
        (Full(), (0, 1, 2, 3, 4, 5, 6, 7)),
        (Causal(), (0, 1, 2, 3, 4, 5, 6, 7)),
        (Causal() & SlidingWindow(20, 0), (0, 1)),  # a shard has 20 rows
        (Causal() & SlidingWindow(21, 0), (0, 1, 2)),
        (SlidingWindow(5, 5), (0, 1, 7)),
        (Causal() & SlidingWindow(0, 0), (0,)),
    ],
)
def test_steps_that_can_not_matter_are_left_out(mask: Any, steps: tuple[int, ...]) -> None:
    metadata = OperationMetadata(mesh=_mesh(MESHES["sp8"]), sequence_parallel="ring", tuning="off")
    x = jax.ShapeDtypeStruct((1, 160, 2, 16), jnp.float32)
    plan = OperationRegistry.create("vanilla", metadata).plan(x, x, x, mask=mask)
    assert plan.placement.sequence.steps == steps
    assert f"in {len(steps) - 1} of 7 steps" in plan.explain()


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (Causal(), lambda i, j: j <= i),
        (Causal() & SlidingWindow(20, 0), lambda i, j: (j <= i) & (j >= i - 20)),
        (Causal() & SlidingWindow(11, 0), lambda i, j: (j <= i) & (j >= i - 11)),
        (Causal() & Chunked(30), lambda i, j: (j <= i) & (j // 30 == i // 30)),
        (Causal() & Chunked(10), lambda i, j: (j <= i) & (j // 10 == i // 10)),
        (Causal() & (Prefix(30) | SlidingWindow(3, 0)), lambda i, j: (j <= i) & ((j < 30) | (j >= i - 3))),
    ],
)
def test_a_zigzag_ring_goes_as_far_as_some_piece_sees(mask: Any, seen: Any) -> None:
    """Late pieces lie in falling order: their neighbours come from the other side."""
    metadata = OperationMetadata(mesh=_mesh(MESHES["sp8"]), sequence_parallel="ring", ring_order="zigzag", tuning="off")
    x = jax.ShapeDtypeStruct((1, 160, 2, 16), jnp.float32)
    plan = OperationRegistry.create("vanilla", metadata).plan(x, x, x, mask=mask)
    place = np.arange(160)
    device = np.minimum(place // 10, 15 - place // 10)
    wanted = {0} | {
        int((device[i] - device[j]) % 8)
        for i, j in np.argwhere(np.broadcast_to(seen(place[:, None], place), (160, 160)))
    }
    assert set(plan.placement.sequence.steps) == wanted


def test_a_window_that_wraps_around_the_ring() -> None:
    """Steps 0, 1 and 3: the keys jump, and come home."""
    rows, cols = np.arange(160)[:, None], np.arange(160)[None]
    case = replace(cases.build("causal", "bthd", SIZES), mask=(abs(rows - cols) <= 5)[None, None])
    case.call = {"mask": SlidingWindow(5, 5)}
    _check(NATIVE, "ring", case, _mesh(MESHES["sp4_ones"]), "bthd")


@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_by_name(name: str) -> None:
    mesh = _mesh({"sp": 2})
    attend = OperationRegistry.create(name, OperationMetadata(mesh=mesh, tuning="off"))
    case = cases.build("full", "bthd", SIZES)
    tensors = harness.draw(case, "float32")
    got = harness.run(attend, case, tensors, "float32", "bthd")
    harness.agree(got, harness.expect(case, tensors), 1e-5, 3e-5, shards=True)
    plan = attend.plan(*harness.handed_over(case, tensors, "float32", "bthd"), **case.call)
    assert (plan.placement.sequence.strategy, plan.implementation) == (name, f"{name}.forward_native")
    assert plan.to_dict()["sequence_parallel"] == name


def test_without_a_split_sequence_there_is_nothing_to_do() -> None:
    metadata = OperationMetadata(mesh=_mesh({"fsdp": 4, "tp": 2}), sequence_parallel="ring", tuning="off")
    x = jax.ShapeDtypeStruct((4, 160, 2, 16), jnp.float32)
    plan = OperationRegistry.create("vanilla", metadata).plan(x, x, x)
    assert plan.placement.sequence.strategy == ""


@pytest.mark.parametrize(
    ("operation", "config"),
    [("sdpa", None), ("splash", {"kernel": "jax", "interpret": True}), ("vanilla", {"path": "plain"})],
)
def test_what_can_not_work_on_parts_is_refused(operation: str, config: Any) -> None:
    configs = {operation: config} if config else {}
    metadata = OperationMetadata(
        mesh=_mesh(MESHES["sp4_ones"]),
        sequence_parallel="ring",
        operation_configs=configs,
        fallback="error",
        tuning="off",
    )
    x = jax.ShapeDtypeStruct((1, 160, 2, 16), jnp.float32)
    plan = OperationRegistry.create(operation, metadata).plan(x, x, x)
    assert plan.kind == "refused"
    assert "ring.parts" in {r.code for one in plan.rejected for r in one.reasons}


def test_keys_that_do_not_divide_are_refused() -> None:
    metadata = OperationMetadata(mesh=_mesh(MESHES["sp4_ones"]), sequence_parallel="ring", tuning="off")
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32) for n in (160, 162))
    plan = OperationRegistry.create("vanilla", metadata).plan(q, k, k, causal=False)
    (rejected,) = plan.rejected
    assert "162 keys don't divide over the 4 devices of sp" in str(rejected.reasons[0])


@pytest.mark.parametrize(("strategy", "devices"), [("ring", 2), ("ulysses", 4), pytest.param("ring", 4, marks=SLOW)])
@pytest.mark.parametrize(
    "config",
    [None, pytest.param({"interpret": True, "block_q": 128, "block_kv": 128}, marks=pytest.mark.slow)],
    ids=["native", "splash"],
)
def test_dropout_drops_the_weights_that_it_drops_on_one_device(strategy: str, devices: int, config: Any) -> None:
    tensors = harness.draw(cases.build("gqa", "bthd", replace(SIZES, batch=2, heads=4)), "float32")
    call = {"dropout_prob": 0.3, "deterministic": False, "dropout_rng": jax.random.key(3), "mask": Causal()}

    def gradients(mesh: Any, strategy: str) -> Any:
        configs = {"splash": config} if config else {}
        metadata = OperationMetadata(
            mesh=mesh,
            sequence_parallel=strategy,
            scan_ring_attention=True if strategy == "ring" else None,
            operation_configs=configs,
            tuning="off",
        )
        attend = OperationRegistry.create("splash", metadata)
        run = jax.jit(jax.grad(lambda *x: jnp.sin(attend(*x, **call).attention_outputs).sum(), (0, 1, 2)))
        return run(tensors.query, tensors.key, tensors.value)

    for got, want in zip(gradients(_mesh({"sp": devices}), strategy), gradients(None, "gather"), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5)


@pytest.mark.parametrize(
    ("name", "layout"), [("kv_lengths", "bthd"), pytest.param("sinks_per_kv_head", "bhtd", marks=SLOW)]
)
def test_a_ring_leaves_keys_that_are_split_alone_where_they_are(name: str, layout: str) -> None:
    """Specs of decoding: whole queries, split keys. What 'auto' makes of them: test_split_cache.py."""
    case, mesh = cases.build(name, layout, SIZES), _mesh(MESHES["fsdp2_tp2_sp2"])
    case.call |= {"mode": "autoregressive"}
    attend = harness.RUNNABLE[NATIVE].make("float32", mesh, sequence_parallel="ring")
    tensors = harness.draw(case, "float32")
    plan = attend.plan(*harness.handed_over(case, tensors, "float32", layout), layout=layout, **case.call)
    assert plan.placement.sequence.strategy == "split_kv"
    assert plan.placement.local.kv_len == case.kv_len // 2
    _check(NATIVE, "ring", case, mesh, layout)


@pytest.mark.parametrize("strategy", [s if s == "ring" else pytest.param(s, marks=SLOW) for s in FIELDS])
@pytest.mark.parametrize(
    "kv_heads", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_heads_split_over_more_fewer_or_as_many_devices_as_kv_heads(kv_heads: int, strategy: str) -> None:
    case = cases.build("gqa", "bthd", replace(SIZES, kv_heads=kv_heads))
    case.kv_heads = kv_heads
    sizes = {"cp": 2, "sp": 2, "tp": 2} if strategy == "ulysses_ring" else {"tp": 2, "sp": 4}
    plan = _plan(NATIVE, case, _mesh(sizes), "bthd", **_fields(strategy))
    assert plan.placement.kv_repeat == (2 if kv_heads == 1 else 1)
    prefix = _fields(strategy)["sequence_parallel"]
    if "ulysses" in strategy and kv_heads < 8:
        assert _codes(plan) == {f"{prefix}.kv_heads"}
    else:
        _check(NATIVE, strategy, case, _mesh(sizes), "bthd")


# Computed in `make test`; of the others the plan is looked at there, which is that of training or of decoding.
MODES_OFTEN = (("prefill", "ring"), ("prefill", "ulysses_ring"), ("insert", "ulysses"))


@pytest.mark.parametrize(
    ("mode", "strategy", "computed"),
    [
        pytest.param(*key, computed, id=f"{'-'.join(key)}-{'computed' if computed else 'planned'}", marks=marks)
        for key in itertools.product(("prefill", "insert"), FIELDS)
        for computed, marks in (((True, []),) if key in MODES_OFTEN else ((False, []), (True, [SLOW])))
    ],
)
def test_other_modes(mode: str, strategy: str, computed: bool) -> None:
    """Prefill is split as training is; insert as decoding is, where only the keys are."""
    case, mesh = cases.build("causal", "bthd", SIZES), _mesh(MESHES[MAIN[strategy]])
    case.call |= {"mode": mode}
    fields = _fields(strategy)
    if strategy == "ulysses_ring":
        fields = fields | {"partition_axis": TWO_AXES["partition_axis"] | {"decode_key_sequence_axis": ["cp", "sp"]}}
    plan = _plan(NATIVE, case, mesh, "bthd", **fields)
    whole = "gather" if strategy == "gather" else "split_kv"
    assert plan.placement.sequence.strategy == (whole if mode == "insert" else fields["sequence_parallel"])
    if not computed:
        return
    attend = harness.RUNNABLE[NATIVE].make("float32", mesh, **fields)
    tensors = harness.draw(case, "float32")
    arrays = harness.handed_over(case, tensors, "float32", "bthd")
    got = jax.jit(lambda *x: attend(*x, **case.call).attention_outputs)(*arrays)
    want = harness.expect(case, tensors)
    assert row_error(got, want.output, row_sizes(want.output, want.sizes["output"])) < 4e-6


def test_a_rings_residuals_have_the_declared_name() -> None:
    config = {"interpret": True, "block_q": 128, "block_kv": 128, "residual_checkpoint_name": "kept"}
    metadata = OperationMetadata(
        mesh=_mesh(MESHES["sp4_ones"]), sequence_parallel="ring", operation_configs={"splash": config}, tuning="off"
    )
    attend = OperationRegistry.create("splash", metadata)
    x = jax.ShapeDtypeStruct((1, 512, 1, 16), jnp.float32)

    text = str(jax.make_jaxpr(jax.grad(lambda q: attend(q, q, q).attention_outputs.sum()))(x))
    assert text.count("name=kept") == 2  # output and lse
    assert "name=attnops_output" not in text


MANUAL = [
    (case, strategy, mesh, manual, vma)
    for case in ("causal", "segment_ids", "kv_lengths", "sinks_per_kv_head", "lse", "causal_window", "soft_cap")
    for strategy, mesh, manual in (
        ("zigzag", "sp4_ones", ("sp",)),
        ("ring", "fsdp2_tp2_sp2", ("fsdp", "sp")),
        ("zigzag", "fsdp2_tp2_sp2", ("sp",)),
        ("ulysses", "fsdp2_tp2_sp2", ("fsdp", "tp", "sp")),
        ("ulysses_ring", "cp2_sp2_tp2", ("cp", "sp")),
    )
    for vma in (True, False)
]
MANUAL_OFTEN = {
    ("lse", "ring", "fsdp2_tp2_sp2", False),
    ("kv_lengths", "ulysses", "fsdp2_tp2_sp2", True),
}


@pytest.mark.parametrize(
    ("name", "strategy", "mesh", "manual", "vma"),
    [
        pytest.param(
            *key,
            marks=[] if (*key[:3], key[4]) in MANUAL_OFTEN else [pytest.mark.slow],
            id=f"{'-'.join(map(str, key))}",
        )
        for key in MANUAL
    ],
)
def test_a_sequence_that_the_caller_has_split(name: str, strategy: str, mesh: str, manual: Any, vma: bool) -> None:
    """Inside the caller's own shard_map over the sequence (and other axes) the strategy is in force all the same."""
    case, on, layout = cases.build(name, "bthd", SIZES), _mesh(MESHES[mesh]), "bthd"
    attend = harness.RUNNABLE[NATIVE].make("float32", on, **_fields(strategy))
    tensors = harness.draw(case, "float32")
    sequence = tuple(a for a in ("cp", "sp") if a in MESHES[mesh])
    batch, heads = ("fsdp" if "fsdp" in manual else None), ("tp" if "tp" in manual else None)
    tensor = PartitionSpec(batch, sequence, heads)
    specs = {
        "query": tensor, "key": tensor, "value": tensor, "q_segment_ids": PartitionSpec(batch, sequence),
        "kv_segment_ids": PartitionSpec(batch, sequence), "kv_lengths": PartitionSpec(batch),
        "softmax_aux": PartitionSpec(heads),
    }  # fmt: skip
    arrays = dict(zip(("query", "key", "value"), harness.handed_over(case, tensors, "float32", layout), strict=True))
    static = {n: v for n, v in case.call.items() if not isinstance(v, np.ndarray)}
    arrays |= {n: v for n, v in case.call.items() if isinstance(v, np.ndarray)}
    smooth = ("query", "key", "value", *case.differentiate)
    out = [tensor, PartitionSpec(batch, heads, sequence)] if case.call.get("return_lse") else [tensor]

    @jax.jit
    def gradients(arrays: dict[str, Any]) -> Any:
        def total(given: dict[str, Any]) -> Any:
            call = arrays | given
            local = jax.shard_map(
                lambda x: _output_and_lse(attend(**x, **static)),
                mesh=on,
                in_specs=({n: specs[n] for n in call},),
                out_specs=out,
                axis_names=set(manual),
                check_vma=vma,
            )
            output, *lse = local(call)
            sums = (output * tensors.d_output).sum()
            for x in lse:
                sums += (x * tensors.d_lse).sum()
            return sums, (output, *lse)

        return jax.grad(total, has_aux=True)({n: arrays[n] for n in smooth})

    found, (output, *lse) = gradients(jax.tree.map(jnp.asarray, arrays))
    published = harness.RUNNABLE[NATIVE].capability.tolerance["float32"]
    result = harness.Result(
        np.asarray(output, np.float64),
        None,
        np.asarray(lse[0], np.float64) if lse else None,
        {n: np.asarray(g, np.float64) for n, g in found.items()},
    )
    harness.agree(result, harness.expect(case, tensors), published.forward, published.backward, shards=True)


def _output_and_lse(made: Any) -> list[jax.Array]:
    return [x for x in (made.attention_outputs, made.lse) if x is not None]


def test_a_cache_that_the_caller_has_split() -> None:
    """Decoding inside the caller's shard_map: whole queries, parts of the keys, and no gather of the cache."""
    case, mesh = cases.build("one_query", "bthd", SIZES), _mesh({"sp": 8})
    attend = harness.RUNNABLE[NATIVE].make("float32", mesh, sequence_parallel="ring")
    tensors = harness.draw(case, "float32")
    whole, split = PartitionSpec(), PartitionSpec(None, "sp")
    decode = jax.jit(
        jax.shard_map(
            lambda q, k, v, n: attend(q, k, v, causal=False, kv_lengths=n, mode="autoregressive").attention_outputs,
            mesh=mesh,
            in_specs=(whole, split, split, whole),
            out_specs=whole,
        )
    )
    arrays = (*tensors[:3], case.call["kv_lengths"])
    assert "all-gather" not in decode.lower(*arrays).compile().as_text()
    np.testing.assert_allclose(decode(*arrays), harness.expect(case, tensors).output, atol=4e-6)


def test_a_part_of_a_dense_mask_is_refused() -> None:
    mesh = _mesh({"sp": 8})
    attend = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh, sequence_parallel="ring"))
    x, mask = jnp.ones((1, 64, 2, 8)), jnp.ones((1, 1, 64, 64), bool)
    local = jax.shard_map(
        lambda x, m: attend(x, x, x, mask=m).attention_outputs,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "sp"), PartitionSpec(None, None, "sp")),
        out_specs=PartitionSpec(None, "sp"),
    )
    with pytest.raises(InputError, match=r"sp is Manual here .* which part .* covers isn't known"):
        jax.jit(local)(x, mask)
