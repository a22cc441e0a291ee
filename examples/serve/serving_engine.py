"""The device side of serving: a model's compiled steps over its declared cache. The scheduler keeps track of sequences."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from smollm_model import Sampled, Sizes, Weights, fitted, products, step

from attnops import InputError, KVCache
from attnops.operators.paged_cache import RaggedBatch, copy, init, scrub, shardings
from attnops.serving import Growth, PagePool


class Choices(NamedTuple):
    """For each row of a step: its next token, and by how much its logit is the largest; the step's tokens including
    padding, and its seconds."""

    tokens: np.ndarray
    leads: np.ndarray
    size: int
    seconds: float


class Engine:
    """Holds weights and pages, and runs steps of a few fixed sizes: 1, half of `slots` or `slots` tokens if all rows decode,
    half of `budget` or `budget` tokens if there are prompts among them. Shorter steps are padded. `attention` is the declared
    operation, on the mesh of its metadata; `options` are those of each of its calls, such as a sliding window.

    Errors: RefusedError for a cache that its plan refuses, InputError for a cache of another model.
    """

    def __init__(
        self,
        sizes: Sizes,
        weights: Weights,
        cache: KVCache,
        attention: Any,
        *,
        budget: int = 64,
        **options: Any,
    ) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(cache, name) != getattr(sizes, name):
                raise InputError(
                    f"the cache declares {name}={getattr(cache, name)}, but the model has {getattr(sizes, name)}."
                )
        mesh: Mesh | None = attention.metadata.mesh
        kv_heads = attention.metadata.policy.kv_heads
        self.plan = cache.plan(mesh, kv_heads=kv_heads).require()
        if self.plan.shards != 1:
            raise InputError(f"pages_axis={cache.pages_axis!r} makes {self.plan.shards} pools; this server has one.")
        self.slots, self.mesh, self.cache = self.plan.local_sequences, mesh, cache
        if budget < self.slots:
            raise InputError(f"budget={budget}; wanted at least {self.slots}, a token for each row.")
        self.budget = budget
        # The programs: tokens per step, and the longest row if it is known to be short.
        decoding, mixed = {1, max(1, self.slots // 2), self.slots}, {max(budget // 2, self.slots), budget}
        self.shapes = (*((size, 1) for size in sorted(decoding)), *((size, None) for size in sorted(mixed)))
        placed: dict[str, Any] = {}
        axis = None
        if mesh is not None:
            whole, places = NamedSharding(mesh, P()), shardings(cache, mesh, kv_heads=kv_heads)
            axis = places.query.spec[1]
            placed["out_shardings"] = (Sampled(whole, whole), places.state)
        self.weights = fitted(sizes, weights, self.plan.kv_repeat, mesh, axis)
        self.state = init(cache, mesh, kv_heads=kv_heads)
        if mesh is not None:
            own = jax.tree.map(lambda x: x.sharding, self.weights)
            placed["in_shardings"] = (own, places.state, whole, whole, whole, whole)
        self._steps: dict[tuple[int, int | None], Any] = {
            shape: jax.jit(
                functools.partial(step, sizes, functools.partial(attention, **options), max_q_len=shape[1]),
                donate_argnums=1,
                **placed,
            )
            for shape in self.shapes
        }
        self._copy, self._scrub = jax.jit(copy, donate_argnums=0), jax.jit(scrub, donate_argnums=0)

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

    def run(self, new: Mapping[Any, Sequence[int]], pool: PagePool) -> Choices:
        """Run one step: `new` has each sequence's new tokens, which the pool has already counted."""
        longest, tokens = max(map(len, new.values())), sum(map(len, new.values()))
        fit = [s for s in self.shapes if s[0] >= tokens and longest <= (s[1] or longest)]
        if not fit:
            raise InputError(f"{tokens} tokens in a step; wanted at most {self.budget}.")
        return self._run(min(fit, key=lambda shape: shape[0]), new, pool)

    def carry_out(self, growth: Growth) -> None:
        """Carry out on the device what a pool's answer requires."""
        if growth.to_scrub:
            self.state = self._scrub(self.state, np.asarray(growth.to_scrub, np.int32))
        if growth.copies:
            self.state = self._copy(self.state, np.asarray(growth.copies, np.int32))

    def product_seconds(self, tokens: int, repeats: int = 5) -> float:
        """The shortest time of a step's products with the weights alone, for this many tokens."""
        alone, x = jax.jit(products), jnp.ones((self.weights.norm.shape[0], tokens))
        found = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(alone(self.weights, x))
            found.append(time.perf_counter() - began)
        return min(found[1:])

    def _run(self, shape: tuple[int, int | None], new: Mapping[Any, Sequence[int]], pool: PagePool | None) -> Choices:
        arguments = self._arguments(new, pool, shape[0])
        began = time.perf_counter()
        sampled, self.state = self._steps[shape](self.weights, self.state, *arguments)
        tokens, leads = np.asarray(sampled.token), np.asarray(sampled.lead)
        return Choices(tokens[: len(new)], leads[: len(new)], shape[0], time.perf_counter() - began)

    def _arguments(self, new: Mapping[Any, Sequence[int]], pool: PagePool | None, size: int) -> tuple[Any, ...]:
        """Token ids, positions, where each row ends, and the batch; padded to `size` tokens and all slots."""
        names = list(new)
        starts = np.cumsum([0, *map(len, new.values())]).astype(np.int32)
        lens = np.zeros(0, np.int32) if pool is None else pool.kv_lens(names)
        table = np.zeros((0, 0), np.int32) if pool is None else pool.page_table(names, self.cache.table_width)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for name, first, length in zip(names, starts, lens, strict=False):
            count = len(new[name])
            tokens[first : first + count] = new[name]
            positions[first : first + count] = np.arange(length - count, length)
        wanted = np.zeros(min(size, self.slots), np.int32)
        wanted[: len(names)] = starts[1:] - 1
        batch = RaggedBatch.make(self.plan, cu_q_lens=starts, kv_lens=lens, page_table=table, tokens=size)
        return tokens, positions, wanted, batch
