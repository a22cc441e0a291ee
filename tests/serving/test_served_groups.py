"""Window, chunks, shared prefixes and released pages together: a small model served in steps is the model on whole sequences."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import OperationMetadata, OperationRegistry
from attnops.errors import CapacityError
from attnops.operators.paged_cache import CacheState, RaggedBatch, copy, init, shardings
from attnops.planning.cache.kv_cache import KVCache, layer_groups
from attnops.serving import PagePools
from attnops.verify import reference_attention

WINDOWS = (6, None, 6, 11)
WIDTH, HEADS, KV_HEADS, DIM = 16, 4, 2, 8
TOKENS, ROWS, WORDS, LONGEST = 12, 4, 7, 44
CACHE = KVCache(
    layers=tuple(
        group.model_copy(update={"pages": pages}) for group, pages in zip(layer_groups(WINDOWS), (12, 20, 16), strict=True)
    ),
    kv_heads=KV_HEADS,
    head_dim=DIM,
    dtype="float32",
    page_size=4,
    max_sequences=ROWS,
    max_length=LONGEST,
    max_tokens=TOKENS,
    page_sequence_axis="sp",
)  # fmt: skip


class Weights(NamedTuple):
    """Of a layer: [width, heads, dim] of query, key and value, and [heads, dim, width] back."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    back: np.ndarray


def _weights() -> tuple[np.ndarray, list[Weights]]:
    draw = np.random.default_rng(7).standard_normal
    layers = [
        Weights(
            *(draw((WIDTH, heads, DIM)) / 4 for heads in (HEADS, KV_HEADS, KV_HEADS)), draw((HEADS, DIM, WIDTH)) / 4
        )
        for _ in WINDOWS
    ]
    return draw((WORDS, WIDTH)), layers


WORD_ROWS, LAYERS = _weights()


def alone(tokens: tuple[int, ...]) -> np.ndarray:
    """float64 [tokens, width]: the model on a whole sequence, with dense masks."""
    x = WORD_ROWS[list(tokens)]
    behind = np.arange(len(tokens))[:, None] - np.arange(len(tokens))[None]
    for w, window in zip(LAYERS, WINDOWS, strict=True):
        query, key, value = (np.einsum("tw,whd->thd", x, part)[None] for part in w[:3])
        mask = (behind >= 0) & (behind < (window or len(tokens)))
        seen = reference_attention(query, key, value, mask=mask[None, None], scale=DIM**-0.5).output[0]
        x = np.tanh(x + np.einsum("thd,hdw->tw", seen, w.back))
    return x


class Model:
    """The same over pages, compiled once: (state, a batch of each group, tokens [TOKENS]) to (outputs, state)."""

    def __init__(self, axes: dict[str, int], layout: str, config: dict[str, Any]) -> None:
        self.mesh, self.cache = None, KVCache.from_dict(CACHE.to_dict() | {"layout": layout})
        if axes:
            devices = np.asarray(jax.devices()[: int(np.prod([*axes.values()]))])
            self.mesh = jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
        paged = OperationRegistry.create(
            "paged", OperationMetadata(mesh=self.mesh, operation_configs={"paged": config})
        )
        self.plan = self.cache.plan(self.mesh).require()

        def step(state: CacheState, batches: tuple[RaggedBatch, ...], tokens: Any) -> Any:
            x = jnp.asarray(WORD_ROWS, jnp.float32)[tokens]
            for number, (w, window) in enumerate(zip(LAYERS, WINDOWS, strict=True)):
                q, k, v = (jnp.einsum("tw,whd->thd", x, jnp.asarray(part, jnp.float32)) for part in w[:3])
                call: dict[str, Any] = {} if window is None else {"sliding_window": (window - 1, 0)}
                batch = batches[CACHE.group_of(number)]
                out = paged(q, k, v, state=state, layer=number, batch=batch, **call)
                state = out.state
                x = jnp.tanh(x + jnp.einsum("thd,hdw->tw", out.attention_outputs, jnp.asarray(w.back, jnp.float32)))
            return x, state

        self.step = jax.jit(step, donate_argnums=0)
        self.copy = jax.jit(copy, donate_argnums=0, static_argnames="group")

        def spoil(state: CacheState, free: tuple[Any, ...]) -> CacheState:
            """NaN in all pages of nobody, by group; ids of page g stand at g % n * (pages / n) + g // n."""
            for group, pages in enumerate(free):
                own = state.group(group)
                bad = lambda x, pages=pages: jnp.where(pages[:, None, None, None], jnp.nan, x)  # noqa: E731
                state = state.with_group(group, jax.tree.map(bad, own))
            return state

        self.spoil = jax.jit(spoil, donate_argnums=0)


WAYS: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "plain": ({}, "split", {}),
    "tp": ({"tp": 2}, "heads", {}),
    "sp": ({"sp": 2}, "split", {}),
    "kernel": ({}, "joined", {"interpret": True}),  # the TPU's
}


@functools.lru_cache
def model(way: str) -> Model:
    """Compiled once for all tests."""
    return Model(*WAYS[way])


