"""Attention of each token to selected keys of its sequence over pages, against the float64 reference, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from paged_batches import PagedCase
from paged_kernel_runs import laid_out

from attnops import InputError, KVCache, OperationMetadata, OperationRegistry
from attnops.errors import AttnOpsError
from attnops.operators.kernels.pages.paged import paged_attention
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

CASES = (
    ("split", PagedCase("mixed")),
    ("split", PagedCase("decode", (16, 2), dtype="bfloat16", sinks=True)),
    ("heads", PagedCase("mixed", window=(9, 0), cap=3.0, quantised="int8", scale="token_head")),
    ("joined", PagedCase("speculate", dims=(48, 32))),
    ("joined", PagedCase("prefill", causal=False, quantised="float8_e4m3fn", scale="head")),
    ("latent", PagedCase("mixed", (6, 1), (40, 32), latent=True, sinks=True)),
    ("latent", PagedCase("decode", (6, 1), (40, 32), latent=True, quantised="int8", scale="token_head")),
)


def selected_keys(case: PagedCase, arrays: dict[str, Any], count: int, seed: int = 0) -> np.ndarray:
    """int32 [tokens, count]: some positions of each token's sequence, each once, in any order, among others that are no keys."""
    rng, tokens = np.random.default_rng(seed), len(arrays["query"])
    made = np.full((tokens, count), -1, np.int32)
    for s in range(int(arrays["num_seqs"][0])):
        length = int(arrays["kv_lens"][s])
        for token in range(*arrays["cu_q_lens"][s : s + 2]):
            some = rng.permutation(length)[: rng.integers(0, count + 1)]
            made[token, : len(some)] = some
            made[token] = rng.permutation(made[token])
            made[token][made[token] < 0] = rng.choice([-1, -(2**31), length, length + 3, 2**30])
    return made


