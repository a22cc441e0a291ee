"""What attends for a layer of the tiny decoders: declarations read from a config, with keys as arrays or in a cache's pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tiny_models import LENGTH, ROWS

from attnops import (
    Attention,
    Blocks,
    Causal,
    KVCache,
    LatentAttention,
    ModelDeclaration,
    OperationMetadata,
    OperationRegistry,
)
from attnops.operators.paged_cache import RaggedBatch, init, insert
from attnops.operators.selection import msa_blocks

__all__ = ["DenseCache", "PagedCache"]


class DenseCache:
    """Keys of all positions as arrays [rows, LENGTH, ...], written in place."""

    def __init__(self, read: ModelDeclaration, mesh: Any, latent: dict[str, Any]) -> None:
        self.layers, self.attend = read.layers, []
        for layer in read.layers:
            declared = (layer.latent or layer.declaration).to_dict()
            if layer.latent is None:
                shapes = {key: declared["call"].pop(key) for key in ("q_heads", "kv_heads", "head_dim")}
                assert shapes == {"q_heads": 4, "kv_heads": 2, "head_dim": 8}
                self.attend.append(Attention(declared, mesh=mesh))
                continue
            declared["latent"] |= latent
            self.attend.append(LatentAttention(declared, mesh=mesh))
        self.indexer = OperationRegistry.create("indexer", OperationMetadata(mesh=mesh))

    def init(self) -> Any:
        return {}

    def latent(self, n: int, arrays: Any, made_of: Any, positions: Any, state: Any, place: Any, kept: Any) -> Any:
        q_nope, q_rope, latent, rope_key = (None if x is None else self._rows(x) for x in arrays[:4])
        made_of = {name: x if name == "w_uq" else self._rows(x) for name, x in made_of.items()}
        first = self._first(positions)
        latent, state = self._written(state, f"latent {n}", latent, first)
        rope_key, state = self._written(state, f"rope {n}", rope_key, first)
        given = {} if kept is None else {"mask": kept}
        out = self.attend[n](q_nope, q_rope, latent, rope_key, *arrays[4:], query_offset=first, **given, **made_of)
        return out.attention_outputs, state

    def select(self, n: int, given: Any, positions: Any, state: Any, place: Any) -> Any:
        """bool [rows, 1, q, LENGTH]."""
        query, key, head_weights = (self._rows(x) for x in given)
        key, state = self._written(state, f"index {n}", key, self._first(positions))
        top_k = dict(self.layers[n].indexer)["top_k"]
        found = self.indexer(query, key, head_weights, top_k=top_k, query_offset=self._first(positions)).positions
        kept = found[..., None] == jnp.arange(LENGTH, dtype=jnp.int32)[None, None, None]
        return kept.any(-2)[:, None], state

    def grouped(self, n: int, arrays: Any, positions: Any, state: Any, place: Any, kept: Any) -> Any:
        query, key, value = (self._rows(x) for x in arrays)
        first = self._first(positions)
        key, state = self._written(state, f"key {n}", key, first)
        value, state = self._written(state, f"value {n}", value, first)
        mask = Causal() if kept is None else Causal() & kept
        return self.attend[n](query, key, value, mask=mask, query_offset=first).attention_outputs, state

    def blocks(self, n: int, given: Any, positions: Any, state: Any, place: Any) -> Any:
        query, key = (self._rows(x) for x in given)
        sizes, first = dict(self.layers[n].indexer), self._first(positions)
        key, state = self._written(state, f"index {n}", key, first)
        chosen = msa_blocks(
            query, key, k=sizes["top_blocks"], block_kv=sizes["block_size"], local_blocks=sizes["local_blocks"],
            query_offset=first,
        )  # fmt: skip
        return Blocks(jnp.repeat(chosen, 2, 1), 1, sizes["block_size"]), state

    def _rows(self, x: Any) -> Any:
        return x.reshape(ROWS, -1, *x.shape[1:])

    def _first(self, positions: Any) -> Any:
        return positions.reshape(ROWS, -1)[:, 0]

    def _written(self, state: Any, name: str, x: Any, first: Any) -> Any:
        old = state.get(name, jnp.zeros((ROWS, LENGTH, *x.shape[2:]), x.dtype))
        new = lax.dynamic_update_slice_in_dim(old, x, first[0], 1)
        return new, state | {name: new}


class PagedCache:
    """A KVCache: a group of layers of latents, or of keys and values, and one of index keys.

    A step selects for all of its heads, so a kv head with a choice of blocks of its own is a layer of its own.
    """

    PAGE = 4

    def __init__(self, read: ModelDeclaration, mesh: Any, latent: dict[str, Any]) -> None:
        self.layers, self.mesh = read.layers, mesh
        count = len(read.layers)
        pages = ROWS * LENGTH // self.PAGE
        indexed = [n for n, layer in enumerate(read.layers) if layer.indexer and not layer.kind.endswith("shared")]
        self.layer_of: dict[Any, int] = {}
        groups: list[dict[str, Any]]
        if read.layers[0].latent is None:
            fields: dict[str, Any] = {"kv_heads": 2, "head_dim": 8}
            groups = [{"layers": [0]}, {"layers": [1, 2], "kv_heads": 1}]
            self.layer_of |= {0: 0, (1, 0): 1, (1, 1): 2}
        else:
            fields = {"kind": "latent", "head_dim": 20, "value_dim": 16}
            groups = [{"layers": list(range(count))}]
            self.layer_of |= {n: n for n in range(count)}
        if indexed:
            first, dim = len(self.layer_of), dict(read.layers[indexed[0]].indexer)["head_dim"]
            keys = {"kind": "latent", "kv_heads": 1, "head_dim": dim, "value_dim": dim}
            groups.append({"layers": list(range(first, first + len(indexed))), **keys})
            self.layer_of |= {("index", n): first + at for at, n in enumerate(indexed)}
        if len(groups) == 1:
            fields |= {"layers": count, "pages": pages}
        else:
            fields["layers"] = [group | {"pages": pages} for group in groups]
        shards = {} if mesh is None else {"pages_axis": "dp"}
        self.cache = KVCache(
            **fields, dtype="float32", page_size=self.PAGE, max_sequences=ROWS, max_length=LENGTH, **shards
        )
        self.plan = self.cache.plan(mesh).require()
        self.attend = []
        for layer in read.layers:
            declared = (layer.latent or layer.declaration).to_dict()
            declared = {key: declared[key] for key in ("metadata", "latent") if key in declared} | {
                "operation": "paged"
            }
            if layer.latent is not None:
                declared["latent"] |= latent
            make: Any = Attention if layer.latent is None else LatentAttention
            self.attend.append(make(declared, mesh=mesh))
        self.indexer = OperationRegistry.create("paged_indexer", OperationMetadata(mesh=mesh))

    def init(self) -> Any:
        return init(self.cache, self.mesh)

    def place(self, first: int, count: int) -> tuple[RaggedBatch, ...]:
        """The batch of each group for `count` tokens of every row from position `first` on. Pages of the rows are interleaved."""
        shards = self.plan.shards
        rows, used = ROWS // shards, -(-(first + count) // self.PAGE)

        def batch(part: Any) -> RaggedBatch:
            table = [[page * rows + row for page in range(used)] for row in range(rows)]
            starts = [count * row for row in range(rows + 1)]
            return RaggedBatch.make(part, cu_q_lens=starts, kv_lens=[first + count] * rows, page_table=table)

        parts = self.plan.groups or (self.plan,)
        return tuple(batch(part) if self.mesh is None else RaggedBatch.stack([batch(part)] * shards) for part in parts)

    def _step(self, key: Any, place: Any, state: Any) -> dict[str, Any]:
        layer = self.layer_of[key]
        return {"state": state, "layer": layer, "batch": place[self.cache.group_of(layer)]}

    def latent(self, n: int, arrays: Any, made_of: Any, positions: Any, state: Any, place: Any, kept: Any) -> Any:
        made = self.attend[n](*arrays, **made_of, **self._step(n, place, state), selected=kept)
        return made.attention_outputs, made.state

    def select(self, n: int, given: Any, positions: Any, state: Any, place: Any) -> Any:
        """int32 [tokens, top_k]."""
        top_k = dict(self.layers[n].indexer)["top_k"]
        found = self.indexer(*given, **self._step(("index", n), place, state), top_k=top_k)
        return found.positions, found.state

    def grouped(self, n: int, arrays: Any, positions: Any, state: Any, place: Any, kept: Any) -> Any:
        if kept is None:
            made = self.attend[n](*arrays, **self._step(n, place, state))
            return made.attention_outputs, made.state
        query, key, value = arrays
        outputs = []
        for head in range(key.shape[1]):
            own = query[:, 2 * head : 2 * head + 2], key[:, head : head + 1], value[:, head : head + 1]
            made = self.attend[n](*own, **self._step((n, head), place, state), selected=kept[:, head])
            outputs.append(made.attention_outputs)
            state = made.state
        return jnp.concatenate(outputs, 1), state

    def blocks(self, n: int, given: Any, positions: Any, state: Any, place: Any) -> Any:
        """int32 [tokens, kv_heads, keys]: the positions of the chosen blocks that aren't later than the token."""
        query, key = given
        sizes = dict(self.layers[n].indexer)
        index_keys, state = self._index_keys(n, key, state, place, positions)
        chosen = msa_blocks(
            query[:, None], index_keys, k=sizes["top_blocks"], block_kv=sizes["block_size"], local_blocks=sizes["local_blocks"],
            query_offset=positions,
        )[:, :, 0]  # fmt: skip
        used, numbers = lax.top_k(chosen.astype(jnp.int32), sizes["top_blocks"])
        inside = jnp.arange(sizes["block_size"], dtype=jnp.int32)[None, None, None]
        at = numbers[..., None] * np.int32(sizes["block_size"]) + inside
        at = jnp.where((used[..., None] > 0) & (at <= positions[:, None, None, None]), at, np.int32(-1))
        return at.reshape(*at.shape[:2], -1), state

    def _index_keys(self, n: int, key: Any, state: Any, place: Any, positions: Any) -> Any:
        """[tokens, LENGTH, dim]: the index keys of each token's sequence, gathered from its pages."""
        step = self._step(("index", n), place, state)
        state = insert(step["state"], step["layer"], step["batch"], key[:, None], None)
        pages = state.layers[step["layer"]].key[:, 0]  # tp repeats what has no heads
        shards = self.plan.shards
        table = step["batch"].page_table.reshape(shards, ROWS // shards, -1)

        def of_shard(pages: Any, table: Any) -> Any:
            found = pages[jnp.minimum(table, np.int32(len(pages) - 1))]
            return found.reshape(len(table), LENGTH, -1)[..., : key.shape[-1]]

        rows = jax.vmap(of_shard)(pages.reshape(shards, -1, *pages.shape[1:]), table).reshape(ROWS, LENGTH, -1)
        return jnp.repeat(rows, len(key) // ROWS, 0), state
