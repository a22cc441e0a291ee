"""Which blocks of keys each query attends to: MoBA, MSA, Quest and NSA.

A choice is bool [batch, heads, q_len, kv_blocks]; as a mask it is `Blocks(choice, 1, block_kv)`, to which causality is added. It
is a constant without a gradient. At equal scores the lower block is chosen. No array is as large as the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ....errors import InputError, is_whole, shown
from ...kernels.precision import exact
from ...kernels.primitives import numbers, split_index
from .block_sums import block_extremes, block_means, key_counts
from .checks import check_attention
from .ordering import greatest, ordered
from .row_blocks import block_of, long_enough

__all__ = [
    "merge_branches", "moba_blocks", "msa_blocks", "nsa_blocks", "nsa_compressed", "positions_of_pages", "quest_bounds",
    "quest_pages",
]  # fmt: skip

_ROWS = 64
_FORCED = 0xFFFFFFFF
Offset = int | Int[Array, " batch"]


def moba_blocks(
    query: Float[Array, "batch q_len heads dim"],
    key: Float[Array, "batch kv_len kv_heads dim"],
    *,
    k: int,
    block_kv: int,
    query_offset: Offset = 0,
) -> Bool[Array, "batch heads q_len kv_blocks"]:
    """A query's own block, and the k - 1 earlier ones whose mean key has the greatest product with it.

    Errors: InputError. Source: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025).
    """
    check_attention(query, key)
    _positive(k=k, block_kv=block_kv)
    means = lax.stop_gradient(block_means(key, block_kv))
    heads, kv_heads, blocks = query.shape[2], key.shape[2], means.shape[1]

    def choose(row: Any, positions: Array, part: Array) -> Array:
        grouped = part.reshape(part.shape[0], kv_heads, -1, part.shape[2])
        score = _product("qkgd,ckd->qkgc", grouped, means[row]).reshape(part.shape[0], heads, blocks)
        own = (positions // np.int32(block_kv))[:, None, None]
        number = numbers((1, 1, blocks), 2)
        return _best(score, number <= own, number == own, k)

    return _by_rows(choose, lax.stop_gradient(query), query_offset)


def msa_blocks(
    index_query: Float[Array, "batch q_len kv_heads dim"],
    index_key: Float[Array, "batch kv_len dim"],
    *,
    k: int,
    block_kv: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    query_offset: Offset = 0,
    kv_lengths: Int[Array, " batch"] | None = None,
) -> Bool[Array, "batch kv_heads q_len kv_blocks"]:
    """The k blocks, for each kv head, whose greatest product with the index query is greatest, over keys no later than the query.

    The first `init_blocks` and the last `local_blocks` up to the query's own are always among them. Errors: InputError. Source:
    MiniMax, "MiniMax Sparse Attention" (2026).
    """
    check_attention(index_query, index_key[:, :, None] if index_key.ndim == 3 else index_key)
    _positive(k=k, block_kv=block_kv)
    _fewer(k, init_blocks, local_blocks)
    kv_len = index_key.shape[1]
    blocks = -(-kv_len // block_kv)
    key = lax.stop_gradient(jnp.pad(index_key, ((0, 0), (0, blocks * block_kv - kv_len), (0, 0))))
    lengths = key_counts(kv_lengths, index_key.shape[0], kv_len)

    def choose(row: Any, positions: Array, part: Array) -> Array:
        cols = numbers((1, 1, blocks * block_kv), 2)
        seen = (cols <= positions[:, None, None]) & (cols < lengths[row])
        score = _product("qhd,nd->qhn", part, key[row])
        # A NaN must not hide its block's other keys: order first, then take the greatest.
        order = ordered(score, jnp.broadcast_to(seen, score.shape))
        order = order.reshape(*score.shape[:2], blocks, block_kv).max(-1)
        forced = _ends(positions, blocks, block_kv, init_blocks, local_blocks)
        return _best_of_order(order, forced, k)

    return _by_rows(choose, lax.stop_gradient(index_query), query_offset)


def quest_bounds(
    key: Float[Array, "batch kv_len kv_heads dim"], page_size: int, kv_lengths: Int[Array, " batch"] | None = None
) -> tuple[Float[Array, "batch pages kv_heads dim"], Float[Array, "batch pages kv_heads dim"]]:
    """(least, greatest) of each column over the keys of a page; 0 for a page without keys.

    Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (2024).
    """
    _positive(page_size=page_size)
    return block_extremes(lax.stop_gradient(key), page_size, kv_lengths)


def quest_pages(
    query: Float[Array, "batch heads dim"],
    least: Float[Array, "batch pages kv_heads dim"],
    greatest_: Float[Array, "batch pages kv_heads dim"],
    kv_lengths: Int[Array, " batch"],
    *,
    k: int,
    page_size: int,
) -> tuple[Bool[Array, "batch kv_heads 1 pages"], Float[Array, "batch kv_heads pages"]]:
    """(the k pages for one query with the greatest bounds, these bounds): no product with a key of the page is greater.

    A kv head's bound is the greatest of its query heads'. The last page, that of the newest key, is always among them.
    """
    _positive(k=k, page_size=page_size)
    batch, heads, dim = query.shape
    pages, kv_heads = least.shape[1:3]
    grouped = lax.stop_gradient(query).reshape(batch, kv_heads, heads // kv_heads, dim)
    upper = _product("bkgd,bpkd->bkgp", jnp.maximum(grouped, 0), greatest_)
    bound = (upper + _product("bkgd,bpkd->bkgp", jnp.minimum(grouped, 0), least)).max(2)
    last = (kv_lengths.astype(jnp.int32) - 1)[:, None, None] // np.int32(page_size)
    number = numbers((1, 1, pages), 2)
    seen = (number <= last) & (kv_lengths > 0)[:, None, None]
    return _best(bound, seen, number == last, k)[:, :, None], bound


def nsa_compressed(
    query: Float[Array, "batch q_len heads dim"],
    key: Float[Array, "batch compressed kv_heads dim"],
    value: Float[Array, "batch compressed kv_heads value_dim"],
    *,
    length: int,
    stride: int,
    block_kv: int,
    kv_len: int,
    softmax_scale: float,
    query_offset: Offset = 0,
) -> tuple[Float[Array, "batch q_len heads value_dim"], Float[Array, "batch kv_heads q_len kv_blocks"]]:
    """(output of the compressed branch, scores of the blocks): attention to compressed keys whose last token isn't later.

    key, value: of windows of `length` tokens, one every `stride`, compressed by the model. A block's score sums the weights of
    windows, each as often as it shares a stride with the block, over the query heads of a kv head; it has no gradient. A query
    before the end of the first window has output 0. length and block_kv are multiples of stride. Errors: InputError. Source: Yuan
    et al., "Native Sparse Attention" (2025), equations 7 to 10.
    """
    check_attention(query, key, value=value)
    _positive(length=length, stride=stride, block_kv=block_kv)
    if length % stride or block_kv % stride:
        raise InputError(f"length is {length} and block_kv {block_kv}; wanted multiples of the stride, {stride}.")
    windows, kv_heads = key.shape[1:3]
    blocks = -(-kv_len // block_kv)
    first = np.arange(windows)[:, None] * stride + np.arange(0, length, stride)
    shared = (first[..., None] // block_kv == np.arange(blocks)).sum(1).astype(np.float32)
    ends = np.arange(windows, dtype=np.int32) * stride + length - 1

    def attend(row: Any, positions: Array, part: Array) -> tuple[Array, Array]:
        grouped = part.reshape(part.shape[0], kv_heads, -1, part.shape[2])
        x = _product("qkgd,ckd->qkgc", grouped, key[row]) * softmax_scale
        seen = jnp.broadcast_to((jnp.asarray(ends)[None] <= positions[:, None])[:, None, None], x.shape)
        shift = lax.stop_gradient(jnp.where(seen, x, -jnp.inf).max(-1, keepdims=True))
        weights = jnp.exp(jnp.where(seen, x - jnp.where(shift == -jnp.inf, 0, shift), -jnp.inf))
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        output = _product("qkgc,ckd->qkgd", weights.astype(value.dtype), value[row])
        score = _product("qkgc,cj->qkj", lax.stop_gradient(weights), jnp.asarray(shared))
        return output.reshape(*part.shape[:2], -1).astype(query.dtype), score

    output, score = _mapped(attend, query, query_offset)
    return output, score.swapaxes(1, 2)


def nsa_blocks(
    score: Float[Array, "batch kv_heads q_len kv_blocks"],
    *,
    k: int,
    block_kv: int,
    init_blocks: int = 1,
    local_blocks: int = 2,
    query_offset: Offset = 0,
) -> Bool[Array, "batch kv_heads q_len kv_blocks"]:
    """The k best-scored blocks that begin no later than the query; the first and the last of them always. Errors: InputError.

    Source: Yuan et al., "Native Sparse Attention" (2025), equations 11 and 12.
    """
    _positive(k=k, block_kv=block_kv)
    _fewer(k, init_blocks, local_blocks)
    blocks = score.shape[3]

    def choose(row: Any, positions: Array, part: Array) -> Array:
        seen = numbers((1, 1, blocks), 2) * np.int32(block_kv) <= positions[:, None, None]
        return _best(part, seen, _ends(positions, blocks, block_kv, init_blocks, local_blocks), k)

    return _by_rows(choose, lax.stop_gradient(score).swapaxes(1, 2), query_offset)


def merge_branches(
    outputs: Sequence[Float[Array, "batch q_len heads value_dim"]], gates: Float[Array, "batch q_len heads branches"]
) -> Float[Array, "batch q_len heads value_dim"]:
    """The sum of gate * output over the branches, in float32, in the dtype of the first. Errors: InputError."""
    if not outputs or gates.shape != (*outputs[0].shape[:3], len(outputs)):
        raise InputError(
            f"gates has shape {gates.shape} for {len(outputs)} branches; wanted [batch, q_len, heads, branches]."
        )
    gates = gates.astype(jnp.float32)
    merged = sum(gates[..., n : n + 1] * x.astype(jnp.float32) for n, x in enumerate(outputs))
    return jnp.asarray(merged).astype(outputs[0].dtype)


# -- shared ------------------------------------------------------------------------------------------------------------


def _best(score: Array, seen: Array, forced: Array, k: int) -> Array:
    return _best_of_order(ordered(score.astype(jnp.float32), jnp.broadcast_to(seen, score.shape)), forced, k)


def _best_of_order(order: Array, forced: Array, k: int) -> Array:
    """The k greatest; first of all those that are forced, if they are visible."""
    forced = jnp.broadcast_to(forced, order.shape) & (order > 0)
    return greatest(jnp.where(forced, jnp.uint32(_FORCED), order), k)


def _ends(positions: Array, blocks: int, block_kv: int, init_blocks: int, local_blocks: int) -> Array:
    """The first blocks, and the last ones up to each query's own: bool [queries, 1, blocks]."""
    own, number = (positions // np.int32(block_kv))[:, None, None], numbers((1, 1, blocks), 2)
    return (number < np.int32(init_blocks)) | ((number <= own) & (number > own - np.int32(local_blocks)))


def _mapped(function: Callable[[Any, Array, Array], Any], x: Array, query_offset: Offset) -> Any:
    """function(row of the batch, positions, queries), block by block of x [batch, q_len, ...]; its results as whole arrays."""
    batch, q_len = x.shape[:2]
    size = max(1, min(_ROWS, q_len))
    blocks, x = -(-q_len // size), long_enough(x, size)
    offsets = jnp.broadcast_to(jnp.asarray(query_offset, jnp.int32).reshape(-1), (batch,))

    def part(n: Array) -> Any:
        row, block = split_index(n, blocks, batch)
        return function(row, numbers((size,), 0, block * size) + offsets[row], block_of(x, row, block, size))

    found = lax.map(part, numbers((batch * blocks,), 0))
    return jax.tree.map(lambda y: y.reshape(batch, blocks * size, *y.shape[2:])[:, :q_len], found)


def _by_rows(function: Callable[[Any, Array, Array], Array], x: Array, query_offset: Offset) -> Array:
    chosen: Array = _mapped(function, x, query_offset).swapaxes(1, 2)
    return chosen


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b.astype(a.dtype), precision=exact(a.dtype), preferred_element_type=jnp.float32)


def _positive(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not is_whole(size, 1):
            raise InputError(f"{name} is {shown(size)}; wanted an int of at least 1.")


def _fewer(k: int, init_blocks: int, local_blocks: int) -> None:
    if not is_whole(init_blocks, 0) or not is_whole(local_blocks, 0) or init_blocks + local_blocks > k:
        got = f"init_blocks is {shown(init_blocks)} and local_blocks {shown(local_blocks)}"
        raise InputError(f"{got}; wanted ints >= 0, together no more than k, {k}: these blocks are among the k.")


def positions_of_pages(
    pages: Int[Array, "tokens n"], kv_lengths: Int[Array, " tokens"], *, page_size: int
) -> Int[Array, "tokens n*page_size"]:
    """The positions of the keys in some of a sequence's pages, as a step over pages takes them in `selected=`.

    pages: the places of pages in their sequence, from 0 up, -1 for none. kv_lengths: the keys of each token's sequence; of its
    last page only these are named. A page that the sequence doesn't have gives positions beyond it, which the step refuses where
    it knows them.
    """
    _positive(page_size=page_size)
    first = pages[..., None].astype(jnp.int32) * np.int32(page_size)
    at = first + jnp.arange(page_size, dtype=jnp.int32)[None, None]
    last_page = (kv_lengths.astype(jnp.int32)[:, None, None] - 1) // np.int32(page_size)
    unwritten = (pages[..., None] == last_page) & (at >= kv_lengths.astype(jnp.int32)[:, None, None])
    at = jnp.where((pages[..., None] < 0) | unwritten, -1, at)
    return at.reshape(pages.shape[0], -1)