def _wanted(case: PagedCase, arrays: dict[str, Any], selected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token after the other, in float64."""
    heads, value_dim = case.heads[0], case.dims[1]
    tokens = len(arrays["query"])
    output, lse = np.zeros((tokens, heads, value_dim)), np.full((tokens, heads), -np.inf)

    def rows(name: str, s: int) -> np.ndarray:
        pages = arrays["page_table"][s][: -(-int(arrays["kv_lens"][s]) // case.page)]
        x = arrays[f"{name}_pages"][pages].astype(np.float64)
        scale = arrays.get(f"{name}_scale")
        if scale is not None:
            x = x * (scale[pages][..., None] if np.ndim(scale) > 1 else np.reshape(scale, (-1, 1)))
        return x.reshape(-1, *x.shape[2:])

    for s in range(int(arrays["num_seqs"][0])):
        first, last = arrays["cu_q_lens"][s : s + 2]
        length = int(arrays["kv_lens"][s])
        for token in range(first, last):
            position = length - (last - first) + token - first
            left, right = case.window or (None, None)
            keys = [
                j
                for j in selected[token]
                if 0 <= j < length
                and (not case.causal or j <= position)
                and (left is None or j >= position - left)
                and (right is None or j <= position + right)
            ]
            if keys:
                found = reference_attention(
                    arrays["query"][token][None, None].astype(np.float64),
                    rows("key", s)[keys][None],
                    rows("value", s)[keys][None],
                    scale=case.call["softmax_scale"], soft_cap=case.cap, sinks=arrays.get("sinks"),
                )  # fmt: skip
                output[token], lse[token] = found.output[0, 0], found.lse[0, :, 0]
            elif case.sinks:
                lse[token] = arrays["sinks"]
    return output, lse


@pytest.mark.parametrize(("layout", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_agrees_with_the_reference(layout: str, case: PagedCase) -> None:
    arrays = batches.make(case)
    selected = selected_keys(case, arrays, 7)
    static = case.call | {"layout": layout, "max_q_len": case.static["max_q_len"]}
    if layout in ("joined", "latent"):
        static["value_dim"] = case.dims[1]
    call = jax.jit(lambda arrays, selected: paged_attention(**arrays, **static, selected=selected))
    output, lse = (np.asarray(x, np.float64) for x in call(laid_out(arrays, layout), selected))
    want_output, want_lse = _wanted(case, arrays, selected)
    size = {"float32": 4e-6, "bfloat16": 1.5e-2}[case.dtype] * np.maximum(np.abs(want_output).max(-1, keepdims=True), 1)
    assert (np.abs(output - want_output) <= size).all()
    assert (np.isneginf(lse) == np.isneginf(want_lse)).all()
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=0, atol=2e-5 if case.dtype == "float32" else 2e-2)


def test_all_keys_selected_are_attention_to_all() -> None:
    case = PagedCase("mixed", sinks=True)
    arrays = batches.make(case)
    every = np.broadcast_to(np.arange(48, dtype=np.int32), (len(arrays["query"]), 48))
    batches.agree(case, batches.run(case, arrays, selected=every), batches.expect(case, arrays))


# -- as a step ---------------------------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "layers": 1, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 24, "max_sequences": 4,
    "max_length": 32,
}  # fmt: skip
LATENT = {"kind": "latent", "kv_heads": 1, "value_dim": 12}
# (fields of the cache, mesh): every way in which a mesh splits a step.
WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {}),
    "tp": ({}, {"tp": 2}),
    "dp_tp": ({"pages_axis": "dp"}, {"dp": 2, "tp": 2}),
    "dp_on_one_device": ({"pages_axis": "dp"}, {}),
    "sp": ({"page_sequence_axis": "sp"}, {"sp": 2}),
    "latent_tp": (LATENT, {"tp": 4}),
    "latent_sp_dp": (LATENT | {"page_sequence_axis": "sp", "pages_axis": "dp"}, {"dp": 2, "sp": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_with_selected_keys(way: str) -> None:
    _step_with_selected_keys(*WAYS[way], {})


# In the TPU kernel, which is interpreted: in layouts whose rows it takes.
KERNEL_WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "dp_tp": ({"layout": "joined", "pages_axis": "dp"}, {"dp": 2, "tp": 2}),
    "packed_tp": ({"layout": "packed"}, {"tp": 2}),
    "latent_sp_dp": (LATENT | {"page_sequence_axis": "sp", "pages_axis": "dp"}, {"dp": 2, "sp": 2}),
    "latent_dp_tp": (LATENT | {"pages_axis": "dp"}, {"dp": 4, "tp": 2}),
    "joined_sp_tp": ({"layout": "joined", "page_sequence_axis": "sp"}, {"sp": 4, "tp": 2}),
    "joined_on_one_device": ({"layout": "joined", "pages_axis": "dp"}, {}),
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(x, marks=[] if x in ("dp_tp", "latent_sp_dp") else [pytest.mark.slow]) for x in KERNEL_WAYS],
)
def test_a_step_in_the_tpu_kernel(way: str) -> None:
    _step_with_selected_keys(*KERNEL_WAYS[way], {"paged": {"interpret": True}})


def _step_with_selected_keys(fields: dict[str, Any], axes: dict[str, int], configs: dict[str, Any]) -> None:
    cache = KVCache(**FIELDS | fields)
    mesh = virtual_mesh(axes) if axes else None
    plan, rng = cache.plan(mesh), np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shards, lengths = plan.shards, (9, 14)
    metadata = OperationMetadata(mesh=mesh, softmax_scale=0.3)
    stores = OperationRegistry.create("paged", metadata)
    paged = OperationRegistry.create("paged", metadata.replace(operation_configs=configs))
    tables, tokens = ([0, 3, 6], [4, 1, 8, 5]), sum(lengths)
    make = lambda new: RaggedBatch.make(  # noqa: E731
        plan, cu_q_lens=np.cumsum([0, *new]), kv_lens=lengths, page_table=tables, tokens=tokens
    )

    def batch_of(new: tuple[int, int]) -> RaggedBatch:
        return make(new) if shards == 1 else RaggedBatch.stack([make(new)] * shards)

    key, value = draw(shards * tokens, cache.kv_heads, 16), draw(shards * tokens, cache.kv_heads, cache.value_size)
    if cache.values_in_keys:
        value = key[..., :12]
    given = (key, None if cache.values_in_keys else value)
    state = stores(None, *given, state=init(cache, mesh), layer=0, batch=batch_of(lengths), mode="insert").state
    query, new = draw(shards * tokens, 4, 16), (3, 1)
    selected = np.full((shards * tokens, 5), -1, np.int32)
    firsts = [(shard * tokens, shard * tokens + 3) for shard in range(shards)]
    for shard in range(shards):
        for row, first in enumerate(firsts[shard]):
            for token in range(first, first + new[row]):
                chosen = rng.permutation(lengths[row])[: rng.integers(1, 6)]
                selected[token, : len(chosen)] = chosen
    call = jax.jit(
        lambda state, batch, query, selected: (
            paged(query, state=state, layer=0, batch=batch, selected=selected, update="none").attention_outputs
        )
    )
    output = np.asarray(call(state, batch_of(new), query, selected))
    ran = paged.plan(query, cache=cache, selected=selected, update="none").implementation
    assert ran == ("paged.forward_tpu" if configs else "paged.forward_native")
    for shard in range(shards):
        for row, first in enumerate(firsts[shard]):
            start = shard * tokens + (0, lengths[0])[row]
            for place in range(new[row]):
                token, position = first + place, lengths[row] - new[row] + place
                keys = [start + j for j in selected[token] if 0 <= j <= position]
                wanted = np.zeros((4, cache.value_size))
                if keys:
                    q, k, v = (x[None].astype(np.float64) for x in (query[token][None], key[keys], value[keys]))
                    wanted = reference_attention(q, k, v, scale=0.3).output[0, 0]
                np.testing.assert_allclose(output[token], wanted, rtol=0, atol=5e-6)


CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 3], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])


def _step(selected: Any, batch: Any = BATCH, **call: Any) -> Any:
    q, k, v = (jnp.ones((4, heads, 16)) for heads in (4, 2, 2))
    return OperationRegistry.create("paged")(
        q, k, v, state=init(CACHE), layer=0, batch=batch, selected=selected, **call
    )


@pytest.mark.parametrize(
    ("selected", "named"),
    [
        (np.zeros((4, 2), np.float32), "float32"),
        (np.zeros((3, 2), np.int32), r"\(3, 2\)"),
        (np.zeros(4, np.int32), r"\(4,\)"),
        (np.zeros((4, 0), np.int32), r"\(4, 0\)"),
        (np.array([[0, -1], [3, 9], [1, 2], [0, 0]], np.int32), r"selected\[1\] has the position 9"),
        (np.array([[-2, 1], [3, 4], [1, 2], [0, 0]], np.int32), r"selected\[0\] has the position -2"),
        (np.array([[0, 1], [3, 3], [1, 2], [0, 0]], np.int32), "position 3 twice"),
    ],
)
def test_selections_that_are_refused(selected: Any, named: str) -> None:
    with pytest.raises(AttnOpsError, match=named):
        _step(selected)


def test_the_plan_says_what_is_gathered_and_not_what_all_keys_are() -> None:
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    paged = OperationRegistry.create("paged")
    arrays = shape(4, 4, 16), shape(4, 2, 16), shape(4, 2, 16)
    plan = paged.plan(*arrays, cache=CACHE, batch=BATCH, selected=shape(4, 8, dtype=jnp.int32))
    (found,) = (note.values for note in plan.notes if note.code == "paged.selected")
    assert found == {
        "count": 8,
        "size": 4 * 8 * 2 * 2 * 16 * 4,
    }  # tokens, keys of each, key and value, heads, dim, bytes
    assert plan.reads is None
    assert paged.plan(*arrays, cache=CACHE, batch=BATCH).reads is not None


def test_a_traced_selection_is_checked_with_debug() -> None:
    with pytest.raises(Exception, match="position 9"):
        jax.block_until_ready(
            jax.jit(lambda selected: _step(selected, debug=True).attention_outputs)(jnp.full((4, 1), 9, jnp.int32))
        )


def test_inserts_select_nothing() -> None:
    with pytest.raises(InputError, match="insert"):
        _step(np.zeros((4, 1), np.int32), mode="insert")
    mesh = virtual_mesh({"tp": 2})
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    q, k = shape(4, 4, 16), shape(4, 2, 16)
    plan = OperationRegistry.create("paged", OperationMetadata(mesh=mesh)).plan(
        q, k, k, cache=CACHE, selected=jax.ShapeDtypeStruct((4, 8), jnp.int32)
    )
    (spec,) = (x for x in plan.tensors if x.tensor == "selected")
    assert (tuple(spec.spec), spec.local_shape) == ((None, None), (4, 8))
