"""select_keys: a step that writes index keys into their pages, and selects the best of them for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from ...sharding.mesh import AnyMesh
from ..paged_cache.attend import check_longest, check_window, check_written
from ..paged_cache.batch import RaggedBatch
from ..paged_cache.by_device import by_device
from ..paged_cache.insert import check_step, insert
from ..paged_cache.layer_arrays import LayerPages
from ..paged_cache.logit_arrays import LogitArrays
from ..paged_cache.paged_call import PagedCall, PagedMethod, PagedSizes
from ..paged_cache.state import CacheState, alone
from .kernel.paged_top_k import PagedSelection, merge_selections, paged_top_k

__all__ = ["SelectedKeys", "index_on_xla", "select_keys"]


class SelectedKeys(NamedTuple):
    """Of the keys of this device: see PagedSelection; once these are all keys, without the order. pages: none, as a selection
    writes nothing."""

    positions: Any
    order: Any = None
    pages: LayerPages | None = None

    @classmethod
    def specs(cls, tokens: Any, heads: Any, pages: Any) -> SelectedKeys:
        """The specs of a result whose tokens are split over these axes."""
        return cls(PartitionSpec(tokens, None), None, pages)

    @classmethod
    def merged(cls, parts: Sequence[SelectedKeys]) -> SelectedKeys:
        """The selection from all keys, from those of parts of them."""
        return cls(merge_selections([PagedSelection(x.positions, x.order) for x in parts]).positions)

    def merged_over(self, axes: tuple[str, ...]) -> SelectedKeys:
        """The same inside a shard_map, from the devices along some axes. Each merges its share of the tokens, and sends what it
        found to the others: gathering all parts everywhere would send more."""
        n, (tokens, k) = lax.axis_size(axes), self.positions.shape
        parts = jnp.stack([self.positions, lax.bitcast_convert_type(self.order, jnp.int32)], axis=1)
        parts = jnp.pad(parts, ((0, -tokens % n), (0, 0), (0, 0))).reshape(n, -1, 2, k)
        mine = lax.all_to_all(parts, axes, 0, 0)
        order = lax.bitcast_convert_type(mine[:, :, 1], jnp.uint32)
        found = self.merged([SelectedKeys(*part) for part in zip(mine[:, :, 0], order, strict=True)])
        return SelectedKeys(lax.all_gather(found.positions, axes, tiled=True)[:tokens])


def index_on_xla(call: PagedCall) -> SelectedKeys:
    """Select with plain XLA; see kernel/paged_top_k.py."""
    assert call.index_weights is not None
    assert call.top_k is not None
    names = "key_pages", "key_scale", "cu_q_lens", "kv_lens", "page_table", "num_seqs", "softmax_scale", "causal"
    arguments = call.kernel_arguments()
    found = paged_top_k(
        call.query,
        weights=call.index_weights,
        **{name: arguments[name] for name in (*names, "sliding_window", "max_q_len")},
        layout=call.layout,
        k=call.top_k,
        platform=call.platform,
        pages_a_block=call.sizes.pages_per_block,
        block_q=call.sizes.queries_per_block,
        page_stride=call.sequence_shards,
        page_shard=call.shard_index,
    )
    return SelectedKeys(*found)


_CHOSEN = PagedSizes()


def select_keys(
    state: CacheState,
    layer: int,
    batch: RaggedBatch,
    index_query: Float[Array, "tokens index_heads dim"],
    index_key: Shaped[Array, "tokens 1 dim"] | None,
    index_weights: Float[Array, "tokens index_heads"],
    *,
    top_k: int,
    softmax_scale: float,
    key_scale: Float[Array, "tokens 1"] | None = None,
    update: Literal["before", "none"] = "before",
    mesh: AnyMesh | None = None,
    kv_heads: Literal["replicate", "error"] = "replicate",
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    max_q_len: int | None = None,
    debug: bool = False,
    method: PagedMethod = index_on_xla,
    platform: str | None = None,
    sizes: PagedSizes = _CHOSEN,
    check_vma: bool = False,
) -> tuple[jax.Array, CacheState]:
    """(positions int32 [tokens, top_k], the state after the step).

    The layer's pages are latents, each one index key. Arguments besides are those of `attend`; so are the errors.
    """
    layer_state = alone(state, layer, batch)
    cache = layer_state.cache
    check_written(update, index_key, None, latent=cache.values_in_keys)
    check_window(cache.window_tokens, sliding_window)
    if index_key is None:
        check_step(layer_state, 0, batch, index_query, debug=debug, writes=False)
    else:
        layer_state = insert(layer_state, 0, batch, index_key, None, key_scale=key_scale, debug=debug)
    check_longest(batch, max_q_len, debug=debug)

    def shard(
        query: Any,
        pages: LayerPages,
        batch: RaggedBatch,
        of_logits: LogitArrays,
        rows: Any,
        index: Any = 0,
        head_start: Any = 0,
    ) -> SelectedKeys:
        call = PagedCall(
            query,
            pages,
            batch,
            None,
            cache.layout,
            cache.value_size,
            softmax_scale,
            causal,
            sliding_window,
            None,
            max_q_len,
            platform,
            sizes,
            layer_state.sequence_shards,
            index,
            index_weights=of_logits.index_weights,
            top_k=top_k,
        )
        selected: SelectedKeys = method(call)
        return selected if layer_state.sequence_shards > 1 else SelectedKeys(selected.positions)

    pages = layer_state.only_pages
    of_logits = LogitArrays(index_weights=jnp.asarray(index_weights))
    found = by_device(
        shard, layer_state, pages, batch, index_query, of_logits, (), None, mesh, kv_heads, check_vma, SelectedKeys
    )
    return found.positions, state.with_layer(layer, pages)
