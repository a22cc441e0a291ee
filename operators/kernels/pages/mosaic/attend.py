"""Attention of a ragged batch over pages by a kernel in Mosaic GPU: rows of few tokens, and chunks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from .....errors import InputError
from .....masks import Full
from .....page_layouts import LAYOUTS
from .....scores.steps import Function, Steps
from ....mosaic.kernel.distance_tables import by_distance
from ....mosaic.kernel.launch import launch
from ....mosaic.kernel.mosaic_sizes import padded_dim
from ....mosaic.kernel.tile import MosaicLogits
from ...lse import merge_stacked
from ...operands import StaticArgs
from ...varying import alike
from ..page_layout import page_shape
from ..paged import places, with_spans
from ..paged_checks import check_numbers, check_operands, check_spans, check_tree, int32, options_of, refuse_gradient
from ..paged_mask import PagedOptions, packed_tree
from ..paged_step import Batch, PagedOperands, ScoreArrays, batch_of
from .blackwell_pages import BlackwellPages
from .hopper_pages import HopperPages
from .page_block import PagesBlock
from .page_rows import OwnKeys, RowKeys, RowTiles, row_keys
from .page_tile import table_name
from .page_tiles import (
    PageStep,
    PageTiles,
    head_tiles,
    heads_of_tile,
    own_columns,
    rows_stored,
    tokens_of_tile,
    writable,
)  # fmt: skip
from .page_units import chunk_tiles, own_rows, sequence_tiles, units_of

__all__ = ["KERNELS", "PageRows", "paged_attention_mosaic"]

KERNELS: dict[str, type[PagesBlock]] = {kernel.sizing.generation: kernel for kernel in (HopperPages, BlackwellPages)}
"""By generation of GPUs."""


class PageRows(NamedTuple):
    """A layer's pages, or what they hold of each token: [tokens, kv_heads, row], in layouts with one array all of it in `key`, as
    a page has it."""

    key: jax.Array
    value: jax.Array | None = None


@dataclass(frozen=True)
class _Static:
    """Everything known at trace time."""

    options: PagedOptions
    layout: str
    value_dim: int | None
    stride: int
    step: PageStep
    score: Steps | None
    interpret: bool
    kernel: type[PagesBlock]


def paged_attention_mosaic(
    query: Float[Array, "tokens heads dim"],
    key_pages: Shaped[Array, "pages a b c"] | Shaped[Array, "pages page a b c"],
    value_pages: Shaped[Array, "pages a b value_dim"] | None,
    *,
    layout: str = "split",
    value_dim: int | None = None,
    cu_q_lens: Int[Array, " sequences_and_one"],
    kv_lens: Int[Array, " sequences"],
    page_table: Int[Array, "sequences width"],
    num_seqs: Int[Array, ...] | int,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    key_scale: Float[Array, ...] | float | None = None,
    value_scale: Float[Array, ...] | float | None = None,
    draft_tree: Bool[Array, "sequences drafts drafts"] | None = None,
    spans: Int[Array, "tokens 2"] | None = None,
    prefix_lengths: Int[Array, " sequences"] | None = None,
    max_q_len: int | None = None,
    page_stride: int = 1,
    page_shard: Int[Array, ""] | int = 0,
    score: Steps | None = None,
    captures: tuple[Array, ...] = (),
    head_start: Int[Array, ""] | int = 0,
    q_positions: Int[Array, " tokens"] | None = None,
    rows: PageRows | None = None,
    step: PageStep,
    generation: str,
    interpret: bool = False,
) -> tuple[Array, Array, PageRows | None]:
    """Return (output [tokens, heads, value_dim] in the query's dtype, lse float32 [tokens, heads], the pages if `rows` were
    written).

    Semantics and layouts of `paged_attention`; query and pages in bfloat16 or in float16, or pages in int8 or fp8. step: the
    sizes, as the generation's PageSizing has them. rows: each token's key and value as pages store them. For a sequence with
    one token the kernel writes them to their page while it attends, if that is there; no other sequence may have the page. Keys
    of sequences with more tokens are in the pages already. interpret: Pallas' interpreter, which looks for races.

    Errors: InputError or InputTypeError.
    """
    sizes = {"max_q_len": max_q_len, "chunk_size": chunk_size, "page_stride": page_stride}
    check_numbers(softmax_scale, logits_soft_cap, sizes)
    starts, lengths, table, count = (
        int32(name, x)
        for name, x in (
            ("cu_q_lens", cu_q_lens), ("kv_lens", kv_lens), ("page_table", page_table), ("num_seqs", num_seqs),
        )
    )  # fmt: skip
    if LAYOUTS[layout].values_in_keys:  # and so is their scale
        value_scale = key_scale
    given = (None if x is None else jnp.asarray(x) for x in (value_pages, sinks, key_scale, value_scale))
    values, sinks, key_scale, value_scale = given
    operands = PagedOperands(
        jnp.asarray(query), jnp.asarray(key_pages), values, starts, lengths, table, count, sinks, key_scale, value_scale
    )
    if score is not None:
        operands = operands._replace(of_score=ScoreArrays(captures, int32("head_start", head_start)))
    check_operands(operands, layout)
    if q_positions is not None:
        operands = operands._replace(q_positions=int32("q_positions", q_positions))
    check_tree(operands, draft_tree)
    check_spans(operands, spans, prefix_lengths)
    dtype, stored = operands.query.dtype, operands.key_pages.dtype
    if dtype.itemsize != 2 or (stored.itemsize > 1 and stored != dtype):
        raise InputError(
            f"query is {dtype} and key_pages {stored}; wanted both in bfloat16 or float16, or pages in int8 or fp8."
        )
    if (stored.itemsize == 1) != (step.decode.stored > 0):
        raise InputError(f"key_pages is {stored} with sizes {step}; wanted those of its PageSizing for such pages.")
    operands = operands._replace(num_seqs=operands.num_seqs.reshape(()))
    if page_stride > 1:
        operands = operands._replace(shard=int32("page_shard", page_shard))
    options = PagedOptions(**options_of(softmax_scale, causal, sliding_window, logits_soft_cap, max_q_len, chunk_size))
    if draft_tree is not None:
        batch = batch_of(operands)
        tree = packed_tree(options, jnp.asarray(draft_tree), batch.kv_lens - batch.q_lens)
        operands = operands._replace(draft_tree=tree)
    operands = with_spans(operands, spans, prefix_lengths)
    kernel = KERNELS[generation]
    if rows is not None:
        _check_rows(operands, rows, layout, page_stride, step.decode)
    return _attend(_Static(options, layout, value_dim, page_stride, step, score, interpret, kernel), operands, rows)


def _check_rows(operands: PagedOperands, rows: PageRows, layout: str, stride: int, tiles: PageTiles) -> None:
    """Refuse rows that aren't what the pages hold for a token, and what the kernel can't write."""
    tokens, form = len(operands.query), LAYOUTS[layout]
    for name, x, pages in (
        ("key", rows.key, operands.key_pages),
        ("value", rows.value, operands.value_pages),
    ):
        given = None if x is None else (x.shape, str(x.dtype))
        shape = () if pages is None else pages.shape[1:2] + pages.shape[3:] if form.heads_first else pages.shape[2:]
        wanted = None if pages is None else ((tokens, *shape), str(pages.dtype))
        if given != wanted:
            raise InputError(
                f"rows.{name} is {given}; wanted {wanted}, what the pages hold for each token of the query."
            )
    kv_heads = page_shape(layout, operands.key_pages, operands.value_pages, operands.query.shape[2]).kv_heads
    columns = own_columns(form, operands.query.shape[2], _row_sizes(operands))
    size = operands.key_pages.dtype.itemsize
    several = head_tiles(operands.query.shape[1] // kv_heads, tiles.lines) > 1 or tiles.column_blocks > 1
    if stride > 1 or several or not writable(columns, size):
        raise InputError(
            "rows are given, which the kernel doesn't write beside page_stride, for more than "
            f"{tiles.lines} query heads of a kv head or values of {tiles.column_blocks} blocks, or of these sizes: {columns}; "
            "write them before."
        )


def _row_sizes(operands: PagedOperands) -> tuple[int, int]:
    """Numbers of a page's row of keys, and of values."""
    both = operands.key_pages, operands.key_pages if operands.value_pages is None else operands.value_pages
    return both[0].shape[-1], both[1].shape[-1]


