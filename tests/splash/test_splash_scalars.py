"""Scalar memory: what a plan counts is what the kernels prefetch; and lengths that ask for larger blocks, or for too much."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from attnops import (
    Causal,
    ConfigError,
    Full,
    Mask,
    MaskFunction,
    OperationMetadata,
    OperationRegistry,
    Plan,
    Prefix,
    RefusedError,
    SlidingWindow,
    register_mask_function,
)
from attnops.compat import abstract_device
from attnops.operators.splash import pass_cost
from attnops.operators.splash.kernel.grid import KernelGrid
from attnops.operators.splash.kernel.schedule import MAX_WORDS
from attnops.operators.splash.pass_cost import tile_cost
from attnops.operators.splash.scalar_memory import ScalarMemory
from attnops.planning.notes import has_note


@register_mask_function("scalars_stripes")
def _stripes(position: Any, key: Any) -> Any:
    return (position - key) % 512 < 256


def _mesh(kind: str = "TPU v5 lite", **sizes: int) -> AbstractMesh:
    sizes = sizes or {"fsdp": 1}
    device = abstract_device(kind, 1, "tpu")
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


def _shape(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SPLIT_KEYS = {"key_sequence_axis": "sp", "query_sequence_axis": None}
DROPOUT = {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.eval_shape(lambda: jax.random.key(0))}
# (what is declared, what the call says)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "full": ({}, {"mask": Full()}),
    "window": ({}, {"mask": SlidingWindow(200, 0)}),
    "nobody": ({}, {"mask": ~Full()}),
    "mask_function": ({}, {"mask": Causal() & MaskFunction("scalars_stripes")}),
    "segment_ids": ({}, {"q_segment_ids": _shape(4, 1024)}),
    "kv_lengths": ({}, {"kv_lengths": _shape(4)}),
    "query_offset": ({}, {"query_offset": _shape(4)}),
    "dense_for_all": ({}, {"mask": _shape(1, 1, 1024, 1024, dtype=jnp.bool_)}),
    "sinks": ({}, {"softmax_aux": _shape(8, dtype=jnp.float32)}),
    "dropout": ({}, DROPOUT),
    "everything": ({}, {"kv_lengths": _shape(4), "softmax_aux": _shape(8, dtype=jnp.float32), **DROPOUT}),
    "meshed": ({"mesh": {"fsdp": 2, "tp": 2}}, {"kv_lengths": _shape(4), "softmax_aux": _shape(8, dtype=jnp.float32)}),
    "split_queries": ({"mesh": {"sp": 2}}, {"mask": SlidingWindow(200, 0)}),
    "split_keys": ({"mesh": {"sp": 2}, "partition_axis": SPLIT_KEYS, "sequence_parallel": "ring"}, {**DROPOUT}),
    "ring": ({"mesh": {"sp": 2}, "sequence_parallel": "ring"}, {"q_segment_ids": _shape(4, 1024)}),
}  # fmt: skip
CONFIGS = {
    "fused": {"block_q": 128, "block_kv": 128},
    "parts": {"block_q": 128, "block_kv": 128, "block_kv_dkv_sums": 256},
    "apart": {"block_q": 256, "block_kv": 128, "use_fused_bwd_kernel": False},
}


# What `make test` runs; the rest is for `make test-all`.
OFTEN = {("window", "apart"), ("everything", "parts"), ("split_keys", "apart"), ("ring", "fused")}


@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(*key, marks=[] if key in OFTEN else [pytest.mark.slow]) for key in itertools.product(CALLS, CONFIGS)],
)
def test_what_is_counted_is_what_is_prefetched(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    run = KernelGrid.run

    def counted(self: KernelGrid, kernel: str, *args: Any, **more: Any) -> Any:
        kernel = "attnops_splash_backward" if kernel.startswith("attnops_splash_backward") else kernel
        words = sum(x.size for x in self.scalars.values())
        found[kernel] = max(words, found.get(kernel, 0))
        return run(self, kernel, *args, **more)

    monkeypatch.setattr(KernelGrid, "run", counted)
    fields, call = CALLS[name]
    fields = fields | {"mesh": _mesh(**fields.get("mesh", {}))}
    metadata = OperationMetadata(
        operation_configs={"splash": CONFIGS[config]}, tuning="off", fallback="error", **fields
    )
    attend = OperationRegistry.create("splash", metadata)
    q, k = (_shape(4, 1024, heads, 128, dtype=jnp.bfloat16) for heads in (8, 4))
    plan = attend.plan(q, k, k, **call)
    arrays = {n: x for n, x in call.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in call.items() if n not in arrays}

    def both(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        loss = lambda *x: attend(*x, **arrays, **static).attention_outputs.astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    jax.make_jaxpr(both)(q, k, k, arrays)
    said = ScalarMemory(plan.problem, plan.placement).words(plan.config)
    assert said.keys() == found.keys()
    for kernel, words in found.items():  # of a mask function the plan doesn't know what it hides
        assert said[kernel] >= words if name == "mask_function" else said[kernel] == words


PIPELINED = ("TPU v6 lite", "TPU7x")


def _plan(
    length: int, kind: str = "TPU v5 lite", *, batch: int = 1, heads: int = 4, fields: Any = None, **call: Any
) -> Plan:
    x = _shape(batch, length, heads, 128, dtype=jnp.bfloat16)
    return OperationRegistry.create("splash", OperationMetadata(mesh=_mesh(kind), **(fields or {}))).plan(
        x, x, x, **call
    )


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize(
    ("length", "batch", "ids"), [(1 << 20, 1, False), (1 << 18, 8, True), (640 << 10, 1, False)], ids=str
)
def test_long_sequences_take_larger_blocks(length: int, batch: int, ids: bool, kind: str) -> None:
    call = {"q_segment_ids": _shape(batch, length)} if ids else {}
    plan = _plan(length, kind, batch=batch, **call)
    config = plan.config
    if kind == "TPU v5 lite" and length == 640 << 10:  # seven parts of the keys have room in VMEM, and shorter lists
        assert (config.block_q, config.block_kv, math.ceil(length / config.block_kv_dkv_sums)) == (1024, 1024, 7)
        return
    assert plan.method == "forward_tpu"
    # Where tiles are pipelined, blocks whose code compiles fast enough, if the list has room.
    if kind in PIPELINED and length < 1 << 20:
        assert (config.block_q, config.block_kv, config.block_q_dkv, config.block_kv_dkv) == (2048, 1024, 1024, 1024)
    else:
        sizes = config.block_q, config.block_kv, config.block_q_dkv, config.block_kv_dkv
        assert sizes == (2048, 2048, 2048, 2048)
        of_query = config.block_q_dq, config.block_kv_dq, config.block_kv_dq_compute
        assert config.use_fused_bwd_kernel or of_query == (config.block_q_dkv, 2048, 512)
    assert max(ScalarMemory(plan.problem, plan.placement).words(config).values()) <= MAX_WORDS
    # By the count they fit everywhere but in a v4's 16 MiB.
    assert has_note(plan.notes, "splash.vmem") is (kind == "TPU v4")


def test_ten_million_tokens_with_a_window_are_planned() -> None:
    plan = _plan(10_000_000, sliding_window=(4095, 0))
    assert (plan.method, plan.config.block_kv, plan.config.block_kv_dq) == ("forward_tpu", 4096, 4096)


TOO_LONG: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"length": 10_000_000}, "block_q=4096, block_kv=4096 make 2982903 visits or more, whose list scalar memory"),
    "rows": (
        {"length": 1 << 18, "batch": 128, "kv_lengths": _shape(128)},
        "make .* visits for 128 batch rows.* beside 128 words of lengths; wanted at most 229248: larger blocks, or fewer batch",
    ),
    "lengths_alone": ({"length": 256, "batch": 1 << 18, "kv_lengths": _shape(1 << 18)}, "wanted at most 0"),
    "full": ({"length": 1 << 24, "causal": False}, "block_q=4096, block_kv=4096 make 16777216 visits"),
    "blocks": ({"length": 1 << 25}, "block_kv=4096 cuts 33554432 rows into 8192 blocks; wanted at most 4096: block_kv=8192"),
    "declared": (
        {"length": 131072, "fields": {"operation_configs": {"splash": {"block_q": None, "block_kv": None}}}},
        "block_q=128, block_kv=128 make 524800 visits",
    ),
    "declared_blocks": (
        {"length": 1 << 20, "fields": {"operation_configs": {"splash": {"block_kv": 128}}}},
        "block_kv=128 cuts 1048576 rows into 8192 blocks; wanted at most 4096: block_kv=256",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_finds_no_room_is_a_reason_and_falls_back(name: str) -> None:
    call, message = TOO_LONG[name]
    plan = _plan(**call)
    assert (plan.kind, plan.method) == ("fallback", "forward_native")
    (rejected,) = plan.rejected
    (reason,) = rejected.reasons
    assert (rejected.implementation, reason.code) == ("splash.forward_tpu", "config")
    assert re.search(message, reason.message), reason.message
    assert reason.hint
    strict = call | {"fields": {**call.get("fields", {}), "fallback": "error"}}
    refused = _plan(**strict)
    assert (refused.kind, [r.code for one in refused.rejected for r in one.reasons]) == (
        "refused",
        ["config", "policy.fallback"],
    )
    with pytest.raises(RefusedError, match=r"splash\.forward_tpu"):
        refused.require()


def test_a_tuned_size_that_is_wanted_and_not_kept_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="tuning='error' is declared"):
        _plan(1 << 20, fields={"tuning": "error"})
    assert _plan(10_000_000, fields={"tuning": "error"}).method == "forward_native"  # where there is nothing to tune


@pytest.mark.parametrize(("length", "most"), [(1 << 20, 900_000), (10_000_000, 60_000)])
def test_planning_of_long_sequences_looks_at_few_tiles(length: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list of 2048-blocks is 512 x 512 tiles; where first rows already see too many, no tiles are looked at."""
    seen = []

    def count(name: str) -> None:
        whole = getattr(Mask, name)

        def counted(self: Mask, block_q: int, block_kv: int, **sizes: int) -> np.ndarray:
            found = whole(self, block_q, block_kv, **sizes)
            seen.append(found.size)
            return found

        monkeypatch.setattr(Mask, name, counted)

    count("live_blocks")
    count("live_blocks_by_head")
    pass_cost._variants.cache_clear()
    _plan(length, heads=6)  # a problem that no other test has planned
    assert 0 < sum(seen) < most


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(400, 0), Causal() | Prefix(90), Full()], ids=str)
def test_split_keys_are_costed_where_they_are_seen(mask: Mask) -> None:
    """A device's tiles aren't counted as if it had the first keys, of which a window at the end sees none."""
    fields = {"mesh": _mesh(sp=4), "partition_axis": {"decode_key_sequence_axis": "sp"}, "sequence_parallel": "ring"}
    q, k = (_shape(1, length, 4, 128, dtype=jnp.bfloat16) for length in (512, 16384))
    plan = OperationRegistry.create("splash", OperationMetadata(**fields)).plan(q, k, k, mask=mask, mode="insert")
    assert tile_cost(plan.problem, plan.placement, (128, 128), (128, 128)) > 0
    assert plan.tuning is None  # one device's tiles are not the problem's
