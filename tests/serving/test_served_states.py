"""A layer with a convolution and a recurrence, as two steps or one, served from slots: outputs and states are those of each
sequence alone.

Sequences come and go, share prefixes, fork, reject drafts, are preempted to the host and aborted.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import numpy as np
import pytest

from attnops import KVCache, OperationMetadata, OperationRegistry
from attnops.operators import paged_cache
from attnops.operators.paged_cache import StateBatch
from attnops.serving import PagePools, SlotGrowth

HEADS, KEY, VALUE, WIDTH = 2, 4, 3, 3
CHANNELS = HEADS * (2 * KEY + VALUE)
TOKENS = 16  # of a step's arrays
CACHE = KVCache.from_dict({
    "layers": [{
        "layers": 1, "kind": "state", "drafts": 2, "snapshots": 2, "slots": 20, "states": [
            {"operation": "gla", "sizes": {"heads": HEADS, "head_dim": KEY, "value_dim": VALUE}},
            {"operation": "causal_conv1d", "sizes": {"channels": CHANNELS, "width": WIDTH}},
        ],
    }],
    "dtype": "float32", "page_size": 2, "max_sequences": 4, "max_length": 64,
})  # fmt: skip
SHAPES = {"query": (HEADS, KEY), "key": (HEADS, KEY), "value": (HEADS, VALUE)}
# The same layer with a window for each convolution.
WINDOWS = [
    {"name": f"{name}_conv_window", "sizes": {"history": WIDTH - 1, "heads": heads, "dim": dim}}
    for name, (heads, dim) in SHAPES.items()
]
_group = CACHE.to_dict()["layers"][0]
FUSED = KVCache.from_dict(CACHE.to_dict() | {"layers": [_group | {"states": [_group["states"][0], *WINDOWS]}]})
_random = np.random.default_rng(3)
TABLE = _random.standard_normal((8, CHANNELS)).astype(np.float32)  # what the model projects from each token
WEIGHT = _random.standard_normal((WIDTH, CHANNELS)).astype(np.float32)
DECAY = -np.exp(_random.standard_normal((8, HEADS, KEY)) - 1).astype(np.float32)


def split(x: Any) -> tuple[Any, Any, Any]:
    """Query, key and value from the convolution's channels."""
    parts = x[..., : HEADS * KEY], x[..., HEADS * KEY : 2 * HEADS * KEY], x[..., 2 * HEADS * KEY :]
    query, key, value = (part.reshape(*x.shape[:-1], HEADS, -1) for part in parts)
    return query, key, value


