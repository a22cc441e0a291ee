"""The operation `indexer`: selections against NumPy in float64, its plans, on meshes, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.escale import PartitionAxis
from selection_reference import best, scores

from attnops import (
    Attention,
    Causal,
    ConfigError,
    Declaration,
    OperationMetadata,
    OperationRegistry,
    Prefix,
    RefusedError,
    SlidingWindow,
)
from attnops.errors import AttnOpsError, InputError, InputTypeError, RefusedShardingError
from attnops.planning.notes import has_note

NAMES = ("indexer", "dsa_indexer", "glm_moe_dsa_indexer")
B, Q, HEADS, DIM, K = 2, 16, 3, 8, 5


def _arrays(q_len: int = Q, kv_len: int = Q, dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    shapes = (B, q_len, HEADS, DIM), (B, kv_len, DIM), (B, q_len, HEADS)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def _wanted(arrays: Any, seen: np.ndarray, k: int = K, scale: float = DIM**-0.5) -> np.ndarray:
    """int [batch, q, k]: ascending, then -1."""
    found = scores(*arrays, scale)
    return best(found, np.broadcast_to(seen, found.shape), k)[0]


def _causal(q_len: int, kv_len: int, offset: int = 0, left: int | None = None) -> np.ndarray:
    q, kv = np.arange(q_len)[:, None] + offset, np.arange(kv_len)
    return ((kv <= q) & (True if left is None else kv >= q - left))[None]


def _make(name: str = "indexer", config: dict[str, Any] | None = None, **metadata: Any) -> Any:
    configs = {} if config is None else {name: config}
    return OperationRegistry.create(name, OperationMetadata(operation_configs=configs, **metadata))


SEGMENTS = np.repeat([[0] * 6 + [1] * 10], B, 0).astype(np.int32)
LENGTHS = np.array([16, 7], np.int32)
CALLS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "causal": ({}, _causal(Q, Q)),
    "full": ({"causal": False}, np.ones((1, Q, Q), bool)),
    "mask": ({"mask": Causal() & SlidingWindow(4, 0)}, _causal(Q, Q, left=4)),
    "window": ({"sliding_window": (4, 0)}, _causal(Q, Q, left=4)),
    "lengths": ({"kv_lengths": LENGTHS}, _causal(Q, Q) & (np.arange(Q) < LENGTHS[:, None, None])),
    "ids": (
        {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
        _causal(Q, Q) & (SEGMENTS[:, :, None] == SEGMENTS[:, None]),
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS)
def test_selects_the_best_visible_keys(name: str, call: str) -> None:
    options, seen = CALLS[call]
    arrays = _arrays()
    found = _make(name)(*arrays, top_k=K, **options)
    wanted = _wanted(arrays, seen)
    np.testing.assert_array_equal(found.positions, wanted)
    np.testing.assert_array_equal(found.counts, (wanted >= 0).sum(-1))
    assert found.plan.implementation == f"{name}.forward_native"


@pytest.mark.parametrize("offset", [8, np.array([8, 3], np.int32)])
def test_queries_at_an_offset(offset: Any) -> None:
    arrays = _arrays(4, Q)
    found = jax.jit(lambda *x: _make()(*x, top_k=K, query_offset=offset, mode="prefill"))(*arrays)
    seen = np.concatenate([_causal(4, Q, int(n)) for n in np.broadcast_to(offset, B)])
    np.testing.assert_array_equal(found.positions, _wanted(arrays, seen))
    assert found.plan is None  # a result of jit


def test_quantised_keys_and_a_declared_scale() -> None:
    query, _, weights = _arrays()
    rng = np.random.default_rng(2)
    key, scale = (
        rng.integers(-127, 128, (B, Q, DIM)).astype(np.int8),
        rng.uniform(0.01, 0.02, (B, Q)).astype(np.float32),
    )
    whole = key.astype(np.float64) * scale[..., None]
    found = _make(softmax_scale=0.3)(query, key, weights, key_scale=scale, top_k=K)
    np.testing.assert_array_equal(found.positions, _wanted((query, whole, weights), _causal(Q, Q), scale=0.3))


MESHES: dict[str, dict[str, int]] = {
    "batch": {"dp": 2},
    "queries": {"sp": 4},
    "both": {"dp": 2, "sp": 2},
    "heads": {"tp": 2},
}


@pytest.mark.parametrize("call", ["causal", "lengths", "ids"])
@pytest.mark.parametrize("mesh", MESHES)
def test_on_a_mesh(mesh: str, call: str) -> None:
    axes, (options, seen), arrays = MESHES[mesh], CALLS[call], _arrays()
    devices = np.asarray(jax.devices()[: int(np.prod([*axes.values()]))]).reshape(tuple(axes.values()))
    operation = _make(
        mesh=jax.sharding.Mesh(devices, tuple(axes)),
        partition_axis=PartitionAxis(
            batch_axis="dp", sequence_axis="sp", query_sequence_axis="sp", key_sequence_axis="sp"
        ),
    )
    found = jax.jit(lambda *x: operation(*x, top_k=K, **options))(*arrays)
    np.testing.assert_array_equal(found.positions, _wanted(arrays, seen))
    plan = operation.plan(*arrays, top_k=np.int32(K), **options)
    specs = {x.tensor: x.local_shape for x in plan.tensors}
    batch, queries = B // axes.get("dp", 1), Q // axes.get("sp", 1)
    assert specs["index_query"] == (batch, queries, HEADS, DIM)
    assert specs["index_key"] == (batch, Q // axes.get("sp", 1), DIM)
    assert specs["positions"] == (batch, queries, K)
    assert found.positions.sharding.shard_shape((B, Q, K)) == (batch, queries, K)
    gathered = [note.values for note in plan.notes if note.code == "index.keys_gathered"]
    assert [x["size"] for x in gathered] == ([batch * Q * DIM * 4] if "sp" in axes else [])


def test_specs_per_mode() -> None:
    """While decoding, a query of one token isn't split along the sequence; keys are, by default."""
    axis = PartitionAxis(
        batch_axis="dp", query_sequence_axis="sp", key_sequence_axis="sp", decode_query_sequence_axis=None
    )
    operation = _make(mesh=jax.sharding.AbstractMesh((2, 2), ("dp", "sp")), partition_axis=axis)
    for mode, queries in (("train", "sp"), ("prefill", "sp"), ("autoregressive", None)):
        plan = operation.plan(*_arrays(), top_k=K, mode=mode)
        assert tuple(plan.specs["index_query"]) == ("dp", queries, None, None), mode
        assert tuple(plan.specs["positions"]) == ("dp", queries, None), mode


