"""Rotary keys that aren't quantised beside quantised latents: steps against float64, bytes, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import ConfigError, KVCache, LatentAttention
from attnops.cli.app import main
from attnops.errors import InputTypeError
from attnops.operators.paged.tpu_kernel import on_tpu
from attnops.operators.paged_cache import RaggedBatch, attend, copy, extract, init, insert, restore, scrub
from attnops.operators.paged_cache.paged_call import PagedSizes
from attnops.planning.notes import has_note
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

HEADS, ROPE, LATENT = 4, 8, 32
FIELDS: dict[str, Any] = {
    "layers": 1, "kind": "latent", "head_dim": LATENT + ROPE, "value_dim": LATENT, "dtype": "float32", "page_size": 4,
    "pages": 16, "max_sequences": 2, "max_length": 32, "quantised": {"dtype": "int8"}, "rope_dtype": "bfloat16",
}  # fmt: skip
RNG = np.random.default_rng(5)
FIXED = 0.03  # a scale for standard normal numbers


def _quantised(latent: np.ndarray, dtype: str, scale: str) -> np.ndarray:
    """The latents as they are read from pages, float64, by the definition."""
    most = {"int8": 127.0, "float8_e4m3fn": 448.0}[dtype]
    factor = np.float32(FIXED) if scale != "token_head" else (np.abs(latent).max(-1, keepdims=True) / np.float32(most))
    x = np.clip(latent / factor, -most, most)
    x = np.round(x) if dtype == "int8" else x.astype(jnp.dtype(dtype))
    return np.asarray(x, np.float64) * factor.astype(np.float64)


def _reference(query: np.ndarray, latent: Any, rope: Any) -> np.ndarray:
    """Causal attention of the last queries, float64: values are the latents."""
    latent, rope = np.asarray(latent, np.float64), np.asarray(rope, np.float64)
    key = np.concatenate([latent, rope], -1)[:, None]
    seen = np.arange(len(key) - len(query), len(key))[:, None] >= np.arange(len(key))
    wide = query.astype(np.float64)
    return reference_attention(wide[None], key[None], latent[None, :, None], mask=seen[None, None], scale=0.2).output[0]


def _tokens(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(query, key)."""
    return tuple(RNG.standard_normal((count, n, LATENT + ROPE)).astype(np.float32) for n in (HEADS, 1))  # type: ignore[return-value]


def _mesh(axes: dict[str, int]) -> jax.sharding.Mesh | None:
    sizes = tuple(axes.values())
    return (
        jax.sharding.Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), tuple(axes))
        if axes
        else None
    )


