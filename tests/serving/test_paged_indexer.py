"""The operation `paged_indexer`: selections from index keys in pages against NumPy in float64, on meshes, with attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from paged_batches import PagedCase

from attnops import Chunked, InputError, KVCache, OperationMetadata, OperationRegistry, Prefix, RefusedError
from attnops.errors import AttnOpsError, InputTypeError, RefusedShardingError
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.operators.selection.kernel.paged_top_k import PagedSelection, merge_selections, paged_top_k
from attnops.planning.notes import has_note
from attnops.verify import reference_attention

K = 7


def _best(score: np.ndarray, k: int) -> np.ndarray:
    """int [k]: the positions of the greatest scores, of equal ones the lower first, ascending, then -1; -inf is not visible."""
    order = np.lexsort((np.arange(len(score)), -score))
    chosen = np.sort([j for j in order[:k] if score[j] > -np.inf]).astype(np.int32)
    return np.concatenate([chosen, np.full(k - len(chosen), -1, np.int32)])


def _scores(query: Any, key: Any, weights: Any, scale: float) -> np.ndarray:
    """float64 [keys] of one token: query [heads, dim], key [keys, dim], weights [heads]."""
    query, key, weights = (np.asarray(x, np.float64) for x in (query, key, weights))
    return (weights[:, None] * np.maximum(scale * query @ key.T, 0)).sum(0)


def _shown(length: int, position: int, window: Any, causal: bool = True) -> np.ndarray:
    left, right = window or (None, None)
    j = np.arange(length)
    seen = (j <= position) if causal else np.ones(length, bool)
    seen &= True if left is None else j >= position - left
    return seen & (True if right is None else j <= position + right)


# -- the function on raw arrays ------------------------------------------------------------------------------------------

_INDEX: dict[str, Any] = {"heads": (3, 1), "dims": (24, 24), "latent": True}
CASES = (
    PagedCase("mixed", **_INDEX),
    PagedCase("decode", **_INDEX, dtype="bfloat16", quantised="int8", scale="token_head"),
    PagedCase("speculate", **_INDEX, quantised="float8_e4m3fn"),
    PagedCase("prefill", **_INDEX, window=(9, 0)),
    PagedCase("mixed", **_INDEX, window=(5, 2), causal=False, quantised="int8", scale="head", page=4),
)


def _inputs(case: PagedCase) -> tuple[dict[str, Any], np.ndarray]:
    """(the arrays of a call, its weights). Some keys are equal, so that their scores are."""
    arrays = batches.make(case)
    pages = arrays["page_table"][arrays["page_table"] < len(arrays["key_pages"])]
    arrays["key_pages"][pages[1::2], :2] = arrays["key_pages"][pages[0], 0]
    if np.ndim(arrays.get("key_scale")) > 1:
        arrays["key_scale"][pages[1::2], :2] = arrays["key_scale"][pages[0], 0]
    weights = np.random.default_rng(5).standard_normal(arrays["query"].shape[:2]).astype(np.float32)
    return arrays, weights


def _wanted(case: PagedCase, arrays: dict[str, Any], weights: np.ndarray) -> np.ndarray:
    wanted = np.full((len(weights), K), -1, np.int32)
    for s in range(int(arrays["num_seqs"][0])):
        first, last = arrays["cu_q_lens"][s : s + 2]
        length = int(arrays["kv_lens"][s])
        pages = arrays["page_table"][s][: -(-length // case.page)]
        key, scale = arrays["key_pages"][pages].astype(np.float64), arrays.get("key_scale")
        if scale is not None:
            key = key * (scale[pages][..., None] if np.ndim(scale) > 1 else np.reshape(scale, (-1, 1)))
        key = key.reshape(-1, case.dims[0])[:length]
        for token in range(first, last):
            seen = _shown(length, length - last + token, case.window, case.causal)
            score = _scores(arrays["query"][token], key, weights[token], 0.3)
            wanted[token] = _best(np.where(seen, score, -np.inf), K)
    return wanted


def _pages(arrays: dict[str, Any]) -> dict[str, Any]:
    made = batches.as_latents(arrays)
    return {"index_query" if name == "query" else name: x for name, x in made.items() if not name.startswith("value")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_selects_the_best_visible_keys_of_each_sequence(case: PagedCase) -> None:
    arrays, weights = _inputs(case)
    static = {"causal": case.causal, "sliding_window": case.window, "max_q_len": case.static["max_q_len"]}
    sizes = {"pages_a_block": 32 // case.page, "block_q": 4}
    call = jax.jit(lambda x, w: paged_top_k(**x, weights=w, k=K, softmax_scale=0.3, **static, **sizes))
    wanted = _wanted(case, arrays, weights)
    found = call(_pages(arrays), weights)
    np.testing.assert_array_equal(found.positions, wanted)
    if case.window is not None and case.page == 8:  # and once the pages that no query sees are another sequence's
        np.testing.assert_array_equal(call(_pages(batches.released(case, arrays)), weights).positions, wanted)
    assert ((np.asarray(found.order) > 0) == (np.asarray(found.positions) >= 0)).all()


def test_what_parts_of_the_pages_select_merges_to_what_all_do() -> None:
    case = CASES[0]
    arrays, weights = _inputs(case)
    made, sizes = _pages(arrays), {"pages_a_block": 4, "block_q": 4}
    part = jax.jit(
        lambda x, w, shard: paged_top_k(
            **x, weights=w, k=K, softmax_scale=0.3, page_stride=3, page_shard=shard, **sizes
        )
    )
    parts = [part(made | {"page_table": made["page_table"][:, n::3]}, weights, np.int32(n)) for n in range(3)]
    merged = jax.jit(merge_selections)(parts)
    np.testing.assert_array_equal(merged.positions, _wanted(case, arrays, weights))


def test_equal_scores_of_different_parts_go_to_the_lower_position() -> None:
    parts = [
        PagedSelection(jnp.array([[3, 8, -1]]), jnp.array([[5, 9, 0]], jnp.uint32)),
        PagedSelection(jnp.array([[1, 2, 9]]), jnp.array([[5, 5, 5]], jnp.uint32)),
    ]
    assert jax.jit(merge_selections)(parts).positions.tolist() == [[1, 2, 8]]


# -- as a step ---------------------------------------------------------------------------------------------------------

DIM, HEADS, TOP = 16, 3, 5
FIELDS: dict[str, Any] = {
    "layers": 1, "kind": "latent", "head_dim": DIM, "value_dim": DIM, "dtype": "float32", "page_size": 4, "pages": 24,
    "max_sequences": 4, "max_length": 32,
}  # fmt: skip
INT8, FP8 = ({"dtype": dtype, "scale": "token_head"} for dtype in ("int8", "float8_e4m3fn"))
# (fields of the cache, mesh): every way in which a mesh splits a step.
WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {}),
    "int8": ({"quantised": INT8}, {}),
    "tp": ({}, {"tp": 2}),
    "dp": ({"pages_axis": "dp"}, {"dp": 2}),
    "dp_on_one_device": ({"pages_axis": "dp"}, {}),
    "sp_dp": ({"page_sequence_axis": "sp", "pages_axis": "dp"}, {"dp": 2, "sp": 2}),
    "fp8_sp_cp_tp": ({"page_sequence_axis": ("sp", "cp"), "quantised": FP8}, {"sp": 2, "cp": 2, "tp": 2}),
}  # fmt: skip


def _mesh(axes: dict[str, int]) -> Any:
    count = int(np.prod([*axes.values()]))
    return (
        jax.sharding.Mesh(np.asarray(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
        if axes
        else None
    )


def _stored(key: np.ndarray, quantised: Any) -> np.ndarray:
    """Keys as pages give them back."""
    if quantised is None:
        return key
    kind = jnp.dtype(quantised["dtype"])
    most = 127.0 if kind == jnp.int8 else float(jnp.finfo(kind).max)
    scale = (np.abs(key).max(-1, keepdims=True) / np.float32(most)).astype(np.float32)
    whole = np.round(key / scale) if kind == jnp.int8 else (key / scale).astype(kind)
    return np.asarray(whole, np.float64) * scale


@pytest.mark.parametrize("way", WAYS)
def test_a_step_writes_its_keys_and_selects(way: str) -> None:
    fields, axes = WAYS[way]
    cache, mesh = KVCache(**FIELDS | fields), _mesh(axes)
    plan, rng = cache.plan(mesh), np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shards, lengths, new = plan.shards, (9, 14), (3, 1)
    indexer = OperationRegistry.create("paged_indexer", OperationMetadata(mesh=mesh))
    tables, tokens = ([0, 5, 10], [4, 1, 6, 7]), sum(lengths)

    def batch_of(q_lens: Any, kv_lens: Any) -> RaggedBatch:
        one = RaggedBatch.make(
            plan, cu_q_lens=np.cumsum([0, *q_lens]), kv_lens=kv_lens, page_table=tables, tokens=tokens
        )
        return one if shards == 1 else RaggedBatch.stack([one] * shards)

    old = tuple(length - count for length, count in zip(lengths, new, strict=True))
    keys = draw(shards, 2, max(lengths), DIM)

    def packed(first: Any, last: Any) -> np.ndarray:
        """The keys of positions first to last of each sequence, as a step's tokens."""
        made = np.zeros((shards, tokens, DIM), np.float32)
        for shard in range(shards):
            rows = np.concatenate([keys[shard, row, a:b] for row, (a, b) in enumerate(zip(first, last, strict=True))])
            made[shard, : len(rows)] = rows
        return made.reshape(-1, DIM)

    state = init(cache, mesh)
    before = indexer(None, packed((0, 0), old), state=state, layer=0, batch=batch_of(old, old), mode="insert")
    assert before.positions is None
    assert before.counts is None
    query, weights = draw(shards * tokens, HEADS, DIM), draw(shards * tokens, HEADS)
    step = jax.jit(
        lambda state, batch, *arrays: indexer(*arrays, state=state, layer=0, batch=batch, top_k=TOP, softmax_scale=0.3)
    )
    found = step(before.state, batch_of(new, lengths), query, packed(old, lengths), weights)
    positions, counts = np.asarray(found.positions), np.asarray(found.counts)
    stored = _stored(keys, fields.get("quantised"))
    wanted = np.full((shards * tokens, TOP), -1, np.int32)
    for shard in range(shards):
        for row, first in enumerate((shard * tokens, shard * tokens + new[0])):
            for place in range(new[row]):
                score = _scores(query[first + place], stored[shard, row], weights[first + place], 0.3)
                seen = _shown(len(score), old[row] + place, None)
                wanted[first + place] = _best(np.where(seen, score, -np.inf), TOP)
    np.testing.assert_array_equal(positions, wanted)
    np.testing.assert_array_equal(counts, (wanted >= 0).sum(1))