class Server:
    """Requests come, share prefixes, are prefilled in chunks, decode, fork, are cut and end; every output is compared."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.draw = model, random.Random(seed)
        self.state = init(model.cache, model.mesh)
        self.pools = PagePools.of(model.plan)
        self.tokens: dict[int, tuple[int, ...]] = {}  # of each sequence, those to come among them
        self.names = self.matched = self.released = self.refused = 0
        self.heads = [tuple(self.draw.randrange(WORDS) for _ in range(24)) for _ in range(2)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.come_and_go()
            self.one_step()
            self.pools.check()

    def come_and_go(self) -> None:
        here, what = list(self.tokens), self.draw.random()
        if len(here) < ROWS:
            self.names += 1
            tail = tuple(self.draw.randrange(WORDS) for _ in range(self.draw.randint(1, 16)))
            prompt = self.draw.choice(self.heads)[: self.draw.randint(0, 24)] + tail
            growth = self.pools.adopt(self.names, prompt[:-1])
            self.tokens[self.names] = prompt
            self.matched += growth[0].matched
        elif what < 0.4:
            self.end(self.draw.choice(here))
        elif what < 0.6:
            one = self.draw.choice(here)
            self.end(next(other for other in here if other != one))
            self.names += 1
            self.pools.fork(one, self.names)
            self.tokens[self.names] = self.tokens[one]
        elif what < 0.7:  # a guess that is taken back
            one = self.draw.choice(here)
            length = int(self.pools.kv_lens([one])[0])
            if length + 2 <= LONGEST and self.grow(one, 2):
                self.pools.truncate(one, length)

    def end(self, name: int) -> None:
        self.pools.free(name)
        del self.tokens[name]

    def grow(self, name: int, count: int) -> bool:
        """Room for some tokens whose ids come later; False, and nothing, where there is none."""
        try:
            growths = self.pools.alloc(name, count)
        except CapacityError:
            self.refused += 1
            return False
        for group, growth in enumerate(growths):
            if growth.copies:
                pairs = np.asarray(growth.copies, np.int32)
                self.state = self.model.copy(self.state, pairs, group=group)
        return True

    def one_step(self) -> None:
        left, rows = TOKENS, []
        for name in self.draw.sample(list(self.tokens), len(self.tokens)):
            length = int(self.pools.kv_lens([name])[0])
            if length == len(self.tokens[name]):
                self.tokens[name] += (self.draw.randrange(WORDS),)  # decoding
            count = min(left, len(self.tokens[name]) - length, self.draw.choice((1, 2, 5, 12)))
            if count == 0 or length + count > LONGEST or not self.grow(name, count):
                continue
            self.pools.append(name, self.tokens[name][length : length + count])
            rows.append((name, length, count))
            left -= count
        if not rows:
            return self.end(self.draw.choice(list(self.tokens)))  # full, so one has to go
        names = [name for name, _, _ in rows]
        starts = np.cumsum([0, *(count for _, _, count in rows)])
        tables = self.pools.page_tables(names)
        batches: Any = tuple(
            RaggedBatch.make(own, cu_q_lens=starts, kv_lens=self.pools.kv_lens(names), page_table=table, tokens=TOKENS)
            for own, table in zip(self.model.plan.groups, tables, strict=True)
        )
        if self.model.mesh is not None:
            batches = jax.device_put(batches, shardings(self.model.cache, self.model.mesh).batch)
        tokens = np.zeros(TOKENS, np.int32)
        for (name, length, count), start in zip(rows, starts, strict=False):
            tokens[start : start + count] = self.tokens[name][length : length + count]
        self.state = self.model.spoil(self.state, tuple(map(self.nobodys, self.pools.pools)))
        output, self.state = self.model.step(self.state, batches, tokens)
        output = np.asarray(output, np.float64)
        for (name, length, count), start in zip(rows, starts, strict=False):
            want = alone(self.tokens[name][: length + count])[length:]
            np.testing.assert_allclose(output[start : start + count], want, rtol=0, atol=2e-5)
        for name in names:
            self.pools.publish(name)
            self.released += sum(self.pools.release(name))

    @staticmethod
    def nobodys(pool: Any) -> np.ndarray:
        """Of each place in an array of pages: whether its page is neither used nor kept for its prefix."""
        free = np.ones(pool.pages, bool)
        free[[*pool._owners.references, *pool._index.content]] = False
        return free.reshape(-1, pool.sequence_shards).T.reshape(-1)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32))
def test_served_together_is_one_at_a_time(seed: int) -> None:
    Server(model("plain"), seed).run(20)


def test_prefixes_are_shared_and_pages_released_on_the_way() -> None:
    """That the property above is about something."""
    server = Server(model("plain"), 1)
    server.run(150)
    assert (server.matched > 60, server.released > 100, server.refused > 0) == (True, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_long_runs(way: str) -> None:
    for seed in range(4 if way == "plain" else 1):
        Server(model(way), seed).run(300 if way == "plain" else 60)