def test_strict_and_what_is_not_read() -> None:
    """Axes that only repeat work are told, and refused with strict; so are axes that don't fit. Fields of attention are told."""
    mesh = jax.sharding.AbstractMesh((2, 3), ("dp", "tp"))
    axis = PartitionAxis(batch_axis="dp")
    found = _make(mesh=mesh, partition_axis=axis, runtime_dtype="bfloat16", sequence_parallel="ring")
    notes = {note.code: note.values for note in found.plan(*_arrays(), top_k=K).notes}
    assert notes["index.idle_axes"] == {"names": ["tp=3"]}
    assert notes["index.unread"] == {"fields": ["runtime_dtype", "sequence_parallel"]}
    plain = _make(partition_axis=axis).plan(*_arrays(), top_k=K)
    assert not has_note(plain.notes, "index.unread")
    with pytest.raises(RefusedShardingError, match="tp=3"):
        _make(mesh=mesh, partition_axis=axis, strict=True).plan(*_arrays(), top_k=K)
    odd = jax.sharding.AbstractMesh((3,), ("mine",))
    with pytest.raises(RefusedShardingError, match="mine"):
        _make(mesh=odd, partition_axis=PartitionAxis(batch_axis="mine"), strict=True).plan(*_arrays(), top_k=K)
    fits = jax.sharding.AbstractMesh((2,), ("dp",))
    assert _make(mesh=fits, partition_axis=axis, strict=True).plan(*_arrays(), top_k=K).method == "forward_native"