def alone(ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(outputs, state, last tokens) of a sequence by the definition, in float64."""
    x = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), TABLE[list(ids)].astype(np.float64)])
    state, outputs = np.zeros((HEADS, KEY, VALUE)), []
    for position, token in enumerate(ids):
        query, key, value = split((x[position : position + WIDTH] * WEIGHT).sum(0))
        state = state * np.exp(DECAY[token].astype(np.float64))[..., None] + key[..., None] * value[:, None]
        outputs.append(np.einsum("hk,hkv->hv", query, state))
    return np.array(outputs), state, x[len(ids) :]


@functools.partial(jax.jit, donate_argnums=0)
def run(state: Any, batch: Any, x: Any, decay: Any) -> Any:
    convolve, attend = (
        OperationRegistry.create(name, OperationMetadata()) for name in ("ragged_causal_conv1d", "ragged_gla")
    )
    layer = state.states(0)
    mixed = convolve(x, WEIGHT, state=layer["convolution"], batch=batch)
    query, key, value = split(mixed.attention_outputs)
    out = attend(query, key, value, decay=decay, state=layer["state"], batch=batch, scale=1.0)
    return out.attention_outputs, state.with_states(0, layer.replace(state=out.state, convolution=mixed.state))


@functools.partial(jax.jit, donate_argnums=0)
def run_fused(state: Any, batch: Any, x: Any, decay: Any) -> Any:
    attend, layer = OperationRegistry.create("ragged_gla", OperationMetadata()), state.states(0)
    weights = {f"{name}_conv_weight": weight for name, weight in zip(SHAPES, split(WEIGHT), strict=True)}
    out = attend(*split(x), decay=decay, **layer.arrays, **weights, batch=batch, scale=1.0)
    return out.attention_outputs, state.with_states(0, layer.replace(state=out.state, **out.windows))


class Server:
    def __init__(self, fused: bool = False) -> None:
        cache, self.run = (FUSED, run_fused) if fused else (CACHE, run)
        self.plan = cache.plan().require().groups[0]
        self.pools, self.state = PagePools.of(cache.plan()), paged_cache.init(cache)
        self.tokens: dict[int, list[int]] = {}

    def apply(self, growths: tuple[Any, ...]) -> SlotGrowth:
        (growth,) = growths
        if growth.copies:
            self.state = paged_cache.copy(self.state, growth.copies)
        return growth

    def batch(self, names: list[int], q_lens: list[int]) -> StateBatch:
        ((read, write),) = self.pools.slot_tables(names, q_lens)
        return StateBatch.make(
            self.plan.local_slots, cu_q_lens=np.cumsum([0, *q_lens]), kv_lens=self.pools.kv_lens(names), read_slots=read,
            write_slots=write, max_sequences=4, drafts=self.plan.drafts, tokens=TOKENS,
        )  # fmt: skip

    def step(self, new: dict[int, list[int]]) -> None:
        for name, ids in new.items():
            self.apply(self.pools.append(name, ids))
        flat = [token for ids in new.values() for token in ids] + [0] * TOKENS
        batch = self.batch([*new], [len(ids) for ids in new.values()])
        out, self.state = self.run(self.state, batch, TABLE[flat[:TOKENS]], DECAY[flat[:TOKENS]])
        start = 0
        for name, ids in new.items():
            self.tokens[name] += ids
            wanted = alone(tuple(self.tokens[name]))[0][-len(ids) :]
            np.testing.assert_allclose(out[start : start + len(ids)], wanted, rtol=0, atol=1e-4)
            start += len(ids)

    def start(self, name: int, ids: list[int]) -> int:
        matched = self.apply(self.pools.adopt(name, ids[:-1])).matched
        self.tokens[name] = ids[:matched]
        return matched

    def states_hold(self) -> None:
        layer = jax.device_get(self.state.states(0))
        for name, tokens in self.tokens.items():
            for length, slot in self.pools.pools[0].slots_of(name).items():  # type: ignore[union-attr]
                _, state, last = alone(tuple(tokens[:length]))
                np.testing.assert_allclose(layer["state"][slot], state, rtol=0, atol=1e-4)
                if self.run is run:
                    np.testing.assert_allclose(layer["convolution"][slot], last, rtol=0, atol=1e-6)
                else:
                    for name, part in zip(SHAPES, split(last), strict=True):
                        np.testing.assert_allclose(layer[f"{name}_conv_window"][slot], part, rtol=0, atol=1e-6)
        self.pools.check()


@pytest.mark.parametrize(("seed", "fused"), [(0, False), (0, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_each_sequence_is_as_if_alone(seed: int, fused: bool) -> None:
    draw, server, names, matched = random.Random(seed), Server(fused), 0, 0
    head = [draw.randrange(8) for _ in range(8)]
    for turn in range(30):
        if len(server.tokens) < 3:
            prompt = head[: draw.choice((4, 8))] + [draw.randrange(8) for _ in range(2)]
            names += 1
            matched += server.start(names, prompt)
            while len(server.tokens[names]) < len(prompt):
                first = server.pools.tokens_to_snapshot(names)
                done = len(server.tokens[names])
                server.step({names: prompt[done : done + min(first or 9, 4)]})
                server.pools.publish(names)
        here = [*server.tokens]
        server.step({name: [draw.randrange(8) for _ in range(draw.choice((1, 3)))] for name in here})
        for name in here:  # drafts are rejected
            kept = sorted(server.pools.pools[0].slots_of(name))  # type: ignore[union-attr]
            length = draw.choice(kept)
            server.pools.truncate(name, length)
            del server.tokens[name][length:]
        one = draw.choice(here)
        if turn % 5 == 1:
            server.pools.fork(one, -turn)
            server.tokens[-turn] = list(server.tokens[one])
        elif turn % 5 == 3:  # preempted, and restored in another slot
            saved = jax.device_get(paged_cache.extract(server.state, server.batch([one], [0]), 0))
            ids = server.tokens.pop(one)
            server.pools.free(one)
            assert int(saved.length) == len(ids)
            server.apply(server.pools.resume(names + 100 + turn, ids))
            server.tokens[names + 100 + turn] = ids
            back = server.batch([names + 100 + turn], [0])
            server.state = paged_cache.restore(server.state, saved, back, 0)
        elif turn % 5 == 4 or len(here) > 3:
            server.pools.free(one)
            del server.tokens[one]
        server.states_hold()
    assert matched > 0