def _attend(
    static: _Static, operands: PagedOperands, rows: PageRows | None
) -> tuple[jax.Array, jax.Array, PageRows | None]:
    options, step = static.options, static.step
    operands, rows = alike(_without_gradient((operands, rows)))
    with jax.enable_x64(False):
        batch = batch_of(operands)
        seq, row, real = places(operands, batch)
        runs = _Runs(static, operands, batch, rows)
        most = 1 if options.max_q_len is None else options.max_q_len
        if most > tokens_of_tile(runs.group, step.decode.block_q):
            most = 1
        several = options.max_q_len is None or options.max_q_len > most
        alone = (batch.q_lens > 0) & (batch.q_lens <= most) if several else batch.q_lens > 0
        tiles = sequence_tiles(batch, alone, most)
        made = runs.attend(tiles, step.decode, most, step.splits, chunks=False)
        output, lse = runs.tokens(made, seq, jnp.minimum(row, most - 1))
        if several:
            size = tokens_of_tile(runs.group, step.chunks.block_q)
            tiles, first = chunk_tiles(batch, (batch.q_lens > most), len(operands.query), size)
            made = runs.attend(tiles, step.chunks, size, step.chunk_splits, chunks=True)
            tile = first.at[seq].get(mode="promise_in_bounds") + row // np.int32(size)
            of_chunks = runs.tokens(made, jnp.minimum(tile, len(tiles.tokens) - 1), row % np.int32(size))
            here = alone.at[seq].get(mode="promise_in_bounds")
            output = jnp.where(here[:, None, None], output, of_chunks[0])
            lse = jnp.where(here[:, None], lse, of_chunks[1])
        if options.max_q_len is not None:
            real = real & (row < options.max_q_len)
        after = None if rows is None else PageRows(runs.operands.key_pages, runs.operands.value_pages)
        return jnp.where(real[:, None, None], output, 0), jnp.where(real[:, None], lse, -jnp.inf), after


