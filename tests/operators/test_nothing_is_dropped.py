"""Whatever is declared or passed changes the plan or the program, is refused, or is named in a note: every field of metadata, of
the policy and of vanilla's config, and every argument of a call, on every route and with every strategy. The lists are made
from the signatures.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from eformer.escale import PartitionAxis, PartitionManager

from attnops import ALiBi, ConfigError, OperationMetadata, OperationRegistry, Policy, Prefix
from attnops.errors import AttnOpsError, ShardingError
from attnops.operators import Operation
from attnops.operators.vanilla import VanillaConfig
from attnops.sharding import virtual_mesh

BATCH, HEADS, DIM = 2, 4, 16


@dataclass(frozen=True)
class Situation:
    """Where something is declared: an operation, what is declared and passed beside it, and lengths."""

    operation: str = "vanilla"
    metadata: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    q_len: int = 256
    kv_len: int = 256
    route: str | None = None
    strategy: str = ""
    instead: dict[str, Any] = field(
        default_factory=dict
    )  # values for fields whose usual one is what is chosen here anyway


SP = {"mesh": {"sp": 4}}
CACHE = {"mode": "autoregressive"}
INTERPRETED = {"operation_configs": {"splash": {"interpret": True}}}
SITUATIONS = {
    "plain": Situation(q_len=32, kv_len=32, route="plain"),
    "blockwise": Situation(metadata={"operation_configs": {"vanilla": {"path": "blockwise"}}}, route="blockwise"),
    "decode": Situation(
        metadata={"operation_configs": {"vanilla": {"path": "decode"}}},
        call=CACHE,
        q_len=1,
        kv_len=4096,
        route="decode",
    ),
    "decode_rows": Situation(call=CACHE, q_len=1, kv_len=4096, route="decode_rows"),
    "gather": Situation(metadata=SP, strategy="gather"),
    "ring": Situation(
        metadata=SP | {"sequence_parallel": "ring"},
        strategy="ring",
        instead={"path": "plain", "scan_ring_attention": False},
    ),
    "ring of two": Situation(
        metadata={"mesh": {"sp": 2}, "sequence_parallel": "ring"}, strategy="ring", instead={"path": "plain"}
    ),
    "ulysses": Situation(metadata=SP | {"sequence_parallel": "ulysses"}, strategy="ulysses"),
    "split_kv": Situation(metadata=SP, call=CACHE, q_len=1, kv_len=4096, route="decode_rows", strategy="split_kv"),
    "splash": Situation("splash", INTERPRETED),
    "splash's native path": Situation("splash", q_len=32, kv_len=32, route="plain"),
    "sdpa": Situation("sdpa"),
    "sdpa, a split cache": Situation("sdpa", SP, CACHE, 1, 4096, strategy="gather"),
    "ring by name, nothing split": Situation("ring", q_len=32, kv_len=32, route="plain"),
}
METADATA: dict[str, Any] = {
    "runtime_dtype": "bfloat16",
    "runtime_softmax_dtype": "bfloat16",
    "sequence_axis_name": "seq",
    "backend": "tpu",
    "partition_axis": {"head_axis": "other"},
    "partition_manager": lambda: PartitionManager(PartitionAxis(head_axis="other")),
    "base_config": SimpleNamespace(attn_dtype="bfloat16"),
    "operation_configs": {"splash": {"kernel": "jax"}, "vanilla": {"path": "decode"}},
    "mesh": {"fsdp": 2},
    "softmax_scale": 0.3,
    "dropout_prob": 0.2,
    "causal": False,
    "scan_ring_attention": True,
    "blocksize_q": 128,
    "blocksize_k": 128,
    "blocksize_b": 2,
    "tuning": "error",
    "sequence_parallel": "ulysses",
    "ring_order": "contiguous",
}
# They say what to do where something doesn't fit, or what is expected: each has a test below.
WHERE_IT_DOES_NOT_FIT = {"platform", "fallback", "kv_heads", "strict"}
CALL: dict[str, Any] = {
    "mask": Prefix(3),
    "score": ALiBi(),
    "bias": (1, 1, "q", "kv"),
    "causal": False,
    "sliding_window": 5,
    "q_segment_ids": (BATCH, "q"),
    "kv_segment_ids": (BATCH, "kv"),
    "kv_lengths": (BATCH,),
    "kv_starts": (BATCH,),
    "query_offset": 3,
    "softmax_scale": 0.3,
    "logits_soft_cap": 5.0,
    "softmax_aux": (HEADS,),
    "key_scale": (BATCH, 1, HEADS, 1),
    "value_scale": (BATCH, 1, HEADS, 1),
    "dropout_prob": 0.2,
    "dropout_rng": jax.random.key(0),
    "deterministic": False,
    "return_weights": True,
    "return_lse": True,
    "mode": "prefill",
    "layout": "bhtd",
}
CONFIG = {"path": "blockwise", "block_q": 24, "block_kv": 24}


def _argument(name: str, at: Situation) -> Any:
    value = CALL[name]
    if not isinstance(value, tuple):
        return value
    shape = tuple({"q": at.q_len, "kv": at.kv_len}.get(n, n) for n in value)
    whole = name.endswith("ids") or name in ("kv_lengths", "kv_starts")
    return jax.ShapeDtypeStruct(shape, jnp.int32 if whole else jnp.float32)


class _Found:
    """What is decided in a situation: the plan without notes and without the config as declared, notes, and the program."""

    def __init__(self, at: Situation, metadata: dict[str, Any], call: dict[str, Any]) -> None:
        metadata = {name: value() if callable(value) else value for name, value in metadata.items()}
        if isinstance(metadata.get("mesh"), dict):
            metadata["mesh"] = virtual_mesh(metadata["mesh"])
        self.attend = OperationRegistry.create(at.operation, OperationMetadata(**metadata))
        swap = call.get("layout") == "bhtd"
        shapes = [(BATCH, HEADS, n, DIM) if swap else (BATCH, n, HEADS, DIM) for n in (at.q_len, at.kv_len, at.kv_len)]
        self.tensors = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        self.call = call
        self.plan = self.attend.plan(*self.tensors, **call).require()
        known = self.plan.to_dict()
        self.decided = {name: value for name, value in known.items() if name not in ("notes", "config")}

    def lowered(self) -> str:
        arrays = {n: x for n, x in self.call.items() if hasattr(x, "dtype")}
        static = {n: x for n, x in self.call.items() if n not in arrays}

        def attended(tensors: Any, arrays: Any) -> Any:
            result = self.attend(*tensors, **arrays, **static)
            return result.attention_outputs, result.attention_weights, result.lse

        return jax.jit(attended).lower(self.tensors, arrays).as_text()  # without arguments that nobody reads


def _dropped(at: Situation, base: _Found, name: str, metadata: dict[str, Any], call: dict[str, Any]) -> bool:
    try:
        found = _Found(at, at.metadata | metadata, at.call | call)
    except AttnOpsError:
        return False
    if found.decided != base.decided or any(name in note for note in found.plan.notes):
        return False
    return found.lowered() == base.lowered()


@pytest.mark.parametrize("where", SITUATIONS)
def test_what_is_given_is_read_or_refused_or_named_in_a_note(where: str) -> None:
    at = SITUATIONS[where]
    base = _Found(at, at.metadata, at.call)
    assert base.plan.placement.sequence.strategy == at.strategy
    assert at.route is None or base.plan.route.name == at.route
    dropped = [
        name
        for name, value in (METADATA | at.instead).items()
        if name in METADATA and name not in at.metadata and _dropped(at, base, name, {name: value}, {})
    ]
    dropped += [
        name for name in CALL if name not in at.call and _dropped(at, base, name, {}, {name: _argument(name, at)})
    ]
    if at.operation == "vanilla":
        declared = at.metadata.get("operation_configs", {}).get("vanilla", {})
        dropped += [
            f"vanilla's {name}"
            for name, value in (CONFIG | at.instead).items()
            if name in CONFIG
            and declared.get(name) != value
            and _dropped(at, base, name, {"operation_configs": {"vanilla": declared | {name: value}}}, {})
        ]
    assert dropped == []


def test_every_field_and_argument_is_looked_at() -> None:
    declared = set(inspect.signature(OperationMetadata).parameters)
    assert declared == METADATA.keys() | WHERE_IT_DOES_NOT_FIT
    assert {f.name for f in fields(Policy)} <= declared
    for method in (Operation.__call__, Operation.plan):
        assert set(inspect.signature(method).parameters) - {"self", "query", "key", "value"} == CALL.keys()
    assert VanillaConfig.model_fields.keys() - {"operation", "schema_version"} == CONFIG.keys()


def _plan(operation: str = "vanilla", shared: int = HEADS, batch: int = BATCH, **metadata: Any) -> Any:
    """`shared`: kv heads."""
    call = metadata.pop("call", {})
    q, k = (jax.ShapeDtypeStruct((batch, 32, h, DIM), jnp.float32) for h in (HEADS, shared))
    return OperationRegistry.create(operation, OperationMetadata(tuning="off", **metadata)).plan(q, k, k, **call)


def test_what_is_for_where_something_does_not_fit() -> None:
    with pytest.raises(AttnOpsError, match=r"metadata\.platform='tpu'"):
        _plan(platform="tpu", mesh=virtual_mesh({"fsdp": 2}))
    weights = {"call": {"return_weights": True}, **INTERPRETED}
    assert [_plan("splash", fallback=f, **weights).kind for f in ("warn", "error")] == ["fallback", "refused"]
    assert _plan(shared=1, mesh={"tp": 4}).placement.kv_repeat == 4
    with pytest.raises(ShardingError, match="kv_heads='replicate'"):
        _plan(shared=1, mesh={"tp": 4}, kv_heads="error")
    assert _plan(batch=3, mesh={"fsdp": 2}).placement.batch_axes == ()
    with pytest.raises(ShardingError, match="strict sharding"):
        _plan(batch=3, mesh={"fsdp": 2}, strict=True)


@pytest.mark.parametrize("name", ["ring", "ulysses"])
@pytest.mark.parametrize("declared", ["gather", "ring", "ulysses", "ulysses_ring"])
def test_a_strategy_that_contradicts_the_operations_name_is_refused(name: str, declared: str) -> None:
    metadata = OperationMetadata(mesh={"sp": 4}, sequence_parallel=declared)
    if name == declared:
        OperationRegistry.create(name, metadata)
        return
    with pytest.raises(ConfigError, match=f"sequence_parallel='{name}', but '{declared}' is declared"):
        OperationRegistry.create(name, metadata)
