"""Keys and values that come quantised are stored as they are; rows of a step that writes nothing may share any page."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops import InputError, KVCache, OperationMetadata, OperationRegistry
from attnops.errors import InputTypeError
from attnops.operators.paged_cache import RaggedBatch, init, insert
from attnops.planning.notes import has_note
from attnops.verify.closeness import row_error, row_sizes
from attnops.verify.paged_reference import paged_reference

FIELDS: dict[str, Any] = {
    "layers": 1, "kv_heads": 2, "head_dim": 128, "dtype": "float32", "page_size": 8, "pages": 8, "max_sequences": 3,
    "max_length": 24,
}  # fmt: skip
STARTS, LENS, TABLE = [0, 6, 7], [6, 9], [[5], [3, 6]]
SCALES = ("tensor", "head", "token_head")


def cache_of(dtype: str, scale: str, **fields: Any) -> KVCache:
    return KVCache(**FIELDS | {"quantised": {"dtype": dtype, "scale": scale}} | fields)


def state_of(cache: KVCache, mesh: Any = None) -> Any:
    assert cache.quantised is not None
    fixed = {"tensor": 0.02, "head": [[0.02, 0.05]]}.get(cache.quantised.scale)
    return init(cache, mesh, **({} if fixed is None else {"key_scale": fixed, "value_scale": fixed}))


def batch_of(cache: KVCache, mesh: Any = None) -> RaggedBatch:
    return RaggedBatch.make(cache.plan(mesh), cu_q_lens=STARTS, kv_lens=LENS, page_table=TABLE)


def tokens(dtype: str, scale: str, count: int = 8) -> tuple[dict[str, Any], dict[str, Any]]:
    """({key, value} in the dtype, {key_scale, value_scale}), as a caller would have quantised them."""
    random = np.random.default_rng(4)
    x = {name: 30 * random.standard_normal((count, 2, 128)).astype(np.float32) for name in ("key", "value")}
    stored = {
        name: (np.round(v) if dtype == "int8" else v).clip(-120, 120).astype(jnp.dtype(dtype)) for name, v in x.items()
    }
    own = {f"{name}_scale": random.uniform(0.01, 0.05, (count, 2)).astype(np.float32) for name in x}
    return stored, own if scale == "token_head" else {}


def paged(config: dict[str, Any] | None = None, **metadata: Any) -> Any:
    return OperationRegistry.create("paged", OperationMetadata(operation_configs={"paged": config or {}}, **metadata))


def expected(cache: KVCache, stored: dict[str, Any], own: dict[str, Any]) -> dict[str, np.ndarray]:
    """Pages of keys, values and scales [pages, page, kv_heads, ...] with each token where the batch puts it; 0 elsewhere."""
    found = {name: np.zeros((8, 8, 2, 128), x.dtype) for name, x in stored.items()}
    found |= {name: np.zeros((8, 8, 2), np.float32) for name in own}
    for row, length in enumerate(LENS):
        queries = STARTS[row + 1] - STARTS[row]
        for n in range(queries):
            page, place = divmod(length - queries + n, 8)
            for name, x in (stored | own).items():
                found[name][TABLE[row][page], place] = x[STARTS[row] + n]
    return found


@pytest.mark.parametrize("layout", ["split", "heads", "interleaved", "packed"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_tokens_are_stored_as_they_come(dtype: str, scale: str, layout: str) -> None:
    cache = cache_of(dtype, scale, layout=layout)
    stored, own = tokens(dtype, scale)
    query = np.random.default_rng(1).standard_normal((8, 4, 128)).astype(np.float32)
    step = jax.jit(
        lambda state, query, kv, own: paged()(query, *kv, state=state, layer=0, batch=batch_of(cache), **own)
    )
    out = step(state_of(cache), query, (stored["key"], stored["value"]), own)
    after, want = out.state.layers[0], expected(cache, stored, own)
    key, value = after.key, after.value
    if layout in ("interleaved", "packed"):
        both = key.reshape(8, 8, 4, 128)
        key, value = both[:, :, 0::2], both[:, :, 1::2]
    scales = [after.key_scale, after.value_scale]
    if layout == "heads":
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        scales = [x.swapaxes(1, 2) if x.ndim == 3 else x for x in scales]
    np.testing.assert_array_equal(np.asarray(key).view(np.uint8), want["key"].view(np.uint8))
    np.testing.assert_array_equal(np.asarray(value).view(np.uint8), want["value"].view(np.uint8))
    if own:
        np.testing.assert_array_equal(scales[0], want["key_scale"])
        np.testing.assert_array_equal(scales[1], want["value_scale"])
    made = paged_reference(
        query.astype(np.float64),
        want["key"],
        want["value"],
        cu_q_lens=np.array(STARTS),
        kv_lens=np.array(LENS),
        page_table=np.array([[5, 8], [3, 6]]),
        num_seqs=2,
        softmax_scale=128**-0.5,
        key_scale=want.get("key_scale", np.asarray(scales[0])),
        value_scale=want.get("value_scale", np.asarray(scales[1])),
    )
    assert row_error(out.attention_outputs, made.output, row_sizes(made.output, made.sizes)) <= 4e-6


@pytest.mark.parametrize(
    ("layout", "scale"),
    [
        *(("heads", scale) for scale in SCALES),
        ("packed", "head"),
        pytest.param("interleaved", "token_head", marks=pytest.mark.slow),
    ],
)
def test_the_tpu_kernel_writes_them_too(layout: str, scale: str) -> None:
    """Interpreted: rows of one token, which the kernel writes if the update is 'fused'."""
    cache = cache_of("int8", scale, layout=layout, page_size=32, max_length=64)
    stored, own = tokens("int8", scale, 2)
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 1, 2], kv_lens=[1, 34], page_table=[[5], [3, 6]])
    query = np.random.default_rng(1).standard_normal((2, 4, 128)).astype(np.float32)
    states = []
    for update in ("before", "fused"):
        operation = paged({"interpret": True, "update": update})
        out = operation(
            query, stored["key"], stored["value"], state=state_of(cache), layer=0, batch=batch, max_q_len=1, **own
        )
        assert out.plan.implementation == "paged.forward_tpu"
        states.append((out.attention_outputs, out.state))
    np.testing.assert_array_equal(*(output for output, _ in states))
    jax.tree.map(np.testing.assert_array_equal, *(state for _, state in states))
    first = states[0][1].layers[0].key[5, :, 0] if layout == "heads" else states[0][1].layers[0].key[5, 0]
    both = np.stack([stored[name][0] for name in ("key", "value")], axis=1)  # of each head in turn
    assert (np.asarray(first) == (stored["key"][0] if layout == "heads" else both.reshape(first.shape))).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_heads_that_are_stored_several_times_have_their_scales(kind: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(kind,))
    cache = cache_of("int8", "token_head")
    stored, own = tokens("int8", "token_head")
    query = np.random.default_rng(1).standard_normal((8, 8, 128)).astype(np.float32)
    found = [
        paged(mesh=m)(
            query, stored["key"], stored["value"], state=state_of(cache, m), layer=0, batch=batch_of(cache, m), **own
        )
        for m in (None, mesh)
    ]
    np.testing.assert_allclose(found[0].attention_outputs, found[1].attention_outputs, atol=2e-6)
    one, four = (x.state.layers[0].key_scale for x in found)
    np.testing.assert_array_equal(np.repeat(np.asarray(one), 2, axis=2), four)


def test_a_plan_counts_the_bytes_that_come() -> None:
    cache = cache_of("int8", "token_head")
    stored, own = tokens("int8", "token_head")
    query = jax.ShapeDtypeStruct((8, 4, 128), jnp.float32)
    plan = paged().plan(query, stored["key"], stored["value"], cache=cache, **own)
    sizes = {x.tensor: x.local_bytes for x in plan.tensors}
    assert (sizes["key"], sizes["value"], sizes["query"]) == (8 * 2 * 128, 8 * 2 * 128, 8 * 4 * 128 * 4)
    assert plan.to_dict()["dtypes"]["key"] == "int8"
    assert has_note(plan.notes, "paged.stored_as_given")
    wide = {name: x.astype(np.float32) for name, x in stored.items()}
    plan = paged().plan(query, wide["key"], wide["value"], cache=cache)
    assert {x.tensor: x.local_bytes for x in plan.tensors}["key"] == 8 * 2 * 128 * 4
    assert not has_note(plan.notes, "paged.stored_as_given")


@pytest.mark.parametrize(
    ("fields", "change", "error", "message"),
    [
        (("int8", "token_head"), {"key_scale": None}, InputError, "key_scale is missing"),
        (
            ("int8", "token_head"),
            {"value_scale": np.ones((8, 1), np.float32)},
            InputError,
            r"value_scale has shape \(8, 1\)",
        ),
        (("int8", "token_head"), {"key_scale": np.ones((8, 2), np.int32)}, InputTypeError, "key_scale is int32"),
        (("int8", "tensor"), {"key_scale": np.ones((8, 2), np.float32)}, InputError, "which its state holds"),
        (("int8", "token_head"), {"key": np.ones((8, 2, 128), np.float32)}, InputError, "key doesn't come quantised"),
        (("float8_e5m2", "tensor"), {"key": np.ones((8, 2, 128), np.int8)}, InputTypeError, "stores float8_e5m2"),
        ((None, None), {"key": np.ones((8, 2, 128), np.int8)}, InputTypeError, "the cache is declared float32;"),
    ],
)
def test_what_does_not_fit_is_refused(fields: Any, change: dict[str, Any], error: Any, message: str) -> None:
    dtype, scale = fields
    cache = KVCache(**FIELDS) if dtype is None else cache_of(dtype, scale)
    stored, own = tokens(dtype or "float32", scale)
    given = {name: x for name, x in (stored | own | change).items() if x is not None}
    state = init(cache) if dtype is None else state_of(cache)
    with pytest.raises(error, match=message):
        insert(state, 0, batch_of(cache), **given)
    query = jax.ShapeDtypeStruct((8, 4, 128), jnp.float32)
    with pytest.raises(error, match=message):
        paged().plan(query, cache=cache, **given)


def test_a_scale_without_its_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="key_scale is given without key"):
        paged().plan(
            jax.ShapeDtypeStruct((8, 4, 128), jnp.float32),
            cache=KVCache(**FIELDS),
            update="none",
            key_scale=np.ones((8, 2), np.float32),
        )


def test_a_batch_that_writes_nothing_may_share_every_page() -> None:
    cache = KVCache(**FIELDS)
    shared: dict[str, Any] = {"cu_q_lens": [0, 1, 2], "kv_lens": [12, 12], "page_table": [[3, 6], [3, 6]]}
    with pytest.raises(InputError, match="its tokens go to page 6"):
        RaggedBatch.make(cache.plan(), **shared)
    batch = RaggedBatch.make(cache.plan(), **shared, writes=False)
    random = np.random.default_rng(2)
    key, value = (random.standard_normal((8, 8, 2, 128)).astype(np.float32) for _ in range(2))
    state = init(cache)
    state = state.with_layer(0, state.layers[0]._replace(key=jnp.asarray(key), value=jnp.asarray(value)))
    query = random.standard_normal((2, 4, 128)).astype(np.float32)
    out = paged()(query, state=state, layer=0, batch=batch, update="none")
    want = paged_reference(
        query.astype(np.float64),
        key,
        value,
        **{name: np.array(x) for name, x in shared.items()},
        num_seqs=2,
        softmax_scale=128**-0.5,
    )
    assert row_error(out.attention_outputs, want.output, row_sizes(want.output, want.sizes)) <= 4e-6
    with pytest.raises(InputError, match="its tokens go to page 6"):
        paged()(query, *(np.ones((2, 2, 128), np.float32),) * 2, state=state, layer=0, batch=batch)
    with pytest.raises(InputError, match="kv_len 12 needs 2 pages"):
        RaggedBatch.make(cache.plan(), **shared | {"page_table": [[3], [3]]}, writes=False)
    # With traced values the same checks run on the host, during the step.
    step = jax.jit(lambda batch: paged()(query, state=state, layer=0, batch=batch, update="none", debug=True))
    np.testing.assert_allclose(step(batch).attention_outputs, out.attention_outputs, atol=2e-6)
