"""What benchmarks/serving.py compares: one cell, its arrays, and each implementation as a function without arguments.

Each one gets its own layout, prepared in memory, and returns [tokens, heads, dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.operators.kernels.pages.paged import paged_attention

MODELS = {"smollm2": (9, 3, 64), "llama3-8b": (32, 8, 128)}  # heads, kv heads, dim
PAGE = 16


@dataclass(frozen=True)
class Cell:
    """One row of the table: a step of `batch` sequences, the last of which brings `chunk` queries, the others one each."""

    model: str
    dtype: str
    layout: str
    batch: int
    context: int
    lengths: str
    chunk: int

    @property
    def kind(self) -> str:
        return "decode" if self.chunk == 1 else f"chunk {self.chunk}"

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} {self.layout} {self.kind} batch {self.batch} context {self.context} {self.lengths}"

    @property
    def mib(self) -> float:
        """MiB of the pages."""
        _, kv_heads, dim = MODELS[self.model]
        return 2 * self.batch * self.context * kv_heads * dim * jnp.dtype(self.dtype).itemsize / 2**20


class Step(NamedTuple):
    """A cell's arrays; pages in the layout `split`, the batch's numbers on the host."""

    query: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray


Call = Callable[[], jax.Array]


def step_of(cell: Cell) -> Step:
    """Normal values, with the sequences' pages in mixed order."""
    heads, kv_heads, dim = MODELS[cell.model]
    rng = np.random.default_rng(0)
    width = cell.context // PAGE
    pages = cell.batch * width
    keys = jax.random.split(jax.random.key(0), 3)
    shape = pages, PAGE, kv_heads, dim
    lengths = np.full(cell.batch, cell.context)
    if cell.lengths == "ragged":
        lengths = rng.permutation(np.linspace(cell.context // 8, cell.context, cell.batch).astype(int))
    lengths[-1] = max(lengths[-1], cell.chunk)
    ends = np.append(np.arange(cell.batch), cell.batch - 1 + cell.chunk)
    return Step(
        jax.random.normal(keys[0], (ends[-1], heads, dim), cell.dtype),
        jax.random.normal(keys[1], shape, cell.dtype),
        jax.random.normal(keys[2], shape, cell.dtype),
        rng.permutation(pages).reshape(cell.batch, width).astype(np.int32),
        lengths.astype(np.int32),
        ends.astype(np.int32),
    )


def attnops(cell: Cell, step: Step) -> Call:
    """The kernel under test."""
    swap = (lambda x: x.swapaxes(1, 2)) if cell.layout == "heads" else (lambda x: x)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array, *numbers: jax.Array) -> jax.Array:
        return paged_attention(
            query,
            key,
            value,
            page_table=table,
            kv_lens=numbers[0],
            cu_q_lens=numbers[1],
            num_seqs=cell.batch,
            softmax_scale=query.shape[-1] ** -0.5,
            layout=cell.layout,
            max_q_len=1 if cell.chunk == 1 else None,
        )[0]

    return _call(attend, step.query, swap(step.key_pages), swap(step.value_pages), *step[3:])


def gather(cell: Cell, step: Step) -> Call:
    """The approach without a kernel: every sequence's pages in one array, then jax.nn; a chunk takes a second call."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        def part(rows: jax.Array, of: slice) -> jax.Array:
            keys, values = (x[table[of]].reshape(len(rows), -1, *x.shape[2:]) for x in (key, value))
            q_len = rows.shape[1]
            if q_len == 1:
                return jax.nn.dot_product_attention(rows, keys, values, key_value_seq_lengths=lengths[of])
            last = lengths[of][:, None] - q_len + jnp.arange(q_len)
            seen = jnp.arange(keys.shape[1]) <= last[..., None]
            return jax.nn.dot_product_attention(rows, keys, values, mask=seen[:, None])

        if cell.chunk == 1:
            return part(query[:, None], slice(None))[:, 0]
        ones = cell.batch - 1
        chunk = part(query[ones:][None], slice(ones, None))[0]
        return jnp.concatenate([part(query[:ones, None], slice(ones))[:, 0], chunk]) if ones else chunk

    return _call(attend, step.query, step.key_pages, step.value_pages, step.page_table, step.kv_lens)


def jax_reference(cell: Cell, step: Step) -> Call:
    """jax's reference of its TPU kernel, on interleaved pages. It is compiled for these lengths, one sequence after another."""
    module = import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    sequences = np.array([cell.batch], np.int32)

    def attend(query: jax.Array, pages: jax.Array, table: jax.Array) -> jax.Array:
        scale = query.shape[-1] ** -0.5
        return module.ref_ragged_paged_attention(
            query, pages, step.kv_lens, table, step.cu_q_lens, sequences, sm_scale=scale
        )

    return _call(attend, step.query, _interleaved(step), step.page_table)


def ejkernel(cell: Cell, step: Step) -> Call:
    """Its XLA kernel for interleaved pages, which only reads; with float32 sums like the others."""
    module = import_module("ejkernel.kernels._xla.ragged_page_attention_v2")

    def attend(query: jax.Array, pages: jax.Array, table: jax.Array, lens: jax.Array, ends: jax.Array) -> jax.Array:
        return module.ragged_page_attention_v2(
            query, pages, lens, table, ends, jnp.array([cell.batch], jnp.int32), compute_dtype=jnp.float32
        )

    return _call(attend, step.query, _interleaved(step), *step[3:])


def dense(cell: Cell, step: Step) -> Call | None:
    """attnops' own attention over a cache without pages, of the same lengths; gathered beforehand."""
    if cell.chunk > 1:
        return None
    attend = OperationRegistry.create("vanilla", OperationMetadata(runtime_dtype=cell.dtype))
    key, value = (x[step.page_table].reshape(cell.batch, -1, *x.shape[2:]) for x in (step.key_pages, step.value_pages))

    def call(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
        return attend(query[:, None], key, value, kv_lengths=lengths).attention_outputs[:, 0]

    return _call(call, step.query, key, value, step.kv_lens)


RIVALS: dict[str, Callable[[Cell, Step], Call | None]] = {
    "gather + jax.nn": gather,
    "jax's reference": jax_reference,
    "ejkernel": ejkernel,
    "dense decode": dense,
}


def missing() -> dict[str, str]:
    """Implementations that this environment lacks, and why."""
    try:
        import_module("ejkernel.kernels._xla.ragged_page_attention_v2")
    except ImportError as error:
        return {"ejkernel": str(error)}
    return {}


def versions() -> str:
    """Versions of jax and, if it is installed, of ejkernel."""
    found = [f"jax {jax.__version__}"]
    if not missing():
        found.append(f"ejkernel {metadata.version('ejkernel')}")
    return ", ".join(found)


def _interleaved(step: Step) -> jax.Array:
    both = jnp.stack([step.key_pages, step.value_pages], axis=3)
    return both.reshape(*both.shape[:2], -1, both.shape[-1])


def _call(attend: Callable[..., jax.Array], *arrays: jax.Array | np.ndarray) -> Call:
    compiled, on_device = jax.jit(attend), [jnp.asarray(x) for x in arrays]
    return lambda: compiled(*on_device)
