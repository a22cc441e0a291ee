"""Decoding against paged keys: attnops beside gathering the pages and calling jax.nn.dot_product_attention.

    python benchmarks/serving.py [--cells REGEX] [--rounds N] [--max-mib N] [--json FILE]

Medians of calls that take turns in one process, and ratios, lower is better. A cell whose pages exceed --max-mib is left out and
named. `even`: all sequences have the whole context; `ragged`: from an eighth of it to all. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from attnops.operators.kernels.paged import paged_attention

MODELS = {"smollm2": (9, 3, 64), "llama3-8b": (32, 8, 128)}  # heads, kv heads, dim
PAGE = 16


@dataclass(frozen=True)
class Cell:
    """One row of the table: a decode step of `batch` sequences."""

    model: str
    dtype: str
    batch: int
    context: int
    lengths: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} batch {self.batch} context {self.context} {self.lengths}"

    @property
    def mib(self) -> float:
        """Of the pages."""
        _, kv_heads, dim = MODELS[self.model]
        return 2 * self.batch * self.context * kv_heads * dim * jnp.dtype(self.dtype).itemsize / 2**20


def all_cells() -> Iterator[Cell]:
    for model in MODELS:
        for dtype in ("float32", "bfloat16"):
            for batch in (1, 16, 64):
                for context in (256, 1024, 4096, 8192):
                    for lengths in ("even", "ragged") if batch > 1 else ("even",):
                        yield Cell(model, dtype, batch, context, lengths)


def arrays_of(cell: Cell) -> dict[str, jax.Array]:
    """Normal values, the pages of the sequences mixed."""
    heads, kv_heads, dim = MODELS[cell.model]
    rng = np.random.default_rng(0)
    width = cell.context // PAGE
    pages = cell.batch * width
    key = jax.random.normal(jax.random.key(0), (pages, PAGE, kv_heads, dim), cell.dtype)
    lengths = np.full(cell.batch, cell.context)
    if cell.lengths == "ragged":
        lengths = np.linspace(cell.context // 8, cell.context, cell.batch).astype(int)
    return {
        "query": jax.random.normal(jax.random.key(1), (cell.batch, heads, dim), cell.dtype),
        "key_pages": key,
        "value_pages": key[::-1],
        "kv_lens": jnp.asarray(rng.permutation(lengths), jnp.int32),
        "page_table": jnp.asarray(rng.permutation(pages).reshape(cell.batch, width), jnp.int32),
    }


def attnops(query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, **batch: jax.Array) -> jax.Array:
    """The kernel under test."""
    sequences, _, dim = query.shape
    ends = jnp.arange(sequences + 1, dtype=jnp.int32)
    return paged_attention(
        query, key_pages, value_pages, **batch, cu_q_lens=ends, num_seqs=sequences, softmax_scale=dim**-0.5, max_q_len=1
    )[0]


def gathered(
    query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, kv_lens: jax.Array, page_table: jax.Array
) -> jax.Array:
    """What is written without a kernel: every sequence's pages in one array, then jax.nn."""
    sequences = query.shape[0]
    key, value = (x[page_table].reshape(sequences, -1, *x.shape[2:]) for x in (key_pages, value_pages))
    return jax.nn.dot_product_attention(query[:, None], key, value, key_value_seq_lengths=kv_lens)[:, 0]


RIVALS: dict[str, Callable[..., jax.Array]] = {"gather + jax.nn": gathered}


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, the median of calls in turn, and ratios to the rivals."""
    arrays = arrays_of(cell)
    calls = {name: jax.jit(call) for name, call in {"attnops": attnops, **RIVALS}.items()}
    results = {name: np.asarray(call(**arrays), np.float32) for name, call in calls.items()}
    for name, result in results.items():
        error = float(np.abs(result - results["attnops"]).max())
        assert error < (1e-4 if cell.dtype == "float32" else 5e-2), f"{cell.name}: {name} differs by {error}"
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(**arrays))
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: medians["attnops"] / medians[name] for name in RIVALS}
    return {"cell": cell.name, "ms": medians, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="only cells whose name matches")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-mib", type=float, default=1024, help="leave out cells with more of pages")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    rows = []
    for cell in all_cells():
        if not re.search(arguments.cells, cell.name):
            continue
        if cell.mib > arguments.max_mib:
            print(f"{cell.name:55} left out: {cell.mib:.0f} MiB of pages", flush=True)
            continue
        rows.append(measure(cell, arguments.rounds))
        jax.clear_caches()
        figures = "  ".join(f"{name} {ms:9.3f} ms" for name, ms in rows[-1]["ms"].items())
        ratios = "  ".join(f"{ratio:.2f} of {name}" for name, ratio in rows[-1]["ratio"].items())
        print(f"{cell.name:55} {figures}  {ratios}", flush=True)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}"
    for name in RIVALS if rows else ():
        mean = statistics.geometric_mean(row["ratio"][name] for row in rows)
        print(f"{machine}: {mean:.2f} of {name} in the mean of {len(rows)} cells")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
