"""The choice of blocks by MoBA, MSA, Quest and NSA, against loops over queries, heads and blocks in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selection_reference as reference

from attnops import Attention, Blocks, Causal
from attnops.errors import InputError
from attnops.operators.selection.kernel.block_recipes import (
    merge_branches,
    moba_blocks,
    msa_blocks,
    nsa_blocks,
    nsa_compressed,
    positions_of_pages,
    quest_bounds,
    quest_pages,
)
from attnops.operators.selection.kernel.block_sums import block_means

B, Q, KV, HEADS, KV_HEADS, DIM = 2, 70, 75, 4, 2, 8
GROUP = HEADS // KV_HEADS
RNG = np.random.default_rng(17)


def _whole(*shape: int, most: int = 2, dtype: Any = np.float32) -> Any:
    """Whole numbers: float32 has their products exactly, and many are equal."""
    return jnp.asarray(RNG.integers(-most, most + 1, shape), dtype)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("block_kv", "k"), [(8, 1), (8, 3), (16, 2), (16, 9), (128, 2)])
def test_moba(block_kv: int, k: int, dtype: str) -> None:
    query, key = _whole(B, Q, HEADS, DIM, dtype=dtype), _whole(B, KV, KV_HEADS, DIM, dtype=dtype)
    offsets = np.array([0, 5], np.int32)
    got = np.asarray(moba_blocks(query, key, k=k, block_kv=block_kv, query_offset=jnp.asarray(offsets)))
    blocks = -(-KV // block_kv)
    assert got.shape == (B, HEADS, Q, blocks)
    for b, h, i in np.ndindex(B, HEADS, Q):
        own = (i + offsets[b]) // block_kv
        score = np.zeros(blocks)
        for j in range(own):
            score[j] = _wide(query)[b, i, h] @ _wide(key)[b, j * block_kv : (j + 1) * block_kv, h // GROUP].mean(0)
        number = np.arange(blocks)
        wanted = reference.best_blocks(score, number <= own, number == own, k)
        np.testing.assert_array_equal(got[b, h, i], wanted)


@pytest.mark.parametrize("lengths", [None, (75, 20)])
@pytest.mark.parametrize(("k", "init", "local"), [(1, 0, 1), (3, 0, 1), (4, 1, 2), (2, 0, 0), (20, 1, 1)])
def test_msa(k: int, init: int, local: int, lengths: tuple[int, int] | None) -> None:
    block_kv, offset = 8, 5
    query, key = _whole(B, Q, KV_HEADS, DIM), _whole(B, KV, DIM)
    got = msa_blocks(
        query,
        key,
        k=k,
        block_kv=block_kv,
        init_blocks=init,
        local_blocks=local,
        query_offset=offset,
        kv_lengths=None if lengths is None else jnp.asarray(lengths),
    )
    blocks = -(-KV // block_kv)
    for b, h, i in np.ndindex(B, KV_HEADS, Q):
        product = _wide(key)[b] @ _wide(query)[b, i, h]
        seen = (np.arange(KV) <= i + offset) & (np.arange(KV) < (KV if lengths is None else lengths[b]))
        score, allowed = np.zeros(blocks), np.zeros(blocks, bool)
        for j in range(blocks):
            part = slice(j * block_kv, (j + 1) * block_kv)
            allowed[j] = seen[part].any()
            score[j] = product[part][seen[part]].max(initial=-np.inf)
        own, number = (i + offset) // block_kv, np.arange(blocks)
        always = (number < init) | ((number <= own) & (number > own - local))
        np.testing.assert_array_equal(np.asarray(got)[b, h, i], reference.best_blocks(score, allowed, always, k))


def test_msa_a_nan_hides_no_block() -> None:
    key = jnp.asarray([1.0, np.nan, 2.0, 2.0, np.nan, np.nan, 0.0, 0.0])[None, :, None]
    got = msa_blocks(jnp.ones((1, 1, 1, 1)), key, k=2, block_kv=2, local_blocks=0, query_offset=7)
    assert got.tolist() == [[[[True, True, False, False]]]]


@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quest(k: int, dtype: str) -> None:
    page, lengths = 8, np.array([75, 33], np.int32)
    query, key = _whole(B, HEADS, DIM, dtype=dtype), _whole(B, KV, KV_HEADS, DIM, dtype=dtype)
    least, most = quest_bounds(key, page, jnp.asarray(lengths))
    chosen, bounds = quest_pages(query, least, most, jnp.asarray(lengths), k=k, page_size=page)
    pages = -(-KV // page)
    assert chosen.shape == (B, KV_HEADS, 1, pages)
    for b, h in np.ndindex(B, KV_HEADS):
        score = np.zeros(pages)
        for j in range(pages):
            keys = _wide(key)[b, j * page : min((j + 1) * page, lengths[b]), h]
            if not len(keys):
                assert not np.asarray(least, np.float32)[b, j, h].any()
                continue
            low, high = keys.min(0), keys.max(0)
            of_heads = [np.maximum(q * low, q * high).sum() for q in _wide(query)[b, h * GROUP : (h + 1) * GROUP]]
            score[j] = max(of_heads)
            products = _wide(query)[b, h * GROUP : (h + 1) * GROUP] @ keys.T
            assert products.max() <= np.asarray(bounds)[b, h, j]
            assert np.asarray(bounds)[b, h, j] == score[j]
        last, number = (lengths[b] - 1) // page, np.arange(pages)
        wanted = reference.best_blocks(score, number <= last, number == last, k)
        np.testing.assert_array_equal(np.asarray(chosen)[b, h, 0], wanted)


def test_quest_without_keys() -> None:
    key, none = _whole(B, KV, KV_HEADS, DIM), jnp.zeros((B,), np.int32)
    chosen, _ = quest_pages(_whole(B, HEADS, DIM), *quest_bounds(key, 8, none), none, k=2, page_size=8)
    assert not np.asarray(chosen).any()


def test_positions_of_pages() -> None:
    pages = np.array([[2, 0, -1], [1, 4, 3], [-1, -1, -1]], np.int32)
    lengths, size = np.array([21, 33, 8], np.int32), 8
    found = np.asarray(positions_of_pages(jnp.asarray(pages), jnp.asarray(lengths), page_size=size))
    for token, (row, length) in enumerate(zip(pages, lengths, strict=True)):
        wanted = [
            at if at < length else -1 for page in row if page >= 0 for at in range(page * size, (page + 1) * size)
        ]
        assert [at for at in found[token] if at >= 0] == [at for at in wanted if at >= 0]
    beyond = positions_of_pages(jnp.array([[3]]), jnp.array([21]), page_size=size)  # the sequence ends in page 2
    assert np.asarray(beyond).min() >= 21  # which a step refuses
    with pytest.raises(InputError, match="page_size"):
        positions_of_pages(jnp.array([[0]]), jnp.array([21]), page_size=0)


def _compressed_by_definition(query: Any, key: Any, value: Any, length: int, stride: int, block_kv: int) -> Any:
    output, score = np.zeros((B, Q, HEADS, value.shape[3])), np.zeros((B, KV_HEADS, Q, -(-KV // block_kv)))
    for b, i, h in np.ndindex(B, Q, HEADS):
        windows = [c for c in range(key.shape[1]) if c * stride + length - 1 <= i]
        if not windows:
            continue
        weights = np.exp(0.5 * key[b, windows, h // GROUP] @ query[b, i, h])
        weights /= weights.sum()
        output[b, i, h] = weights @ value[b, windows, h // GROUP]
        for c, weight in zip(windows, weights, strict=True):
            for first in range(c * stride, c * stride + length, stride):
                if first // block_kv < score.shape[3]:
                    score[b, h // GROUP, i, first // block_kv] += weight
    return output, score


@pytest.mark.parametrize(("length", "stride", "block_kv"), [(8, 4, 16), (8, 8, 8), (12, 4, 8)])
def test_nsa(length: int, stride: int, block_kv: int) -> None:
    windows = (KV - length) // stride + 1
    query, key = (
        jnp.asarray(RNG.standard_normal(s), np.float32) for s in ((B, Q, HEADS, DIM), (B, windows, KV_HEADS, DIM))
    )
    value = jnp.asarray(RNG.standard_normal((B, windows, KV_HEADS, 6)), np.float32)
    sizes: dict[str, Any] = {"length": length, "stride": stride, "block_kv": block_kv}

    def attend(*x: Any) -> Any:
        return nsa_compressed(*x, **sizes, kv_len=KV, softmax_scale=0.5)

    output, score = attend(query, key, value)
    wanted, wanted_score = _compressed_by_definition(_wide(query), _wide(key), _wide(value), **sizes)
    np.testing.assert_allclose(output, wanted, atol=2e-6)
    np.testing.assert_allclose(score, wanted_score, atol=3e-6)
    assert not np.asarray(output)[:, : length - 1].any()
    chosen = np.asarray(nsa_blocks(score, k=4, block_kv=block_kv))
    number = np.arange(score.shape[3])
    for b, h, i in np.ndindex(B, KV_HEADS, Q):
        own = i // block_kv
        always = (number == 0) | ((number <= own) & (number > own - 2))
        # The scores that were given decide, not those of the reference: they differ by rounding.
        wanted_row = reference.best_blocks(_wide(score)[b, h, i], number <= own, always, 4)
        np.testing.assert_array_equal(chosen[b, h, i], wanted_row)
    grads = jax.grad(lambda *x: (attend(*x)[0] ** 2).sum() + attend(*x)[1].sum(), (0, 1, 2))(query, key, value)
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)
    direction = jax.tree.map(lambda x: RNG.standard_normal(x.shape), (query, key, value))

    def moved(step: float) -> float:
        arrays = [_wide(x) + step * d for x, d in zip((query, key, value), direction, strict=True)]
        return float((_compressed_by_definition(*arrays, **sizes)[0] ** 2).sum())

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(
        sum((_wide(g) * d).sum() for g, d in zip(grads, direction, strict=True)), slope, rtol=1e-5
    )


def test_merge_branches() -> None:
    outputs = [jnp.asarray(RNG.standard_normal((B, 5, HEADS, 6)), np.float32) for _ in range(3)]
    gates = jnp.asarray(RNG.uniform(size=(B, 5, HEADS, 3)), np.float32)
    wanted = sum(_wide(gates)[..., n, None] * _wide(x) for n, x in enumerate(outputs))
    np.testing.assert_allclose(merge_branches(outputs, gates), wanted, atol=1e-6)
    with pytest.raises(InputError, match="gates has shape"):
        merge_branches(outputs[:2], gates)


def test_a_choice_is_a_mask_of_blocks() -> None:
    """The choice of MSA, given to a declared attention as Blocks, against the dense formula of the same choice."""
    query, key = (jnp.asarray(RNG.standard_normal((B, 40, h, DIM)), np.float32) for h in (HEADS, KV_HEADS))
    choice = msa_blocks(_whole(B, 40, KV_HEADS, DIM), _whole(B, 40, DIM), k=2, block_kv=8)
    attention = Attention("vanilla")
    got = attention(query, key, key, mask=Blocks(choice, 1, 8) & Causal(), softmax_scale=0.3).attention_outputs
    seen = np.repeat(np.asarray(choice), 8, 3) & np.tri(40, dtype=bool)
    for h in range(HEADS):
        one = slice(h // GROUP, h // GROUP + 1)
        wanted, _ = reference.attention(
            _wide(query)[:, :, h : h + 1], _wide(key)[:, :, one], _wide(key)[:, :, one], seen[:, h // GROUP], 0.3
        )
        np.testing.assert_allclose(np.asarray(got)[:, :, h], wanted[:, :, 0], atol=2e-6)


def test_means_of_the_keys_that_exist() -> None:
    key, lengths = _whole(B, KV, KV_HEADS, DIM), np.array([75, 20], np.int32)
    got = np.asarray(block_means(key, 16, jnp.asarray(lengths)))
    for b, j in np.ndindex(B, 5):
        keys = _wide(key)[b, j * 16 : min(j * 16 + 16, lengths[b])]
        np.testing.assert_allclose(got[b, j], keys.mean(0) if len(keys) else np.zeros_like(got[b, j]), atol=1e-6)


def test_memory_of_msa() -> None:
    """Scores of 32768 queries, 4 heads and 32768 keys would be 16 GiB; the choice is 32 MiB."""
    shapes = ((1, 32768, 4, 128), (1, 32768, 128))
    arrays = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    compiled = jax.jit(lambda *x: msa_blocks(*x, k=16)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 << 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k: moba_blocks(q, k, k=0, block_kv=8), "k is 0"),
        (lambda q, k: moba_blocks(q, k, k=1, block_kv=8.0), "block_kv is 8.0"),
        (lambda q, k: moba_blocks(q, k[..., :3], k=1, block_kv=8), "key has shape"),
        (lambda q, k: msa_blocks(q, k[:, :, 0], k=2, init_blocks=1, local_blocks=2), "together no more than k"),
        (lambda q, k: quest_bounds(k, 0), "page_size is 0"),
        (
            lambda q, k: nsa_compressed(q, k, k, length=6, stride=4, block_kv=8, kv_len=9, softmax_scale=1.0),
            "multiples of the stride",
        ),
    ],
    ids=["k", "block_kv", "dim", "ends", "page_size", "stride"],
)
def test_wrong_input(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(_whole(B, Q, HEADS, DIM), _whole(B, KV, KV_HEADS, DIM))
