"""What a batch of known values makes the kernels in Mosaic GPU over pages do: tiles of keys that their loops go through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.page_mask import ANY_PAGE_MASK, page_mask
from ...planning import OperationConfig
from ...planning.paged.paged_problem import PagedProblem
from ..kernels.pages.mosaic.page_rows import OwnKeys, RowTiles, row_keys
from ..kernels.pages.mosaic.page_tiles import PageTiles, StepShape, head_tiles, tokens_of_tile
from ..kernels.pages.mosaic.page_units import FIELDS, chunk_tiles, own_rows, sequence_tiles, units_of
from ..kernels.pages.paged_mask import PagedOptions, packed_tree
from ..kernels.pages.paged_step import Batch
from .mosaic_kernel import MosaicPages

__all__ = ["KernelTiles", "page_visits"]


class KernelTiles(NamedTuple):
    """Tiles that each loop of a kernel goes through in all blocks of threads of a device, in program order: those that every row
    sees whole, the others. warps: of a block, that compute. blocks: of threads with work, each with so much shared memory."""

    loops: tuple[int, int]
    warps: int
    blocks: int
    shared_bytes: int


def page_visits(of: MosaicPages, problem: PagedProblem, config: OperationConfig, batch: Any) -> dict[str, KernelTiles]:
    """Kernel -> its tiles, on the device that has the most."""
    most: dict[str, KernelTiles] = {}
    for shard in _shards(batch):
        found = _of_shard(of, problem, config, shard)
        if sum(sum(x.loops) for x in found.values()) > sum(sum(x.loops) for x in most.values()) or not most:
            most = found
    return most


def _of_shard(of: MosaicPages, problem: PagedProblem, config: OperationConfig, batch: Batch) -> dict[str, KernelTiles]:
    shape, step, found = of.step_shape(problem), of.step_tiles(problem, config), {}
    several = of.several_rows(problem)
    most = 1 if several else problem.max_q_len or 1
    # The first device of those that share the pages of sequences has the most; every page is there.
    width, stride = problem.cache.table_width // problem.sequence_shards, problem.sequence_shards
    own, table = OwnKeys(shape.page, width, stride), jnp.zeros((len(batch.kv_lens), width), jnp.int32)
    alone = (batch.q_lens > 0) & (batch.q_lens <= most)
    decode = sequence_tiles(batch, alone, most)
    found[of.sizing.kernel(False)] = _tiles(
        of, problem, shape, batch, own, table, decode, most, step.decode, step.splits
    )
    if several:
        size = tokens_of_tile(shape.group, step.chunks.block_q)
        chunks, _ = chunk_tiles(batch, batch.q_lens > most, problem.local_tokens, size)
        found[of.sizing.kernel(True)] = _tiles(
            of, problem, shape, batch, own, table, chunks, size, step.chunks, step.chunk_splits
        )
    return found


def _tiles(
    of: MosaicPages,
    problem: PagedProblem,
    shape: StepShape,
    batch: Batch,
    own: OwnKeys,
    table: jax.Array,
    rows: RowTiles,
    tokens: int,
    tiles: PageTiles,
    splits: int,
) -> KernelTiles:
    causal, left, right, chunk = page_mask(problem.mask) or ANY_PAGE_MASK
    options = PagedOptions(
        scale=1.0, causal=causal, left=left, right=right, chunk=chunk, soft_cap=None, max_q_len=problem.max_q_len
    )
    tree = None
    if (declared := problem.operand("draft_tree")) is not None:  # what its drafts see isn't known: a chain
        chain = jnp.tri(declared.shape[1], dtype=bool)[None] & (batch.q_lens <= declared.shape[1])[:, None, None]
        tree = packed_tree(options, chain, batch.kv_lens - batch.q_lens)
    keys = row_keys(options, batch, own, rows, tokens, tree)
    written = own_rows(rows, batch, table, shape.page, 1) if shape.rows else None
    units = units_of(
        rows, keys, table, page=shape.page, pages=1, block_kv=tiles.block_kv, parts=splits, written=written
    )
    by_field = dict(zip(FIELDS, np.asarray(units.table).T, strict=True))
    used = by_field["sequence"] >= 0
    whole = int((by_field["after_full"] - by_field["full"])[used].sum())
    every = int((by_field["end"] - by_field["begin"])[used].sum())
    heads = shape.kv_heads * head_tiles(shape.group, tiles.block_q) * tiles.column_blocks
    shared = sum(of.sizing.shared_bytes(shape, tiles).values())
    loops = whole * heads, (every - whole) * heads
    return KernelTiles(loops, 4 * tiles.consumers, int(used.sum()) * heads, shared)


def _shards(batch: Any) -> Iterator[Batch]:
    """The batch of each shard of the pages."""
    arrays = [np.asarray(x) for x in (batch.cu_q_lens, batch.kv_lens, batch.num_seqs)]
    if arrays[0].ndim == 1:
        arrays = [x[None] for x in arrays]
    for starts, lengths, count in zip(*arrays, strict=True):
        number = int(np.ravel(count)[0])
        used = np.arange(len(lengths)) < number
        q_lens = np.where(used, np.diff(starts), 0).astype(np.int32)
        yield Batch(
            jnp.asarray(np.where(used, starts[:-1], 0), jnp.int32), jnp.asarray(q_lens),
            jnp.asarray(np.where(used, lengths, 0), jnp.int32), jnp.int32(q_lens.sum()),
        )  # fmt: skip
