"""Decode steps over pages of latents, and over selected keys, against the ways to do without: ratios of medians, in one process.

    python benchmarks/latent.py [--json FILE]

The shape is DeepSeek V3's with 16 of its 128 heads, as on one of eight devices: latents of 512 with rotary keys of 64, float32.
Rivals compute the same outputs from the same pages: `expand` gathers the latents and projects keys and values for each head
first; `einsum` gathers them and attends in the absorbed form with three einsums. For selected keys the rival is the same step
over all keys. Each runs after the other in turn, 9 times; a ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import KVCache, LatentAttention, OperationRegistry
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.operators.selection import top_k_keys

HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 16, 128, 64, 128, 512, 64
DIMS = {"heads": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "latent_dim": LATENT}
SCALE = (NOPE + ROPE) ** -0.5
RUNS = 9


def medians(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each, interleaved."""
    for way in ways.values():
        jax.block_until_ready(way())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(RUNS):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(runs) for name, runs in times.items()}


def served(sequences: int, length: int) -> tuple[Any, RaggedBatch, tuple[Any, ...], Any]:
    """(the state with latents, a batch of one token each, the step's arrays, page table)."""
    pages = -(-length // PAGE)
    cache = KVCache(
        layers=1, kind="latent", head_dim=LATENT + ROPE, value_dim=LATENT, dtype="float32", page_size=PAGE,
        pages=sequences * pages, max_sequences=sequences, max_length=pages * PAGE,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    state = jax.tree.map(lambda x: draw(*x.shape), init(cache))
    table = rng.permutation(sequences * pages).reshape(sequences, pages).astype(np.int32)
    batch = RaggedBatch.make(
        cache.plan(), cu_q_lens=np.arange(sequences + 1), kv_lens=[length] * sequences, page_table=table.tolist()
    )
    w = (draw(LATENT, HEADS, NOPE) / LATENT**0.5, draw(LATENT, HEADS, VALUE) / LATENT**0.5)
    tokens = draw(sequences, HEADS, NOPE), draw(sequences, HEADS, ROPE)
    return state, batch, (*tokens, *w), table


def decode(sequences: int, length: int) -> dict[str, float]:
    """A decode step against expanding the gathered latents, and against einsums over them."""
    state, batch, arrays, table = served(sequences, length)
    attend = LatentAttention("paged", **DIMS)

    def ours(state: Any, q_nope: Any, q_rope: Any, w_uk: Any, w_uv: Any) -> Any:
        call = {"state": state, "layer": 0, "batch": batch, "update": "none", "max_q_len": 1}
        return attend(q_nope, q_rope, None, None, w_uk, w_uv, **call).attention_outputs

    def gathered(state: Any) -> tuple[Any, Any]:
        rows = state.layers[0].key[jnp.asarray(table)].reshape(sequences, -1, state.layers[0].key.shape[-1])[:, :length]
        return rows[..., :LATENT], rows[..., LATENT : LATENT + ROPE]

    def expand(state: Any, q_nope: Any, q_rope: Any, w_uk: Any, w_uv: Any) -> Any:
        latent, rope = gathered(state)
        key, value = jnp.einsum("stc,chn->shtn", latent, w_uk), jnp.einsum("stc,chv->shtv", latent, w_uv)
        logits = jnp.einsum("shn,shtn->sht", q_nope, key) + jnp.einsum("shr,str->sht", q_rope, rope)
        return jnp.einsum("sht,shtv->shv", jax.nn.softmax(SCALE * logits), value)

    def einsum(state: Any, q_nope: Any, q_rope: Any, w_uk: Any, w_uv: Any) -> Any:
        latent, rope = gathered(state)
        query = jnp.einsum("shn,chn->shc", q_nope, w_uk)
        logits = jnp.einsum("shc,stc->sht", query, latent) + jnp.einsum("shr,str->sht", q_rope, rope)
        summed = jnp.einsum("sht,stc->shc", jax.nn.softmax(SCALE * logits), latent)
        return jnp.einsum("shc,chv->shv", summed, w_uv)

    ways = {f.__name__: jax.jit(f) for f in (ours, expand, einsum)}
    outputs = {name: np.asarray(way(state, *arrays)) for name, way in ways.items()}
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["ours"], atol=2e-4, err_msg=name)
    return medians({name: lambda way=way: way(state, *arrays) for name, way in ways.items()})


def selected(sequences: int, length: int, k: int) -> dict[str, float]:
    """A decode step over k selected keys against one over all."""
    state, batch, (q_nope, q_rope, w_uk, _), _ = served(sequences, length)
    query = jnp.concatenate([jnp.einsum("shn,chn->shc", q_nope, w_uk), q_rope], -1)
    rng = np.random.default_rng(1)
    chosen = np.sort(np.stack([rng.permutation(length)[:k] for _ in range(sequences)])).astype(np.int32)
    paged = OperationRegistry.create("paged")

    def step(state: Any, query: Any, chosen: Any) -> Any:
        call = {"state": state, "layer": 0, "batch": batch, "update": "none", "max_q_len": 1, "softmax_scale": SCALE}
        return paged(query, **call, selected=chosen).attention_outputs

    run = jax.jit(step)
    return medians({"selected": lambda: run(state, query, chosen), "dense": lambda: run(state, query, None)})


def indexer_bytes(length: int, heads: int, dim: int, k: int) -> int:
    """Temporary bytes of a selection for `length` queries among as many keys; compiled, not run."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    run = jax.jit(lambda *x: top_k_keys(*x, k=k, softmax_scale=dim**-0.5))
    compiled = run.lower(shape(1, length, heads, dim), shape(1, length, dim), shape(1, length, heads)).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def plan_seconds(layers: int) -> float:
    """Planning a step of each layer of DeepSeek V3, from nothing."""
    cache = KVCache(
        layers=layers,
        kind="latent",
        head_dim=576,
        value_dim=512,
        pages=1024,
        max_sequences=64,
        max_length=32768,
        page_size=64,
    )
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    arrays = (shape(64, 128, 128), shape(64, 128, 64), shape(64, 512), shape(64, 64), *[shape(512, 128, 128)] * 2)
    start = time.perf_counter()
    for layer in range(layers):
        attend = LatentAttention("paged", heads=128, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
        attend.plan(*arrays, cache=cache, layer=layer, max_q_len=1)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    made: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    plan_seconds(1)  # imports
    made["plan_61_layers_seconds"] = plan_seconds(61)
    for sequences, length in ((1, 4096), (4, 4096)):
        times = decode(sequences, length)
        ratios = {f"of {name}": times["ours"] / times[name] for name in ("expand", "einsum")}
        made[f"decode {sequences} x {length}"] = {"seconds": times, **ratios}
    for sequences in (1, 4):
        times = selected(sequences, 32768, 2048)
        made[f"selected 2048 of 32768, {sequences} sequences"] = {
            "seconds": times, "of dense": times["selected"] / times["dense"]
        }  # fmt: skip
    made["indexer 32768 x 32768, 64 heads of 128: temporary MiB"] = indexer_bytes(32768, 64, 128, 2048) / 2**20
    print(json.dumps(made, indent=1))
    if given.json:
        given.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
