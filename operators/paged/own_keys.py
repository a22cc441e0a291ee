"""A step of rows of one token over a device's share of each sequence's pages, as a step over whole sequences.

Page number p of a sequence is on device p % n. Only a sequence's last page may be part full, so the keys that a device has lie
one after the other in its own pages, as those of a shorter sequence do. A row's one token is the last of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ConfigError
from ...masks.page_mask import ANY_PAGE_MASK, page_mask
from ...planning.paged.paged_problem import PagedProblem
from ..kernels.pages.page_layout import page_shape
from ..paged_cache.paged_call import Attended, PagedCall

__all__ = ["beyond_own_keys", "of_own_keys", "on_own_keys", "own_lengths", "with_own_lengths"]


def own_lengths(lengths: jax.Array, page: int, devices: int, device: jax.Array | int) -> jax.Array:
    """int32 [rows]: how many of the first so many keys of each sequence a device has."""
    size, count = np.int32(page), np.int32(devices)
    full, rest = lengths // size, lengths % size
    own = (full + count - np.int32(1) - device) // count
    return own * size + jnp.where(full % count == device, rest, np.int32(0))


def with_own_lengths(call: PagedCall) -> tuple[PagedCall, jax.Array]:
    """(the call over this device's keys alone; bool [tokens], whether it has none of a token's row)."""
    pages, batch = call.pages, call.batch
    shape = page_shape(call.layout, pages.key, pages.value, call.query.shape[2], call.value_dim)
    lengths = own_lengths(batch.kv_lens, shape.page, call.sequence_shards, call.shard_index)
    rows = jnp.searchsorted(batch.cu_q_lens[1:], jnp.arange(call.query.shape[0], dtype=jnp.int32), side="right")
    without_keys = (jnp.take(lengths, rows, mode="clip") == 0) & (rows < batch.num_seqs)
    # A row has at least its own token; what the kernel reads for one without keys is left out afterwards.
    own = replace(batch, kv_lens=jnp.maximum(lengths, np.int32(1)))
    return call._replace(batch=own, sequence_shards=1, shard_index=0, sliding_window=None), without_keys


def of_own_keys(attended: Attended, without_keys: jax.Array, sinks: jax.Array | None) -> Attended:
    """A result with 0 where a device has no keys, and an lse of -inf or the sink."""
    none = -jnp.inf if sinks is None else sinks.astype(attended.lse.dtype)[None]
    lse = jnp.where(without_keys[:, None], none, attended.lse)
    return Attended(jnp.where(without_keys[:, None, None], 0, attended.output), lse)


def on_own_keys(call: PagedCall, attend: Callable[[PagedCall], Attended]) -> Attended:
    """Attend with a kernel to this device's keys of sequences whose pages are on several. Errors: ConfigError for steps in which
    rows see only a part of these."""
    left = None if call.sliding_window is None else call.sliding_window[0]
    spanned = (call.chunk_size, call.draft_tree, call.spans, call.prefix_lengths, call.rows, left)
    if call.max_q_len != 1 or any(x is not None for x in spanned):
        raise ConfigError(
            f"the pages of a sequence are on {call.sequence_shards} devices; the Hopper kernel then takes rows of one token that "
            "see all keys, with max_q_len=1 and update='before'."
        )
    own, without_keys = with_own_lengths(call)
    return of_own_keys(attend(own), without_keys, call.sinks)


def beyond_own_keys(problem: PagedProblem) -> str:
    """What a step has that needs more than a device's own keys, all of which a row of one token sees; '' for none."""
    mask = page_mask(problem.mask) or ANY_PAGE_MASK
    found = {
        "rows of several tokens, as far as is known": problem.max_q_len != 1,
        "a window": mask.left is not None,
        "chunks": mask.chunk is not None,
    }
    return ", ".join(name for name, there in found.items() if there)