def test_one_selection_for_two_layers_is_sparse_attention_by_its_definition() -> None:
    """DeepSeek V3.2's decode: index keys in a group of their own, one selection for both layers of latents."""
    latent, rope, heads = 12, 4, 4
    groups = [
        {"layers": 2, "head_dim": latent + rope, "value_dim": latent, "pages": 24},
        {"layers": 1, "head_dim": DIM, "value_dim": DIM, "pages": 24},
    ]
    cache = KVCache(**{name: x for name, x in FIELDS.items() if name != "pages"} | {"layers": groups})
    plan, rng = cache.plan(), np.random.default_rng(2)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    lengths, tables = np.array([9, 14]), ([0, 3, 6, 9], [4, 1, 8, 5, 7])
    stored = [draw(2, 20, 1, latent + rope) for _ in range(2)]
    index_keys = draw(2, 20, DIM)
    paged = OperationRegistry.create("paged", OperationMetadata(softmax_scale=0.3))
    indexer = OperationRegistry.create("paged_indexer")

    def batches_of(q_lens: Any, kv_lens: Any) -> list[RaggedBatch]:
        starts = np.cumsum([0, *q_lens])
        return [RaggedBatch.make(group, cu_q_lens=starts, kv_lens=kv_lens, page_table=tables) for group in plan.groups]

    def rows(x: np.ndarray, first: Any, last: Any) -> np.ndarray:
        return np.concatenate([x[row, a:b] for row, (a, b) in enumerate(zip(first, last, strict=True))])

    @jax.jit
    def step(state: Any, main: Any, index: Any, arrays: Any, latents: Any, queries: Any) -> Any:
        found = indexer(*arrays, state=state, layer=2, batch=index, top_k=TOP)
        state, outputs = found.state, []
        for layer in range(2):
            output = paged(
                queries[layer], latents[layer], state=state, layer=layer, batch=main, selected=found.positions
            )
            state = output.state
            outputs.append(output.attention_outputs)
        return state, found.positions, outputs

    state, nothing = init(cache), np.zeros(2, int)
    main, index = batches_of(lengths, lengths)
    for layer in range(2):
        prompt = rows(stored[layer], nothing, lengths)
        state = paged(None, prompt, state=state, layer=layer, batch=main, mode="insert").state
    state = indexer(None, rows(index_keys, nothing, lengths), state=state, layer=2, batch=index, mode="insert").state
    for new in ((2, 1), (1, 2), (2, 1)):
        old, lengths = lengths, lengths + new
        tokens = sum(new)
        query, weights, queries = draw(tokens, HEADS, DIM), draw(tokens, HEADS), draw(2, tokens, heads, latent + rope)
        main, index = batches_of(new, lengths)
        arrays, latents = (query, rows(index_keys, old, lengths), weights), [rows(x, old, lengths) for x in stored]
        state, positions, outputs = step(state, main, index, arrays, latents, queries)
        token = 0
        for row in range(2):
            for position in range(old[row], lengths[row]):
                score = _scores(query[token], index_keys[row, : position + 1], weights[token], DIM**-0.5)
                chosen = _best(score, TOP)
                np.testing.assert_array_equal(positions[token], chosen)
                for layer in range(2):
                    key = stored[layer][row, chosen][None].astype(np.float64)
                    want = reference_attention(
                        queries[layer, token][None, None].astype(np.float64), key, key[..., :latent], scale=0.3
                    )
                    np.testing.assert_allclose(outputs[layer][token], want.output[0, 0], rtol=0, atol=5e-6)
                token += 1