@jax.custom_jvp
def _without_gradient(arrays: Any) -> Any:
    """The same arrays. Of them, not around the kernel: a call with a rule of its own can't have references inside."""
    return arrays


_without_gradient.defjvp(functools.partial(refuse_gradient, None))


class _Runs:
    """The calls of the kernel for a step. The first writes rows, if there are any; others read the pages after it."""

    def __init__(self, static: _Static, operands: PagedOperands, batch: Batch, rows: PageRows | None) -> None:
        self.options, self.batch, self.static, self.rows, self.score = static.options, batch, static, rows, static.score
        if static.score is not None and operands.of_score is not None:
            self.score, captures = by_distance(static.score, operands.of_score.captures)
            operands = operands._replace(of_score=operands.of_score._replace(captures=captures))
        self.operands = operands
        self.form, heads, dim = LAYOUTS[static.layout], *operands.query.shape[1:]
        shape = page_shape(static.layout, operands.key_pages, operands.value_pages, dim, static.value_dim)
        self.pages, self.page, self.kv_heads = shape.pages, shape.page, shape.kv_heads
        self.value_dim = static.value_dim or (dim if self.form.one_array else shape.value_dim)
        self.group = heads // self.kv_heads
        self.dims = padded_dim(dim), padded_dim(self.value_dim)
        self.first_value = self.form.first_value(dim)
        shard: Any = 0 if operands.shard is None else operands.shard
        self.own = OwnKeys(self.page, operands.page_table.shape[1], static.stride, shard)

    def attend(
        self, tiles: RowTiles, sizes: PageTiles, tokens: int, parts: int, *, chunks: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(output [tiles, heads, tokens, value_dim], lse [tiles, heads, tokens]) of tiles of so many tokens."""
        operands, options, table = self.operands, self.options, self.operands.page_table
        splits = head_tiles(self.group, sizes.block_q)
        each, heads = heads_of_tile(self.group, sizes.block_q), self.kv_heads * splits
        keys = row_keys(options, self.batch, self.own, tiles, tokens, operands.draft_tree, operands.spans)
        written = None if self.rows is None else own_rows(tiles, self.batch, table, self.page, self.pages)
        units = units_of(
            tiles, keys, table, page=self.page, pages=self.pages, block_kv=sizes.block_kv, parts=parts, written=written
        )  # fmt: skip
        stored = rows_stored(self.group, tokens, sizes)
        query = self._queries(tiles, tokens, each, heads)

        def of_rows(x: jax.Array) -> jax.Array:
            """[..., tokens] as [..., rows], each number for all heads of its token."""
            return padded(jnp.repeat(x, each, axis=-1), x.ndim - 1, sizes.block_q)

        def padded(x: jax.Array, axis: int, size: int) -> jax.Array:
            return jnp.pad(x, [(0, size - n if at == axis else 0) for at, n in enumerate(x.shape)])

        inputs = {
            "units": units.table,
            "table": table,
            "low": of_rows(keys.low),
            "high": of_rows(keys.high),
            "query": padded(padded(query, 2, stored), 3, self.dims[0]),
            "key": self.form.tokens_by_head(operands.key_pages),
        }
        if operands.value_pages is not None:
            inputs["value"] = self.form.tokens_by_head(operands.value_pages)
        own: tuple[tuple[int, int], ...] = ()
        if self.rows is not None:
            own = own_columns(self.form, operands.query.shape[2], _row_sizes(operands))
            inputs |= {f"{n}_rows": self._rows(x) for n, x in self.rows._asdict().items() if x is not None}
        inputs |= self._scales(sizes.block_kv)
        if keys.words is not None:
            inputs["words"] = of_rows(keys.words.swapaxes(1, 2))

        def by_heads(x: jax.Array) -> jax.Array:
            """[heads] as [parts of them, rows], each number for all tokens of its head."""
            return jnp.tile(self._by_tile(x, each, heads), (1, -(-sizes.block_q // each)))[:, : sizes.block_q]

        if operands.sinks is not None:
            inputs["sinks"] = by_heads(operands.sinks.astype(jnp.float32))
        if self.score is not None:
            inputs |= {name: by_heads(x) for name, x in self._of_heads(self.score).items()} | self._tables(self.score)
            inputs["positions"] = of_rows(self._positions(tiles, keys))
            if operands.shard is not None:
                inputs["shard"] = jnp.stack([operands.shard.reshape(()), jnp.int32(self.own.stride)])
        no_mask = StaticArgs(Full(), sizes.block_q, sizes.block_kv, 0, 0, 0.0, score=self.score)
        kernel = self.static.kernel(
            sizes,
            MosaicLogits(options.scale, options.soft_cap, no_mask, self.static.interpret),
            self.form,
            self.page,
            self.pages,
            heads,
            splits,
            self.dims,
            self.first_value,
            min(stored, sizes.lines),
            self.form.values_in_keys,
            self.static.interpret,
            operands.key_pages.dtype if sizes.stored else None,
            tuple(name for name in ("key", "value") if f"{name}_scales" in inputs),
            own,
        )
        outputs = {
            "output": ((len(units.table), heads, stored, self.dims[1]), query.dtype),
            "lse": ((len(units.table), heads, stored), jnp.float32),
        }
        name, number = kernel.sizing.kernel(chunks), len(units.table) * heads * sizes.column_blocks
        made = launch(kernel, name, "the kernel over pages", number, inputs, outputs, ("key", "value") if own else ())
        if self.rows is not None:
            self._take(made)
        output, lse = (made[name][:, :, : tokens * each] for name in outputs)
        if parts:
            output, lse = _merged(output, lse, units.begin, units.number, units.most)
        output = output.reshape(-1, self.kv_heads, splits, tokens, each, self.dims[1]).transpose(0, 3, 1, 2, 4, 5)
        lse = lse.reshape(-1, self.kv_heads, splits, tokens, each).transpose(0, 3, 1, 2, 4)
        output = output.reshape(-1, tokens, self.kv_heads, splits * each, self.dims[1])[
            ..., : self.group, : self.value_dim
        ]
        lse = lse.reshape(-1, tokens, self.kv_heads, splits * each)[..., : self.group]
        heads = self.kv_heads * self.group
        return output.reshape(*output.shape[:2], heads, self.value_dim), lse.reshape(*lse.shape[:2], heads)

    def _rows(self, x: jax.Array) -> jax.Array:
        """Tokens' rows as pages of one token each."""
        return self.form.tokens_by_head(jnp.expand_dims(x, 2 if self.form.heads_first else 1))

    def _take(self, after: dict[str, jax.Array]) -> None:
        """Go on with the pages after a call that wrote its rows, which is done then."""
        given, self.rows = self.operands, None
        value = after.get("value", given.value_pages)
        self.operands = given._replace(key_pages=after["key"].reshape(given.key_pages.shape), value_pages=value)

    def _scales(self, block_kv: int) -> dict[str, jax.Array]:
        """Those of quantised pages: for each kv head, or [sequences, kv_heads, keys] for each token, of whole tiles."""
        found: dict[str, jax.Array] = {}
        for name, scale in (("key_scale", self.operands.key_scale), ("value_scale", self.operands.value_scale)):
            if scale is None:
                continue
            scale = scale.astype(np.float32)
            if scale.ndim < 3:
                found[name] = jnp.broadcast_to(scale, (self.kv_heads,))
            elif name == "key_scale" or not self.form.values_in_keys:
                ids = jnp.clip(self.operands.page_table, 0, np.int32(self.pages - 1))
                rows = scale.at[ids].get(mode="promise_in_bounds")
                rows = rows.transpose((0, 2, 1, 3) if self.form.heads_first else (0, 3, 1, 2))
                rows = rows.reshape(*rows.shape[:2], -1)
                found[f"{name}s"] = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % block_kv)))
        return found

    def _of_heads(self, score: Steps) -> dict[str, jax.Array]:
        """What a score reads by query heads, [heads]: its arrays, where a head's numbers begin in a table, and the heads' numbers
        for a function."""
        arrays, heads = self.operands.of_score, self.kv_heads * self.group
        assert arrays is not None
        found: dict[str, jax.Array] = {}
        for n, (x, form) in enumerate(zip(arrays.captures, score.forms, strict=True)):
            if form == "table":
                x = jnp.arange(x.shape[0], dtype=np.int32) * np.int32(x.shape[1])
            found[f"capture{n}"] = jnp.broadcast_to(x.reshape(-1), (heads,))
        if Function.name in score.names:
            found["heads"] = jnp.arange(heads, dtype=np.int32) + arrays.head_start.reshape(())
        return found

    def _tables(self, score: Steps) -> dict[str, jax.Array]:
        """Those of which a score reads a number for each pair, [heads | 1, entries]."""
        arrays = self.operands.of_score
        assert arrays is not None
        forms = enumerate(zip(arrays.captures, score.forms, strict=True))
        return {table_name(f"capture{n}"): x for n, (x, form) in forms if form == "table"}

    def _positions(self, tiles: RowTiles, keys: RowKeys) -> jax.Array:
        """Those by which a score knows the tiles' tokens."""
        if self.operands.q_positions is None:
            return keys.positions
        starts = self.batch.starts.at[tiles.sequence].get(mode="promise_in_bounds")
        token = (starts + tiles.token)[:, None] + jnp.arange(keys.positions.shape[1], dtype=np.int32)[None]
        return self.operands.q_positions.at[token].get(mode="clip")

    def _by_tile(self, x: jax.Array, each: int, heads: int) -> jax.Array:
        """[..., heads] as [..., parts of them, of one], zeros after the last part's own."""
        x = x.reshape(*x.shape[:-1], self.kv_heads, self.group)
        short = heads // self.kv_heads * each - self.group
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, short)]).reshape(*x.shape[:-2], heads, each)

    def _queries(self, tiles: RowTiles, tokens: int, each: int, heads: int) -> jax.Array:
        """[tiles, heads, rows, dim]."""
        starts = self.batch.starts.at[tiles.sequence].get(mode="promise_in_bounds")
        within = tiles.token[:, None] + jnp.arange(tokens, dtype=np.int32)[None]
        query = self.operands.query.at[starts[:, None] + within].get(mode="clip")
        query = self._by_tile(query.swapaxes(-1, -2), each, heads).transpose(0, 3, 1, 4, 2)
        return query.reshape(len(query), heads, tokens * each, -1)

    def tokens(
        self, made: tuple[jax.Array, jax.Array], tile: jax.Array, place: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Results of the tokens at these places of these tiles."""
        output, lse = (x.at[tile, place].get(mode="promise_in_bounds") for x in made)
        return output, lse


def _merged(
    output: jax.Array, lse: jax.Array, begin: jax.Array, count: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Results of tiles from those of their parts."""
    turn = jnp.arange(most, dtype=np.int32)[:, None]
    there = turn < count[None]
    # A part that isn't there stands for the first: what nobody has written may be NaN.
    at = begin[None] + jnp.where(there, turn, 0)
    at = jnp.minimum(at, np.int32(len(lse) - 1))
    shares = jnp.where(there[..., None, None], lse.at[at].get(mode="promise_in_bounds"), -jnp.inf)
    return merge_stacked(output.at[at].get(mode="promise_in_bounds"), shares)
