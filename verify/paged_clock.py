"""A step's static cycles: its kernels' schedules for a described TPU, times how often a batch makes each part run.

As in static_clock.py the cycles leave out waits, those for pages among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import ConfigError
from ..operators.kernels.pages.tpu import (
    Geometry,
    Options,
    PageArrays,
    by_pieces,
    paged_attention_tpu,
    several_rows,
)
from ..planning.paged.page_reads import SequenceReads, sequence_reads
from ..planning.paged.paged_problem import PagedProblem
from .static_clock import Region

__all__ = ["LocalStep", "StepCycles", "Visits", "kernels_of_step", "step_visits"]

_DECODE, _CHUNKS, _SELECTED = "attnops_paged_decode", "attnops_paged_chunks", "attnops_paged_selected"


class StepCycles(NamedTuple):
    """Cycles of one of the kernels: for a block of pages that needs no mask and for one that does, and for a unit (some rows of
    one sequence) besides its blocks."""

    whole: int
    masked: int
    unit: int


class Visits(NamedTuple):
    """What a batch makes a kernel do on one device: blocks of pages without and with a mask, and units."""

    whole: int
    masked: int
    units: int

    def cycles(self, of: StepCycles) -> int:
        return self.whole * of.whole + self.masked * of.masked + self.units * of.unit


@dataclass(frozen=True)
class LocalStep:
    """One device's part of a step, to be compiled alone. It can be pickled."""

    geometry: Geometry
    options: Options

    def program(self, fields: Mapping[str, Any], part: str, mesh: Any = None) -> tuple[Any, list[Any]]:
        """(a function of a list of arrays, their shapes). The sizes are those of the options."""
        geometry, options = self.geometry, self.options
        stored = {f"{n}_pages": jax.ShapeDtypeStruct(shape, d) for n, (shape, d) in self._stored().items()}
        scales = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in self._scales().items()}
        shapes: dict[str, Any] = {
            "query": jax.ShapeDtypeStruct((geometry.tokens, geometry.heads, geometry.dim), geometry.dtype),
            "cu_q_lens": jax.ShapeDtypeStruct((geometry.sequences + 1,), jnp.int32),
            "kv_lens": jax.ShapeDtypeStruct((geometry.sequences,), jnp.int32),
            "page_table": jax.ShapeDtypeStruct((geometry.sequences, geometry.width), jnp.int32),
            "num_seqs": jax.ShapeDtypeStruct((1,), jnp.int32),
            **stored, **scales,
        }  # fmt: skip
        if options.sinks:
            shapes["sinks"] = jax.ShapeDtypeStruct((geometry.heads,), jnp.float32)
        if options.drafts:
            drafts = (geometry.sequences, options.drafts, options.drafts)
            shapes["draft_tree"] = jax.ShapeDtypeStruct(drafts, jnp.bool_)
        if geometry.selected:
            shapes["selected"] = jax.ShapeDtypeStruct((geometry.tokens, geometry.selected), jnp.int32)
        if options.stride > 1:
            shapes["page_shard"] = jax.ShapeDtypeStruct((), jnp.int32)
        if options.spans:
            shapes["spans"] = jax.ShapeDtypeStruct((geometry.tokens, 2), jnp.int32)
        if options.writes:
            shapes["rows"] = PageArrays(**{n: self._row(n, stored, scales) for n in geometry.streams()})  # type: ignore[arg-type]
        leaves, tree = jax.tree.flatten(shapes)
        static: dict[str, Any] = {
            "softmax_scale": options.scale, "causal": options.causal, "sliding_window": (options.left, options.right),
            "chunk_size": options.chunk,
            "logits_soft_cap": options.soft_cap, "max_q_len": options.max_q_len, "layout": geometry.layout,
            "value_dim": geometry.value_dim, "pages_per_block": options.pages_per_block, "buffers": options.buffers,
            "queries_per_block": options.queries_per_block, "vmem_limit_bytes": options.vmem_limit_bytes,
            "page_stride": options.stride,
        }  # fmt: skip
        missing: dict[str, Any] = {} if "value_pages" in stored else {"value_pages": None}

        def run(arrays: list[Any]) -> Any:
            return paged_attention_tpu(**jax.tree.unflatten(tree, arrays), **missing, **static)

        return run, leaves

    def read(self, kernel: str, root: Region) -> StepCycles:
        """The cycles of one of the kernels. Errors: ConfigError for another form than theirs."""
        walk = _walk(root)
        paths = [region for region in _outermost(walk) if region.products < walk.products]
        if kernel == _SELECTED:  # a second product of values that aren't all finite
            again = sum(region.cycles for region in paths)
            step = (
                walk.cycles
                - again
                - sum(r.cycles for r in walk.all() if r is not walk and r.is_loop and not r.products)
            )
            return StepCycles(step, step, root.cycles - walk.cycles)
        if len(paths) not in (0, 2):
            raise ConfigError(f"the kernel has {len(paths)} code paths for a block of pages; wanted one or two.")
        within = [region for path in paths for region in path.all()]
        # Loops without products handle the pages of a partial block one by one.
        other_loops = [r for r in walk.all() if r is not walk and r.is_loop and not r.products and r not in within]
        step = walk.cycles - sum(r.cycles for r in (*other_loops, *paths))
        cycles = sorted(step + self._of_heads(path) for path in paths) or [step]
        return StepCycles(cycles[0], cycles[-1], root.cycles - walk.cycles)

    def _of_heads(self, path: Region) -> int:
        """A path's cycles over all kv heads, which are a loop unless a page's heads lie within tiles."""
        if self.geometry.tokens_first:
            return path.cycles
        loops = (region for region in path.all() if region.is_loop and region.products)
        return path.cycles + (self.geometry.kv_heads - 1) * max((loop.cycles for loop in loops), default=0)

    def _stored(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        streams = self.geometry.streams()
        return {n: ((self.geometry.pages, *s), d) for n, (s, d) in streams.items() if n in ("key", "value", "rope")}

    def _scales(self) -> dict[str, tuple[int, ...]]:
        geometry, shapes = self.geometry, {}
        for name, rank in (("key_scale", geometry.key_scale), ("value_scale", geometry.value_scale)):
            if rank == 3:
                shapes[name] = (geometry.pages, *geometry.streams()[name][0])
            elif rank is not None:
                shapes[name] = (geometry.kv_heads,) * rank
        return shapes

    def _row(self, name: str, stored: dict[str, Any], scales: dict[str, Any]) -> jax.ShapeDtypeStruct:
        geometry = self.geometry
        if name in scales:
            return jax.ShapeDtypeStruct((geometry.tokens, geometry.kv_heads), jnp.float32)
        return jax.ShapeDtypeStruct((geometry.tokens, *geometry.row_block(name)), stored[f"{name}_pages"].dtype)


def kernels_of_step(step: LocalStep) -> tuple[str, ...]:
    """The kernels that the step runs."""
    if step.geometry.selected:
        return (_SELECTED,)
    return (_DECODE, _CHUNKS) if several_rows(step.geometry, step.options) else (_DECODE,)


def step_visits(problem: PagedProblem, step: LocalStep, batch: Any) -> dict[str, Visits]:
    """Kernel -> its visits with the step's sizes, on the device that has the most blocks of pages. Each selected key is
    taken to be in a piece of its own, as far as there are so many."""
    by_shard: dict[int, list[SequenceReads]] = {}
    for row in sequence_reads(problem, batch):
        by_shard.setdefault(row.shard, []).append(row)
    largest: dict[str, Visits] = {}
    for rows in by_shard.values():
        for turn in range(step.options.stride):
            found = _device_visits(rows, _Own(step.geometry, step.options, turn))
            if not largest or _blocks(found) > _blocks(largest):
                largest = found
    return largest


@dataclass(frozen=True)
class _Own:
    """One device's part of a step, of those that have the pages of its sequences in turn."""

    geometry: Geometry
    options: Options
    turn: int

    def pages(self, before: int) -> int:
        """How many of the first so many pages of a sequence it has."""
        return (before + self.options.stride - 1 - self.turn) // self.options.stride

    def keys(self, before: int) -> int:
        """How many of the first so many keys."""
        page, turns = self.geometry.page, self.geometry.page * self.options.stride
        return before // turns * page + min(max(before % turns - self.turn * page, 0), page)

    def first_key(self, at: int) -> int:
        """The position of the first key in its page `at` of a sequence."""
        return (at * self.options.stride + self.turn) * self.geometry.page


def _device_visits(rows: list[SequenceReads], own: _Own) -> dict[str, Visits]:
    if own.geometry.selected:
        return {_SELECTED: _total(unit for row in rows for unit in _selecting(row, own))}
    several = several_rows(own.geometry, own.options)
    found = {_DECODE: _total(_decoding(row, own) for row in rows if row.queries == 1 or not several)}
    if several:
        found[_CHUNKS] = _total(unit for row in rows if row.queries > 1 for unit in _chunk(row, own))
    return found


def _blocks(visits: dict[str, Visits]) -> int:
    return sum(counted.whole + counted.masked for counted in visits.values())


def _total(visits: Iterable[Visits]) -> Visits:
    return Visits(*(sum(column) for column in zip((0, 0, 0), *visits, strict=True)))


def _decoding(row: SequenceReads, own: _Own) -> Visits:
    """Its kernel has one path, with a mask."""
    pages = own.pages(row.end_page) - own.pages(row.first_page)
    return Visits(0, -(-pages // own.options.pages_per_block), int(pages > 0))


def _seen(row: SequenceReads, options: Options, first: int, last: int) -> tuple[int, int]:
    """(first key, one past the last) that its queries at the positions first to last see."""
    begin = 0 if options.left is None else max(first - options.left, 0)
    end = row.length if options.reach is None else min(row.length, last + options.reach + 1)
    if options.chunk is not None:
        begin = max(begin, first // options.chunk * options.chunk)
        end = min(end, (last // options.chunk + 1) * options.chunk)
    return begin, end


def _selecting(row: SequenceReads, own: _Own) -> Iterator[Visits]:
    walked, sized = by_pieces(own.geometry, own.options)
    for position in range(row.length - row.queries, row.length):
        begin, end = (own.keys(n) for n in _seen(row, own.options, position, position))
        pieces = -(-end // walked.page) - begin // walked.page if end > begin else 0
        most = min(own.geometry.selected, end - begin, pieces)
        yield Visits(0, -(-most // sized.pages_per_block), int(most > 0))


def _chunk(row: SequenceReads, own: _Own) -> Iterator[Visits]:
    geometry, options = own.geometry, own.options
    page, many, block = geometry.page, options.pages_per_block, options.queries_per_block
    for at in range(0, row.queries, block):
        position = row.length - row.queries + at
        begin, end = _seen(row, options, position, position + min(block, row.queries - at) - 1)
        first, stop = own.pages(begin // page), own.pages(-(-end // page))
        unmasked = 0
        for start in range(first, stop, many):
            place, last = own.first_key(start), own.first_key(start + many - 1) + page - 1
            full = start + many <= stop and last < row.length
            full &= options.reach is None or last <= position + options.reach
            full &= options.left is None or place >= position + options.farthest - options.left
            full &= not options.drafts or last < position
            if options.chunk is not None:
                full &= (position + options.farthest) // options.chunk <= place // options.chunk
                full &= last // options.chunk <= position // options.chunk
            unmasked += full
        yield Visits(unmasked, -(-(stop - first) // many) - unmasked, int(stop > first))


def _outermost(region: Region) -> list[Region]:
    """The outermost regions with products inside one, skipping guards around all of its products."""
    regions = []
    for inner in region.inside:
        if inner.products > 0.75 * region.products and not inner.is_loop:
            return _outermost(inner)
        if inner.products:
            regions.append(inner)
    return regions


def _walk(root: Region) -> Region:
    """The loop over a unit's blocks of pages, the largest within the loop over units.

    In short loops the compiler moves some products to before and after them.
    """
    loops = [r for r in root.all() if r.is_loop and r.products > root.products / 3]
    if len(loops) < 2:
        raise ConfigError("the kernel has no loop over blocks of pages within the loop over units.")
    return sorted(loops, key=lambda r: -r.cycles)[1]