@pytest.mark.parametrize(
    ("dtype", "scale", "rope_dtype", "axes", "fields"),
    [
        ("int8", "token_head", "bfloat16", {}, {}),
        ("float8_e4m3fn", "head", "float32", {}, {}),
        ("int8", "tensor", "bfloat16", {"tp": 2}, {}),
        ("int8", "token_head", "bfloat16", {"tp": 2}, {"kv_head_axis": None, "page_sequence_axis": "tp"}),
    ],
)
def test_only_latents_are_rounded_to_the_quantised_dtype(
    dtype: str, scale: str, rope_dtype: str, axes: dict[str, int], fields: dict[str, Any]
) -> None:
    mesh = _mesh(axes)
    cache = KVCache(**FIELDS | fields | {"quantised": {"dtype": dtype, "scale": scale}, "rope_dtype": rope_dtype})
    state = init(cache, mesh, **({} if scale == "token_head" else {"key_scale": FIXED}))
    history, plan = _tokens(0)[1], cache.plan(mesh)
    run = jax.jit(lambda state, batch, q, k: attend(state, 0, batch, q, k, softmax_scale=0.2, mesh=mesh))
    for count in (7, 1):
        query, key = _tokens(count)
        history = np.concatenate([history, key])
        length = len(history)
        batch = RaggedBatch.make(
            plan, cu_q_lens=[0, count], kv_lens=[length], page_table=[[6, 3, 2][: -(-length // 4)]]
        )
        found = run(state, batch, query, key)
        state = found.state
        latent, rope = history[:, 0, :LATENT], history[:, 0, LATENT:]
        read = _quantised(latent, dtype, scale)
        wanted = _reference(query, read, rope.astype(jnp.dtype(rope_dtype)))
        np.testing.assert_allclose(found.output, wanted, rtol=0, atol=5e-6)
        # Against exact keys, the error is that of the latents' rounding; rotary keys in bfloat16 add less than a tenth of it.
        exact, of_latents = _reference(query, latent, rope), _reference(query, read, rope)
        error = np.abs(np.asarray(found.output, np.float64) - exact).max()
        assert error < 1.1 * np.abs(of_latents - exact).max() + 1e-6
    pages = state.layers[0]
    assert (str(pages.key.dtype), str(pages.rope.dtype)) == (dtype, rope_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5])
def test_the_tpu_kernel_writes_and_reads_them(count: int) -> None:
    """Fused: a row of one token is written by the kernel."""
    cache = KVCache(**FIELDS)
    query, key = _tokens(9)
    batch = lambda n, m: RaggedBatch.make(cache.plan(), cu_q_lens=[0, m], kv_lens=[n], page_table=[[6, 3, 2]])  # noqa: E731
    before = insert(init(cache), 0, batch(9 - count, 9 - count), key[: 9 - count], None)
    options: Any = {"softmax_scale": 0.2, "max_q_len": count if count == 1 else None}
    options |= {"method": on_tpu, "sizes": PagedSizes(pages_per_block=2, interpret=True), "update": "fused"}
    step = lambda state, batch, q, k: attend(state, 0, batch, q, k, **options)  # noqa: E731
    two = jax.jit(step)(before, batch(9, count), query[-count:], key[-count:])
    read = _quantised(key[:, 0, :LATENT], "int8", "token_head")
    wanted = _reference(query[-count:], read, key[:, 0, LATENT:].astype(jnp.bfloat16))
    np.testing.assert_allclose(two.output, wanted, rtol=0, atol=1e-5)
    whole = insert(init(cache), 0, batch(9, 9), key, None)
    for name in ("key", "rope", "key_scale"):
        written, stored = getattr(two.state.layers[0], name), getattr(whole.layers[0], name)
        np.testing.assert_array_equal(np.asarray(written, np.float32), np.asarray(stored, np.float32))


def test_pages_are_copied_scrubbed_saved_and_selected() -> None:
    cache = KVCache(**FIELDS)
    query, key = _tokens(5)
    make = lambda table: RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[table])  # noqa: E731
    state = insert(init(cache), 0, make([1, 2]), key, None)
    options: Any = {"softmax_scale": 0.2, "update": "none"}
    want = attend(state, 0, make([1, 2]), query, **options).output
    copied = scrub(copy(state, np.asarray([[1, 5], [2, 6]])), np.asarray([1, 2]))
    assert not np.asarray(copied.layers[0].rope[1], np.float32).any()
    np.testing.assert_array_equal(attend(copied, 0, make([5, 6]), query, **options).output, want)
    back = restore(init(cache), extract(state, make([1, 2]), 0), make([9, 0]), 0)
    np.testing.assert_array_equal(attend(back, 0, make([9, 0]), query, **options).output, want)
    every = np.broadcast_to(np.arange(5, dtype=np.int32), (5, 5))
    chosen = attend(state, 0, make([1, 2]), query, **options, selected=every)
    np.testing.assert_allclose(chosen.output, want, rtol=0, atol=1e-6)


def test_a_latent_attention_steps_over_them() -> None:
    sizes = {"heads": HEADS, "nope_dim": 16, "rope_dim": ROPE, "value_dim": 12, "latent_dim": LATENT}
    cache, query = KVCache(**FIELDS), RNG.standard_normal((5, HEADS, 16 + ROPE)).astype(np.float32)
    w_uk, w_uv = (RNG.standard_normal((LATENT, HEADS, n)).astype(np.float32) / 6 for n in (16, 12))
    key = _tokens(5)[1][:, 0]
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
    parts = query[..., :16], query[..., 16:], key[:, :LATENT], key[:, LATENT:]
    found = LatentAttention("paged", **sizes)(
        *parts, w_uk, w_uv, state=init(cache), layer=0, batch=batch, softmax_scale=0.2
    )
    absorbed = np.concatenate([np.einsum("thn,chn->thc", query[..., :16], w_uk), query[..., 16:]], -1)
    read = _quantised(key[:, :LATENT], "int8", "token_head")
    sums = _reference(absorbed, read, key[:, LATENT:].astype(jnp.bfloat16))
    np.testing.assert_allclose(found.attention_outputs, np.einsum("thc,chv->thv", sums, w_uv), rtol=0, atol=5e-6)
    assert "rope_dtype" in found.plan.problem.features


def test_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run --check` holds a step over random pages against the reference, whose keys have a part without a scale."""
    path, file = tmp_path / "step.json", {"operation": "paged", "cache": FIELDS | {"dtype": "bfloat16"}}
    path.write_text(json.dumps(file | {"step": {"q_lens": [1], "kv_lens": [9], "q_heads": 4, "softmax_scale": 0.2}}))
    assert main(["run", str(path), "--check", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["passed"] for check in checks] == [True, True]


def test_bytes_are_told() -> None:
    """DeepSeek V3: 512 bytes of a latent, 64 rotary numbers of 2 bytes in 128 lanes, and 4 of a scale."""
    fields = FIELDS | {"head_dim": 576, "value_dim": 512, "dtype": "bfloat16", "layers": 61, "page_size": 128}
    cache = KVCache(**fields)
    assert KVCache.from_json(cache.to_json()) == cache
    plan = cache.plan(virtual_mesh({"tp": 8}), device_kind="TPU v5e")
    (found,) = (note.values for note in plan.notes if note.code == "cache.rope_apart")
    assert found == {"dtype": "bfloat16", "latent": 512, "rope": 256, "whole": 640}
    slots = 61 * 16 * 128
    assert (plan.bytes_of("kv_pages"), plan.bytes_of("rope_pages")) == (512 * slots, 256 * slots)
    assert plan.to_dict()["bytes_of_pages"] == 768 * slots
    padded = {note.values["name"]: note.values["lanes"] for note in plan.notes if note.code == "cache.padded_row"}
    assert padded == {"a rotary key": 128}
    assert not has_note(KVCache(**fields | {"rope_dtype": None}).plan().notes, "cache.rope_apart")
    # A group of other layers has none; its own latents do.
    groups = [{"layers": 1, "pages": 4}, {"layers": 1, "pages": 4, "kind": "kv", "kv_heads": 2, "head_dim": 64}]
    mixed = KVCache(**{n: x for n, x in fields.items() if n != "pages"} | {"layers": groups}).plan()
    assert [part.cache.rope_size for part in mixed.groups] == [64, 0]


@pytest.mark.parametrize(
    "fields",
    [{"quantised": None}, {"kind": "kv", "kv_heads": 1}, {"rope_dtype": "int8"}, {"rope_dtype": "float8_e4m3fn"}],
)
def test_declarations_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rope_dtype"):
        KVCache.from_dict(FIELDS | fields)


def test_tokens_and_kernels_that_are_refused() -> None:
    cache = KVCache(**FIELDS)
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, 5], kv_lens=[5], page_table=[[1, 2]])
    key = jnp.zeros((5, 1, LATENT + ROPE), jnp.int8)
    with pytest.raises(InputTypeError, match="rotary keys in bfloat16"):
        insert(init(cache), 0, batch, key, None, key_scale=jnp.ones((5, 1)))
    half = KVCache(**FIELDS | {"rope_dtype": "float16"})
    shape = jax.ShapeDtypeStruct
    served = LatentAttention(
        "paged", heads=4, nope_dim=16, rope_dim=ROPE, value_dim=12, latent_dim=LATENT, backend="tpu"
    )
    tokens = (shape(n, jnp.float32) for n in ((1, 4, 16), (1, 4, 8), (1, 32), (1, 8), (32, 4, 16), (32, 4, 12)))
    plan = served.plan(*tokens, cache=half, max_q_len=1)
    assert "paged.rope_dtype" in {reason.code for rejected in plan.rejected for reason in rejected.reasons}
