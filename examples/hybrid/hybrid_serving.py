"""A model's step over pages and slots: attention reads and writes pages of keys, recurrences and convolutions slots of states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from hybrid_model import FOLDER, Model
from hybrid_parts import Weights

from attnops import Attention, Declaration, KVCache, RaggedBatch, StateBatch
from attnops.operators.paged_cache import CacheState


class Batch(NamedTuple):
    """A step's tokens int32 [tokens], their positions in their sequences, and where these have their pages and their states."""

    tokens: jax.Array
    positions: jax.Array
    pages: RaggedBatch
    slots: StateBatch


@dataclass(frozen=True, eq=False)
class Steps:
    """A model's layers as steps, by the declarations in the folder `serve` of its folder: attention over pages, and the steps
    over slots by the operations of whole calls. `cache` declares the pages and the slots."""

    model: Model
    cache: KVCache
    attention: Attention
    over_slots: dict[str, Attention]

    @classmethod
    def load(cls, name: str, mesh: jax.sharding.Mesh | None = None, **cache: Any) -> Steps:
        """The steps of a folder's model, on a mesh or on one device. cache: fields that replace those of its cache."""
        model, folder = Model.load(name, mesh=mesh, sequence_parallel="auto"), FOLDER / name / "serve"
        whole = {
            one.declaration.operation for layer in model.layers for one in (layer.recurrence, layer.convolution) if one
        }
        declared = Declaration.load(folder / "attention.json").to_dict()
        attention = Attention(declared | {"cache": declared["cache"] | cache}, mesh=mesh)
        assert attention.declaration.cache is not None
        made = {operation: Attention(folder / f"{operation}.json", mesh=mesh) for operation in whole}
        return cls(model, attention.declaration.cache, attention, made)

    def __call__(
        self, weights: Weights, state: CacheState, batch: Batch, *, max_q_len: int | None = None
    ) -> tuple[jax.Array, CacheState]:
        """Logits float32 [tokens, vocabulary], and the cache with these tokens."""
        past = Served(self, state, batch, max_q_len)
        return self.model(weights, batch.tokens, past), past.state


class Served:
    """The past of each sequence is in its pages and its slot of `state`."""

    def __init__(self, steps: Steps, state: CacheState, batch: Batch, max_q_len: int | None) -> None:
        self.layers, self.positions, self.state = steps.model.layers, batch.positions, state
        self._steps, self._batch, self._longest = steps, batch, max_q_len

    def placed(self, x: jax.Array) -> jax.Array:
        return x

    def attend(self, number: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        found = self._steps.attention(
            query, key, value, state=self.state, layer=number, batch=self._batch.pages, max_q_len=self._longest
        )
        self.state = found.state
        return found.attention_outputs

    def convolve(self, number: int, x: jax.Array, weight: jax.Array, **arrays: jax.Array) -> jax.Array:
        return self._over_slots("convolution", number, x, weight, **arrays)

    def recur(self, number: int, *arrays: jax.Array, **more: jax.Array) -> jax.Array:
        return self._over_slots("state", number, *arrays, **more)

    def _over_slots(self, name: str, number: int, *arrays: jax.Array, **more: jax.Array) -> jax.Array:
        layer, kept = self.layers[number], self.state.states(number)
        attend = layer.convolution if name == "convolution" else layer.recurrence
        step = self._steps.over_slots[attend.declaration.operation]
        found = step(*arrays, **more, state=kept[name], batch=self._batch.slots, max_q_len=self._longest)
        self.state = self.state.with_states(number, kept.replace(**{name: found.state}))
        return found.attention_outputs