def test_the_plan_is_data() -> None:
    operation = _make(config={"top_k": K, "block_q": 8, "block_kv": 32})
    plan = operation.plan(*_arrays())
    data = json.loads(json.dumps(plan.to_dict()))
    assert (data["operation"], data["implementation"], data["mode"]) == (
        "indexer",
        "indexer.forward_native",
        "__train__",
    )
    assert data["sizes"] == {"batch": B, "q_len": Q, "kv_len": Q, "index_dim": DIM, "top_k": K, "index_heads": HEADS}
    assert (data["config"]["block_q"], data["config"]["block_kv"]) == (8, 32)
    assert plan == operation.plan(*_arrays())
    assert hash(plan) == hash(operation.plan(*_arrays()))
    assert operation.explain(*_arrays()) == plan.explain()
    np.testing.assert_array_equal(operation(*_arrays()).positions, _wanted(_arrays(), _causal(Q, Q)))
    assert has_note(_make(backend="cpu").plan(*_arrays(), top_k=K).notes, "platform.no_kernel")


@pytest.mark.parametrize(("field", "value"), [("top_k", 4), ("block_q", 8), ("block_kv", 64)])
@pytest.mark.parametrize("name", NAMES)
def test_a_field_changes_what_is_lowered(name: str, field: str, value: int) -> None:
    arrays = _arrays(Q, 128)

    def lowered(config: dict[str, Any]) -> str:
        operation = _make(name, config, backend="cpu")
        return jax.jit(lambda *x: operation(*x).positions).lower(*arrays).as_text()

    assert lowered({"top_k": K} | {field: value}) != lowered({"top_k": K})


def test_the_scores_of_all_queries_never_stand_in_memory() -> None:
    """DeepSeek V3.2's indexer over 32,768 tokens in bfloat16: as float32, the queries alone take 1 GiB and all scores 4 GiB."""
    length = 32768
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    arrays = shape(1, length, 64, 128), shape(1, length, 128), shape(1, length, 64)
    compiled = jax.jit(lambda *x: _make()(*x, top_k=2048).positions).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 << 20


def test_a_gradient_is_zero() -> None:
    arrays = _arrays()
    found = jax.grad(lambda q: _make()(q, *arrays[1:], top_k=K).positions.astype(jnp.float32).sum())(arrays[0])
    assert not np.asarray(found).any()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"top_k": 0}, InputError),
        ({"top_k": None}, InputError),
        ({"top_k": True}, InputError),
        ({"topk": 3}, InputTypeError),
        ({"mask": np.ones((1, 1, Q, Q), bool)}, InputTypeError),
        ({"softmax_scale": float("nan")}, InputError),
        ({"softmax_scale": "1"}, InputTypeError),
        ({"sliding_window": (1, 2, 3)}, AttnOpsError),
        ({"sliding_window": "wide"}, AttnOpsError),
        ({"query_offset": -1}, InputError),
        ({"q_segment_ids": SEGMENTS}, InputError),
        ({"kv_lengths": np.zeros(3, np.int32)}, InputError),
        ({"kv_lengths": np.zeros(B, np.float32)}, InputError),
        ({"key_scale": np.ones((B, Q), np.float32)}, InputError),
        ({"mode": "sideways"}, InputError),
        ({"mask": Prefix(3)}, RefusedError),
    ],
)
def test_calls_that_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        _make()(*_arrays(), **{"top_k": K} | change)


@pytest.mark.parametrize("name", range(3))
def test_shapes_are_checked(name: int) -> None:
    arrays = list(_arrays())
    arrays[name] = arrays[name][:, :-1]
    if name == 1:
        arrays[name] = arrays[name][..., :-1]
    with pytest.raises(InputError):
        _make()(*arrays, top_k=K)


def test_declared_and_given_disagree() -> None:
    with pytest.raises(ConfigError):
        _make(config={"top_k": 4})(*_arrays(), top_k=K)
    with pytest.raises(RefusedError):
        _make(config={"block_kv": 33})(*_arrays(), top_k=K)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_no_attention(name: str) -> None:
    with pytest.raises(ConfigError):
        Attention(name)
    with pytest.raises(ConfigError):
        Attention(Declaration.from_dict({"operation": name, "call": {"q_len": 4}}))
