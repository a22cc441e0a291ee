"""The device side of serving: compiled steps over a declared cache. The scheduler keeps track of sequences."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops import InputError, KVCache
from attnops.operators.paged_cache import CacheState, RaggedBatch, StateBatch, copy, scrub
from attnops.planning.cache.cache_plan import CachePlan
from attnops.serving import Growth, PagePools, SlotGrowth


class Sampled(NamedTuple):
    """For each wanted position: the token with the largest logit, and its lead."""

    token: jax.Array
    lead: jax.Array


class Choices(NamedTuple):
    """For each row of a step: its next token, and by how much its logit is the largest; the step's tokens including
    padding, and its seconds."""

    tokens: np.ndarray
    leads: np.ndarray
    size: int
    seconds: float


def greedy(logits: jax.Array) -> Sampled:
    """The largest of logits [vocabulary, wanted]."""
    token = jnp.argmax(logits, axis=0).astype(jnp.int32)
    others = jnp.where(jnp.arange(len(logits), dtype=jnp.int32)[:, None] == token[None], -jnp.inf, logits)
    return Sampled(token, logits.max(axis=0) - others.max(axis=0))


class StepEngine:
    """Holds weights and a cache's arrays, and runs steps of a few fixed sizes: by default 1, half of `slots` or `slots` tokens if
    all rows decode, half of `budget` or `budget` tokens if there are prompts among them. Shorter steps are padded.

    step(weights, state, tokens, positions, wanted, *batches, max_q_len=) is the model's: the Sampled of the indices `wanted`,
    and the cache after it. batches: a RaggedBatch or a StateBatch for each group of the cache's layers. few: only the largest
    sizes. placed: arguments of its jit. Errors: InputError for a cache with several pools, and a budget that doesn't have a
    token for each row.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        weights: Any,
        state: CacheState,
        plan: CachePlan,
        *,
        budget: int,
        few: bool = False,
        **placed: Any,
    ) -> None:
        self.cache: KVCache = state.cache
        self.weights, self.state, self.plan, self.budget = weights, state, plan, budget
        if plan.shards != 1:
            raise InputError(f"pages_axis={self.cache.pages_axis!r} makes {plan.shards} pools; this server has one.")
        self.slots = plan.local_sequences
        if budget < self.slots:
            raise InputError(f"budget={budget}; wanted at least {self.slots}, a token for each row.")
        # The programs: tokens per step, and the longest row if it is known to be short.
        decoding, mixed = {1, max(1, self.slots // 2), self.slots}, {max(budget // 2, self.slots), budget}
        if few:
            decoding, mixed = {self.slots}, {budget}
        self.shapes = (*((size, 1) for size in sorted(decoding)), *((size, None) for size in sorted(mixed)))
        self._steps: dict[tuple[int, int | None], Any] = {
            shape: jax.jit(functools.partial(step, max_q_len=shape[1]), donate_argnums=1, **placed)
            for shape in self.shapes
        }
        self._copy, self._scrub = (
            jax.jit(change, donate_argnums=0, static_argnames="group") for change in (copy, scrub)
        )

    def compile(self) -> float:
        """Compile all programs, several at once, and run each without tokens; returns the seconds taken."""
        began = time.perf_counter()

        def compiled(shape: tuple[int, int | None]) -> Any:
            return self._steps[shape].lower(self.weights, self.state, *self._arguments({}, None, shape[0])).compile()

        with ThreadPoolExecutor(len(self.shapes)) as threads:
            self._steps = dict(zip(self.shapes, threads.map(compiled, self.shapes), strict=True))
        for shape in self.shapes:
            self._run(shape, {}, None)
        return time.perf_counter() - began

    def run(self, new: Mapping[Any, Sequence[int]], pool: PagePools) -> Choices:
        """Run one step: `new` has each sequence's new tokens, which the pool has already counted."""
        longest, tokens = max(map(len, new.values())), sum(map(len, new.values()))
        fit = [s for s in self.shapes if s[0] >= tokens and longest <= (s[1] or longest)]
        if not fit:
            raise InputError(f"{tokens} tokens in a step; wanted at most {self.budget}.")
        return self._run(min(fit, key=lambda shape: shape[0]), new, pool)

    def carry_out(self, growths: Sequence[Growth | SlotGrowth]) -> None:
        """Carry out on the device what the pools' answer requires."""
        for group, growth in enumerate(growths):
            if growth.to_scrub:
                self.state = self._scrub(self.state, np.asarray(growth.to_scrub, np.int32), group=group)
            if growth.copies:
                self.state = self._copy(self.state, np.asarray(growth.copies, np.int32), group=group)

    def _run(self, shape: tuple[int, int | None], new: Mapping[Any, Sequence[int]], pool: PagePools | None) -> Choices:
        arguments = self._arguments(new, pool, shape[0])
        began = time.perf_counter()
        sampled, self.state = self._steps[shape](self.weights, self.state, *arguments)
        tokens, leads = np.asarray(sampled.token), np.asarray(sampled.lead)
        return Choices(tokens[: len(new)], leads[: len(new)], shape[0], time.perf_counter() - began)

    def _arguments(self, new: Mapping[Any, Sequence[int]], pool: PagePools | None, size: int) -> tuple[Any, ...]:
        """Token ids, positions, where each row ends, and the batches; padded to `size` tokens and all slots."""
        names, counts = list(new), [len(tokens) for tokens in new.values()]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.zeros(0, np.int32) if pool is None else pool.kv_lens(names)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for name, first, length, count in zip(names, starts, lens, counts, strict=False):
            tokens[first : first + count] = new[name]
            positions[first : first + count] = np.arange(length - count, length)
        wanted = np.zeros(min(size, self.slots), np.int32)
        wanted[: len(names)] = starts[1:] - 1
        step: dict[str, Any] = {"cu_q_lens": starts, "kv_lens": lens, "tokens": size}
        tables = iter(() if pool is None else pool.page_tables(names, self.cache.table_width))
        slots = iter(() if pool is None else pool.slot_tables(names, counts))
        batches = []
        for group in self.plan.groups:
            if isinstance(group, CachePlan):
                table = next(tables, np.zeros((0, 0), np.int32))
                batches.append(RaggedBatch.make(group, page_table=table, **step))
            else:
                read, write = next(slots, (np.zeros(0, np.int32), np.zeros((0, 1), np.int32)))
                rows = {"read_slots": read, "write_slots": write, "max_sequences": self.slots, "drafts": group.drafts}
                batches.append(StateBatch.make(group.local_slots, **rows, **step))
        return tokens, positions, wanted, *batches