# -- plans and refusals --------------------------------------------------------------------------------------------------

CACHE = KVCache(**FIELDS)
BATCH = RaggedBatch.make(CACHE.plan(), cu_q_lens=[0, 1, 3], kv_lens=[6, 9], page_table=[[5, 2], [3, 4, 1]])


def _shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


STEP = _shape(4, HEADS, DIM), _shape(4, DIM), _shape(4, HEADS)


def _plan(cache: KVCache = CACHE, metadata: Any = None, config: Any = None, **call: Any) -> Any:
    configs = {} if config is None else {"paged_indexer": config}
    indexer = OperationRegistry.create("paged_indexer", OperationMetadata(**metadata or {}, operation_configs=configs))
    return indexer.plan(*STEP, cache=cache, **({} if config and "top_k" in config else {"top_k": TOP}) | call)


def test_the_plan_says_what_is_selected_read_and_sent() -> None:
    plan = _plan(batch=BATCH)
    assert plan.implementation == "paged_indexer.forward_native"
    assert (plan.reads.live, plan.reads.queries) == (5, 3)
    tensors = {x.tensor: x.shape for x in plan.tensors}
    assert tensors == {
        "index_query": (4, HEADS, DIM), "index_key": (4, DIM), "index_weights": (4, HEADS), "positions": (4, TOP), "counts": (4,),
    }  # fmt: skip
    assert plan.to_dict()["top_k"] == TOP
    assert f"the {TOP} best keys" in plan.explain()
    split = _plan(KVCache(**FIELDS | {"page_sequence_axis": "sp"}), {"mesh": _mesh({"sp": 2})})
    (merged,) = (note.values for note in split.notes if note.code == "index.merged")
    size = 4 * TOP * (8 + 4)  # tokens, keys of each, bytes of a position and its score, and of a position
    assert merged == {"axes": ("sp",), "size": size, "sent": size // 2}
    repeated = _plan(metadata={"mesh": _mesh({"tp": 2})})
    assert [note.values for note in repeated.notes if note.code == "index.idle_axes"] == [{"names": ["tp=2"]}]
    with pytest.raises(RefusedShardingError):
        _plan(metadata={"mesh": _mesh({"tp": 2}), "strict": True})
    assert not has_note(split.notes, "index.idle_axes")
    assert _plan(config={"top_k": 3}).problem.top_k == 3
    assert not _plan(config={"pages_per_block": 8}).rejected
    refused = _plan(config={"pages_per_block": 3})
    assert [reason.code for rejected in refused.rejected for reason in rejected.reasons] == ["config"]


def test_every_size_changes_the_program() -> None:
    def lowered(**config: int) -> str:
        configs = {"paged_indexer": {"top_k": TOP} | config}
        indexer = OperationRegistry.create("paged_indexer", OperationMetadata(operation_configs=configs, tuning="off"))
        step = jax.jit(lambda state, *x: indexer(*x, state=state, layer=0, batch=BATCH).positions)
        return step.lower(jax.eval_shape(lambda: init(CACHE)), *STEP).as_text()

    programs = [lowered(), lowered(pages_per_block=16), lowered(queries_per_block=3), lowered(top_k=4)]
    assert len(set(programs)) == len(programs)


def test_what_is_not_read_is_told() -> None:
    plan = _plan(metadata={"runtime_dtype": "bfloat16", "dropout_prob": 0.5})
    assert has_note(plan.notes, "index.unread")
    assert plan.problem.runtime_dtype == "float32"
    assert has_note(_plan(update="fused").notes, "paged.fused_unsupported")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"top_k": 0}, InputError),
        ({"top_k": None}, InputError),
        ({"topk": 3}, InputTypeError),
        ({"logits_soft_cap": 3.0}, InputTypeError),
        ({"selected": np.zeros((4, 1), np.int32)}, InputTypeError),
        ({"key_scale": np.ones(4, np.float32)}, InputError),
        ({"softmax_scale": float("inf")}, InputError),
        ({"mode": "train"}, InputError),
        ({"mode": "insert"}, InputError),
        ({"update": "none"}, InputError),
        ({"mask": Prefix(3)}, RefusedError),
        ({"mask": Chunked(4)}, RefusedError),
        ({"max_q_len": 1}, InputError),
        ({"cache": KVCache(**FIELDS | {"kind": "kv", "kv_heads": 2})}, InputError),
        ({"index_query": np.ones((4, DIM), np.float32)}, InputError),
        ({"index_query": np.ones((4, HEADS, DIM), np.int32)}, InputTypeError),
        ({"index_query": None}, InputError),
        ({"index_key": np.ones((4, 1, DIM), np.float32)}, InputError),
        ({"index_key": np.ones((3, DIM), np.float32)}, InputError),
        ({"index_key": np.ones((4, DIM), np.int8)}, InputTypeError),
        ({"index_weights": np.ones((4, 2), np.float32)}, InputError),
        ({"index_weights": np.ones((4, HEADS), np.int32)}, InputTypeError),
        ({"index_weights": None}, InputError),
        ({"state": None}, InputTypeError),
    ],
    ids=lambda x: str(next(iter(x.items())))[:40] if isinstance(x, dict) else x.__name__,
)
def test_steps_that_are_refused(change: dict[str, Any], error: type[AttnOpsError]) -> None:
    cache = change.pop("cache", CACHE) if "cache" in change else CACHE
    arrays = {"index_query": (4, HEADS, DIM), "index_key": (4, DIM), "index_weights": (4, HEADS)}
    call = {name: np.ones(shape, np.float32) for name, shape in arrays.items()} | {"state": init(cache), "top_k": TOP}
    with pytest.raises(error):
        OperationRegistry.create("paged_indexer")(**call | change, layer=0, batch=BATCH)


def test_scores_of_long_sequences_do_not_stand_in_memory() -> None:
    """A chunk of 512 tokens of a sequence of 128k: all its scores take 256 MiB."""
    length, chunk = 131072, 512
    cache = KVCache(**FIELDS | {"max_length": length, "pages": length // 64, "page_size": 64, "max_sequences": 1})
    indexer = OperationRegistry.create("paged_indexer")
    batch = RaggedBatch.make(
        cache.plan(), cu_q_lens=[0, chunk], kv_lens=[length], page_table=[list(range(length // 64))]
    )
    state = jax.eval_shape(lambda: init(cache))
    arrays = _shape(chunk, HEADS, DIM), _shape(chunk, DIM), _shape(chunk, HEADS)
    step = jax.jit(lambda state, *x: indexer(*x, state=state, layer=0, batch=batch, top_k=512), donate_argnums=0)
    memory = step.lower(state, *arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 96 << 20
