"""Every function on a cache's arrays on meshes of every kind of axis, with arrays placed as planned and as they come; the step by
the float64 reference, the rest by NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attnops import KVCache, OperationMetadata, OperationRegistry
from attnops.operators.paged_cache import (
    RaggedBatch,
    copy,
    dense_insert,
    extract,
    init,
    insert,
    restore,
    scrub,
    shardings,
)
from attnops.verify import reference_attention

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PAGE, PAGES, DIM = 4, 8, 16
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(8, heads, DIM)).astype(np.float32) for heads in (4, 2, 2))


def _mesh(names: str, kinds: tuple[AxisType, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), tuple(names.split()), axis_types=kinds)


def _cache(**fields: Any) -> KVCache:
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": DIM, "dtype": "float32", "page_size": PAGE, "pages": PAGES}
    return KVCache(**sizes, max_sequences=2, max_length=16, **fields)


def _batch(cache: KVCache, mesh: Any) -> RaggedBatch:
    """Eight tokens: a sequence on each shard of pages, or one whose pages lie on both devices."""
    plan = cache.plan(mesh)
    if cache.pages_axis is None:
        return RaggedBatch.make(plan, cu_q_lens=[0, 8], kv_lens=[8], page_table=[[2, 5]])
    rows = [RaggedBatch.make(plan, cu_q_lens=[0, 4], kv_lens=[4], page_table=[[page]]) for page in (1, 3)]
    return RaggedBatch.stack(rows)


def _stored(cache: KVCache, tokens: np.ndarray) -> np.ndarray:
    """The pages after the batch's tokens are written."""
    pages = np.zeros((PAGES, PAGE, 2, DIM), np.float32)
    # Ids 2 and 5 of two sequence shards are page 1 of the first and page 2 of the second; 1 and 3 each a shard's own.
    places = (1, 6) if cache.pages_axis is None else (1, 7)
    pages[places[0]], pages[places[1]] = tokens[:4], tokens[4:]
    return pages


def _wanted(cache: KVCache) -> np.ndarray:
    rows = 1 if cache.pages_axis is None else 2
    q, k, v = (x.reshape(rows, -1, *x.shape[1:]) for x in (Q, K, V))
    seen = np.tril(np.ones((q.shape[1],) * 2, bool))[None, None]
    return reference_attention(q, k, v, scale=DIM**-0.5, mask=seen).output.reshape(Q.shape)


CASES = {
    "explicit": ("dp tp", (EXPLICIT, EXPLICIT), {"pages_axis": "dp"}),
    "mixed": ("dp tp", (EXPLICIT, AUTO), {"pages_axis": "dp"}),
    "mixed-heads": ("dp tp", (AUTO, EXPLICIT), {"pages_axis": "dp"}),
    "sequence": ("sp tp", (EXPLICIT, EXPLICIT), {"page_sequence_axis": "sp"}),
    "sequence-mixed": ("sp tp", (AUTO, EXPLICIT), {"page_sequence_axis": "sp"}),
}


def _given(case: str, placed: bool) -> tuple[Any, KVCache, Any, Any, list[Any]]:
    names, kinds, fields = CASES[case]
    mesh, cache = _mesh(names, kinds), _cache(**fields)
    batch, arrays = _batch(cache, mesh), [jnp.asarray(x) for x in (Q, K, V)]
    if placed:
        at = shardings(cache, mesh)
        batch = jax.device_put(batch, at.batch)
        arrays = [jax.device_put(x, to) for x, to in zip(arrays, (at.query, at.key, at.value), strict=True)]
    return mesh, cache, init(cache, mesh), batch, arrays


