"""The recorded sequences of the hybrid decoders as rows, and steps that serve them, each joining the others at its time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from hybrid_decoder_probe import NEW, PROMPTS, RECORD

from attnops import PagePool, RaggedBatch, StateBatch
from attnops.operators.paged_cache import init

__all__ = ["LENGTH", "Rows", "recorded", "served_logits"]

LENGTH = max(PROMPTS) + NEW
CHUNK, STAGGER = 12, 3  # tokens of a prompt in a step; steps between the arrivals of two sequences
_RECORD = dict(np.load(RECORD))


class Rows(NamedTuple):
    """tokens [rows, LENGTH] and logits, zeros after each sequence; which positions are in one; the model's weights."""

    tokens: np.ndarray
    logits: np.ndarray
    valid: np.ndarray
    weights: dict[str, np.ndarray]


def recorded(name: str) -> Rows:
    valid = np.arange(LENGTH)[None] < (np.array(PROMPTS) + NEW)[:, None]
    tokens, logits = np.zeros(valid.shape, np.int32), np.zeros((*valid.shape, 96), np.float32)
    tokens[valid], logits[valid] = _RECORD[f"{name}/tokens"], _RECORD[f"{name}/logits"]
    start = f"{name}/weights/"
    weights = {key.removeprefix(start): x.astype(np.float32) for key, x in _RECORD.items() if key.startswith(start)}
    return Rows(tokens, logits, valid, weights)


def served_logits(steps: Any, weights: Any, rows: Rows, mesh: Any = None) -> np.ndarray:
    """Logits of all positions, from steps with the tokens of every sequence that has come: chunks of prompts and single tokens
    together. Row n is on shard n % shards, and its states are in slot n // shards there."""
    from hybrid_serving import Batch

    cache, plan = steps.cache, steps.cache.plan(mesh).require()
    pages, slots = plan.groups
    shards, size = plan.shards, plan.local_sequences * CHUNK
    pools = [
        PagePool(
            pages.local_pages,
            cache.page_size,
            max_pages_per_sequence=pages.table_width,
            sequence_shards=pages.sequence_shards,
        )
        for _ in range(shards)
    ]
    state, found = init(cache, mesh), np.zeros(rows.logits.shape, np.float32)
    run = jax.jit(steps, donate_argnums=1, static_argnames="max_q_len")
    done, lengths = [0] * len(PROMPTS), [prompt + NEW for prompt in PROMPTS]
    time = 0
    while done != lengths:
        new = {
            n: min(CHUNK, PROMPTS[n] - done[n]) if done[n] < PROMPTS[n] else 1
            for n in range(len(PROMPTS))
            if time >= STAGGER * n and done[n] < lengths[n]
        }
        decoding = max(new.values()) == 1
        each = plan.local_sequences if decoding else size
        tokens, positions = np.zeros((2, shards, each), np.int32)
        made, places = [], {}
        for shard in range(shards):
            mine, at = [n for n in new if n % shards == shard], 0
            starts = [0]
            for n in mine:
                if n not in pools[shard]:
                    pools[shard].adopt(n, [])
                pools[shard].append_count(n, new[n])
                span = range(done[n], done[n] + new[n])
                tokens[shard, at : at + new[n]], positions[shard, at : at + new[n]] = rows.tokens[n, span], span
                places[n] = (shard, at)
                at += new[n]
                starts.append(at)
            lens, own = [done[n] + new[n] for n in mine], [n // shards for n in mine]
            table = pools[shard].page_table(mine, pages.table_width)
            made.append((
                RaggedBatch.make(pages, cu_q_lens=starts, kv_lens=lens, page_table=table, tokens=each),
                StateBatch.make(slots.local_slots, cu_q_lens=starts, kv_lens=lens, read_slots=own, write_slots=own,
                                max_sequences=plan.local_sequences, tokens=each),
            ))  # fmt: skip
        batches = [
            kind.stack(of) if cache.pages_axis else of[0]
            for kind, of in zip((RaggedBatch, StateBatch), zip(*made, strict=True), strict=True)
        ]
        batch = Batch(tokens.reshape(-1), positions.reshape(-1), *batches)
        logits, state = run(weights, state, batch, max_q_len=1 if decoding else None)
        logits = np.asarray(logits).reshape(shards, each, -1)
        for n, (shard, at) in places.items():
            found[n, done[n] : done[n] + new[n]] = logits[shard, at : at + new[n]]
            done[n] += new[n]
        time += 1
    return found