@pytest.mark.parametrize(("case", "placed"), [(case, case in ("sequence", "mixed")) for case in CASES])
def test_a_step(case: str, placed: bool) -> None:
    mesh, cache, state, batch, arrays = _given(case, placed)
    operation = OperationRegistry.create("paged", OperationMetadata(mesh=mesh))

    def step(state: Any, batch: Any, q: Any, k: Any, v: Any) -> Any:
        made = operation(q, k, v, state=state, layer=0, batch=batch)
        return made.attention_outputs, made.state

    output, after = jax.jit(step)(state, batch, *arrays)
    np.testing.assert_allclose(output, _wanted(cache), atol=2e-6)
    np.testing.assert_array_equal(after.layers[0].key, _stored(cache, K))
    assert after.layers[0].key.sharding.shard_shape((PAGES, PAGE, 2, DIM)) == (PAGES // 2, PAGE, 1, DIM)


@pytest.mark.parametrize(("case", "placed"), [("explicit", False), ("explicit", True), ("sequence", False)])
def test_functions_on_pages(case: str, placed: bool) -> None:
    _, cache, state, batch, (_, key, value) = _given(case, placed)
    pages = _stored(cache, K)
    state = jax.jit(lambda s, b, k, v: insert(s, 0, b, k, v))(state, batch, key, value)
    np.testing.assert_array_equal(state.layers[0].key, pages)
    np.testing.assert_array_equal(state.layers[0].value, _stored(cache, V))

    apart = cache.pages_axis is not None
    # A sequence shard's page n is the host's 2n or 2n + 1.
    pairs, gone = ([[[1, 2]], [[3, 0]]], [[1], [3]]) if apart else ([[2, 4], [5, 1]], [2, 5])
    copied = jax.jit(copy)(state, jnp.asarray(pairs))
    changed = pages.copy()
    changed[[2, 4]] = pages[[1, 7 if apart else 6]]
    np.testing.assert_array_equal(copied.layers[0].key, changed)
    scrubbed = jax.jit(scrub)(copied, jnp.asarray(gone))
    changed[[1, 7 if apart else 6]] = 0
    np.testing.assert_array_equal(scrubbed.layers[0].key, changed)
    assert scrubbed.layers[0].key.sharding.spec == state.layers[0].key.sharding.spec

    row = (1, 0) if apart else 0
    saved = jax.jit(lambda s, b: extract(s, b, row))(state, batch)
    tokens = K[4:] if apart else K
    kept = np.asarray(saved.layers[0].key).reshape(-1, 2, DIM)
    np.testing.assert_array_equal(kept[: len(tokens)], tokens)
    assert not kept[len(tokens) :].any()
    back = jax.jit(lambda s, saved, b: restore(s, saved, b, row))(scrubbed, saved, batch)
    changed[[7] if apart else [1, 6]] = pages[[7] if apart else [1, 6]]
    np.testing.assert_array_equal(back.layers[0].key, changed)


@pytest.mark.slow
def test_outside_of_jit() -> None:
    """Arrays as they come, on one device, beside pages on the mesh."""
    _, cache, state, batch, (_, key, value) = _given("explicit", False)
    state = insert(state, 0, batch, key, value)
    pages = _stored(cache, K)
    np.testing.assert_array_equal(state.layers[0].key, pages)
    pages[[2]] = pages[[1]]
    np.testing.assert_array_equal(copy(state, np.array([[[1, 2]], [[4, 4]]])).layers[0].key, pages)
    np.testing.assert_array_equal(extract(state, batch, (1, 0)).layers[0].value[0], V[4:])


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_a_dense_cache(kinds: tuple[AxisType, AxisType], placed: bool) -> None:
    mesh = _mesh("dp tp", kinds)
    at = jax.NamedSharding(mesh, P("dp", None, "tp"))
    cache = jax.device_put(jnp.zeros((4, 6, 2, DIM)), at)
    tokens = RNG.normal(size=(4, 2, 2, DIM)).astype(np.float32)
    given = jax.device_put(tokens, at) if placed else jnp.asarray(tokens)
    wanted = np.zeros(cache.shape, np.float32)
    for row, start in enumerate((0, 3, 1, 4)):
        wanted[row, start : start + 2] = tokens[row]
    made, _ = jax.jit(dense_insert)(cache, cache, given, given, jnp.array([0, 3, 1, 4]))
    np.testing.assert_array_equal(made, wanted)
    assert made.sharding.shard_shape(cache.shape) == (2, 6, 1, DIM)


def test_without_a_mesh_of_its_own() -> None:
    """The arrays lie on a mesh that the operation isn't told of."""
    _, cache, state, batch, arrays = _given("explicit", True)
    operation = OperationRegistry.create("paged")
    run = jax.jit(lambda s, b, *x: operation(*x, state=s, layer=0, batch=b).attention_outputs)
    np.testing.assert_allclose(run(state, batch, *arrays), _wanted(cache), atol=2e-6)


def test_inside_a_shard_map_over_one_axis() -> None:
    """The caller has dp for himself; tp is Explicit, and attnops splits heads over it."""
    mesh, cache, state, batch, arrays = _given("explicit", True)
    at = shardings(cache, mesh)
    operation = OperationRegistry.create("paged")

    def only_dp(place: Any) -> P:
        return P(*("dp" if entry == "dp" else None for entry in place.spec))

    specs = jax.tree.map(only_dp, (at.state, at.batch, at.query, at.key, at.value))

    def body(state: Any, batch: Any, q: Any, k: Any, v: Any) -> Any:
        return operation(q, k, v, state=state, layer=0, batch=batch).attention_outputs

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(body, in_specs=specs, out_specs=P("dp"), axis_names={"dp"}, check_vma=False)
        made = jax.jit(mapped)(state, batch, *arrays)
    np.testing.assert_allclose(made, _wanted(cache), atol=2e-6)
