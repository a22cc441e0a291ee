"""Ragged batches over pages, made up: every slot that no token lies in holds NaN, and ids that pad the table are out of range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops.operators.kernels.pages.paged import paged_attention
from attnops.verify.closeness import lse_size, row_error, row_sizes
from attnops.verify.paged_reference import PagedReference, paged_reference

TOLERANCE = {"float32": 4e-6, "bfloat16": 1.5e-2, "float16": 2e-3}  # as paged publishes

# (queries of the step, keys after it) of each sequence. Keys end at, before and after pages of 8, and some sequences are empty.
KINDS = {
    "decode": ((1, 5), (1, 40), (0, 0), (1, 1), (1, 16), (0, 9), (1, 33)),
    "speculate": ((3, 5), (2, 40), (0, 0), (3, 3), (1, 16), (3, 33)),
    "prefill": ((13, 13), (8, 24), (0, 0), (7, 40), (16, 33)),
    "mixed": ((1, 17), (9, 9), (1, 8), (0, 12), (12, 40), (1, 33), (2, 2), (5, 31)),
}


@dataclass(frozen=True)
class PagedCase:
    """One call: its batch, its shapes and its features."""

    kind: str = "mixed"
    heads: tuple[int, int] = (6, 2)  # of queries, of keys
    dims: tuple[int, int] = (64, 64)
    dtype: str = "float32"
    window: tuple[int | None, int | None] | None = None
    causal: bool = True
    chunk: int | None = None
    cap: float | None = None
    sinks: bool = False
    quantised: str | None = None
    scale: str = "tensor"  # head, token_head
    page: int = 8
    tree: int = 0  # drafts in a tree of some sequences' tokens
    spans: bool = False  # some tokens are in spans
    prefix: int | None = None  # tokens at the beginning of some sequences that see one another
    latent: bool = False  # values are the first numbers of their keys
    rope: str | None = None  # the dtype of the other numbers of such keys, in pages of their own
    sizes: tuple[int, int, int] | None = (2, 3, 4)  # pages of a block, pairs, block_q; None: by rule

    @property
    def name(self) -> str:
        given = {k: v for k, v in vars(self).items() if v != getattr(PagedCase, k)}
        return "-".join(f"{k}={v}".replace(" ", "") for k, v in given.items()) or "mixed"

    @property
    def call(self) -> dict[str, Any]:
        """What isn't an array."""
        return {
            "softmax_scale": self.dims[0] ** -0.5,
            "causal": self.causal,
            "sliding_window": self.window,
            "chunk_size": self.chunk,
            "logits_soft_cap": self.cap,
        }

    @property
    def static(self) -> dict[str, Any]:
        """What the kernel takes beyond the reference."""
        names = ("pages_a_block", "pairs", "block_q")
        sizes = {} if self.sizes is None else dict(zip(names, self.sizes, strict=True))
        return sizes | {"max_q_len": {"decode": 1, "speculate": 3}.get(self.kind)}


def make(
    case: PagedCase, sequences: Any = None, *, seed: int = 3, width: int = 6, spare: int = 2
) -> dict[str, np.ndarray]:
    """The arrays of a call. The first and the last page belong to nobody; `spare` rows of the batch don't count."""
    rng = np.random.default_rng(seed)
    sequences = KINDS[case.kind] if sequences is None else sequences
    (heads, kv_heads), (dim, value_dim), page = case.heads, case.dims, case.page
    width = max(width, *(-(-length // page) for _, length in sequences))
    count, pages = len(sequences), len(sequences) * width + 2
    size = count + spare
    dtype = jnp.dtype(case.quantised or case.dtype)
    tokens = sum(q for q, _ in sequences)
    cu_q_lens = np.full(size + 1, 2**30, np.int32)
    cu_q_lens[: count + 1] = np.cumsum([0, *(q for q, _ in sequences)])
    kv_lens, table = np.full(size, 2**30, np.int32), np.full((size, width), pages, np.int32)
    junk = 127 if dtype == jnp.int8 else np.nan
    arrays: dict[str, Any] = {
        "key_pages": np.full((pages, page, kv_heads, dim), junk, np.float32),
        "value_pages": np.full((pages, page, kv_heads, value_dim), junk, np.float32),
    }
    per_token = case.quantised is not None and case.scale == "token_head"
    if per_token:
        arrays |= {n: np.full((pages, page, kv_heads), np.nan, np.float32) for n in ("key_scale", "value_scale")}
    free = list(1 + rng.permutation(pages - 2))
    for s, (_, length) in enumerate(sequences):
        kv_lens[s] = length
        for j in range(-(-length // page)):
            table[s, j] = free.pop()
            used = min(page, length - j * page)
            for name in ("key_pages", "value_pages"):
                x = rng.standard_normal((used, *arrays[name].shape[2:]))
                x = np.clip(np.round(40 * x), -127, 127) if dtype == jnp.int8 else x
                arrays[name][table[s, j], :used] = x
            if per_token:
                for name in ("key_scale", "value_scale"):
                    arrays[name][table[s, j], :used] = rng.uniform(0.01, 0.03, (used, kv_heads))
    for name in ("key_pages", "value_pages"):
        arrays[name] = arrays[name].astype(dtype)
    if case.latent:
        arrays["value_pages"] = arrays["key_pages"][..., :value_dim]
    if case.rope is not None:
        arrays["key_pages"] = arrays["value_pages"]
        rope = np.full((pages, page, kv_heads, dim - value_dim), np.nan, np.float32)
        for s, (_, length) in enumerate(sequences):
            for j in range(-(-length // page)):
                used = min(page, length - j * page)
                rope[table[s, j], :used] = rng.standard_normal((used, *rope.shape[2:]))
        arrays["rope_pages"] = rope.astype(jnp.dtype(case.rope))
    if case.quantised is not None and not per_token:
        shape = (kv_heads,) if case.scale == "head" else ()
        arrays |= {n: np.asarray(rng.uniform(0.01, 0.03, shape), np.float32) for n in ("key_scale", "value_scale")}
    if case.latent and "key_scale" in arrays:
        arrays["value_scale"] = arrays["key_scale"]
    if case.tree:
        arrays["draft_tree"] = trees(case.tree, sequences, size, rng)
    if case.spans:
        arrays["spans"] = spans_of(sequences, rng)
    if case.spans and case.tree:  # a draft is in no span
        for s, (first, last) in enumerate(pairwise(cu_q_lens[: count + 1])):
            arrays["spans"][first:last] *= not arrays["draft_tree"][s].any()
    if case.prefix is not None:
        arrays["prefix_lengths"] = np.full(size, 2**30, np.int32)
        of = [0 if s % 3 == 1 else min(case.prefix, length) for s, (_, length) in enumerate(sequences)]
        arrays["prefix_lengths"][:count] = of
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(heads).astype(np.float32)
    query = rng.standard_normal((tokens + 3, heads, dim)).astype(case.dtype)
    query[tokens:] = np.nan  # rows of nobody
    return {"query": query, "cu_q_lens": cu_q_lens, "kv_lens": kv_lens, "page_table": table,
            "num_seqs": np.asarray([count], np.int32)} | arrays  # fmt: skip


def spans_of(sequences: Any, rng: np.random.Generator) -> np.ndarray:
    """int32 [tokens + 3, 2]: spans of any lengths of stored tokens and those of the step, and tokens in none."""
    made = []
    for q_len, length in sequences:
        of, at = np.zeros((length, 2), np.int32), 0
        while at < length:
            end = min(at + int(rng.integers(1, 14)), length)
            of[at:end] = (at, end) if rng.integers(3) else rng.choice([(0, 0), (-1, -1), (2**30, 0)])
            at = end
        made.append(of[length - q_len :])
    return np.concatenate([*made, rng.integers(0, 40, (3, 2), np.int32)])


def trees(drafts: int, sequences: Any, size: int, rng: np.random.Generator) -> np.ndarray:
    """bool [size, drafts, drafts]: a tree with any parents for each sequence of up to `drafts` tokens; one in three has none, and
    rows that don't count hold junk."""
    made = np.ones((size, drafts, drafts), bool)
    for s, (q_len, _) in enumerate(sequences):
        made[s] = False
        if not 0 < q_len <= drafts or s % 3 == 2:
            continue
        for i in range(drafts):
            parent = int(rng.integers(-1, i))  # -1: another root
            made[s, i] = made[s, parent] if parent >= 0 else False
            made[s, i, i] = True
    return made


def released(case: PagedCase, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same once a pool has taken back what the case's window or chunk doesn't see: padding in the table, and junk in the
    pages."""
    left = 2**30 if case.window is None or case.window[0] is None else case.window[0]
    assert left < 2**30 or case.chunk is not None
    arrays = {name: x.copy() for name, x in arrays.items()}
    table, pages, gone = arrays["page_table"], len(arrays["key_pages"]), 0
    for s in range(int(arrays["num_seqs"].reshape(()))):
        first, last = arrays["cu_q_lens"][s : s + 2]
        position = int(
            arrays["kv_lens"][s] - (last - first)
        )  # of the first query, or of the next one where there is none
        for number in range(table.shape[1]):
            begin = max(position - left, 0 if case.chunk is None else position // case.chunk * case.chunk)
            if (number + 1) * case.page <= begin:
                for name in ("key_pages", "value_pages"):
                    arrays[name][table[s, number]] = 127 if case.quantised == "int8" else np.nan
                table[s, number] = pages
                gone += 1
    assert gone
    return arrays


def as_latents(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same with latents in place of keys and values, [pages, 1, page, lanes], and one scale for both."""
    made = {name: x for name, x in arrays.items() if name not in ("value_pages", "value_scale")}
    key = made["key_pages"].swapaxes(1, 2)
    made["key_pages"] = np.pad(key, ((0, 0), (0, 0), (0, 0), (0, -key.shape[-1] % 128)))
    if "rope_pages" in made:
        rope = made["rope_pages"].swapaxes(1, 2)
        made["rope_pages"] = np.pad(rope, ((0, 0), (0, 0), (0, 0), (0, -rope.shape[-1] % 128)))
    if np.ndim(made.get("key_scale")) >= 3:
        made["key_scale"] = made["key_scale"].swapaxes(1, 2)
    return made | {"value_pages": None}


def run(case: PagedCase, arrays: dict[str, np.ndarray], **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """(output, lse) of one compiled program in which every array is traced."""
    static = case.call | case.static | more
    if case.latent:
        arrays, static = as_latents(arrays), {"layout": "latent", "value_dim": case.dims[1]} | static
    output, lse = jax.jit(lambda arrays: paged_attention(**arrays, **static))(arrays)
    assert output.dtype == case.dtype
    assert lse.dtype == np.float32
    return np.asarray(output, np.float64), np.asarray(lse, np.float64)


def expect(case: PagedCase, arrays: dict[str, np.ndarray]) -> PagedReference:
    """The same from the reference, rows of nobody 0."""
    given = {n: x for n, x in arrays.items() if n not in ("query", "num_seqs", "rope_pages")}
    if case.rope is not None:  # whole keys, whose latents alone have a scale
        scale = np.asarray(given.pop("key_scale"), np.float64)
        scale = scale[..., None] if scale.ndim == 3 else scale.reshape(-1, 1)
        parts = np.asarray(arrays["key_pages"], np.float64) * scale, np.asarray(arrays["rope_pages"], np.float64)
        given["key_pages"] = np.concatenate(parts, -1)
    query = np.asarray(arrays["query"], np.float64)
    return paged_reference(query, num_seqs=int(arrays["num_seqs"].reshape(())), **given, **case.call)


def agree(case: PagedCase, got: tuple[np.ndarray, np.ndarray], want: PagedReference) -> None:
    """Assert that both agree within the tolerance, row by row; what is to be 0 or -inf is exactly that."""
    output, lse = got
    error = row_error(output, want.output, row_sizes(want.output, want.sizes), case.dtype)
    assert error <= TOLERANCE[case.dtype], f"output: error {error:.2e} of a row's size"
    assert (np.isneginf(lse) == np.isneginf(want.lse)).all()
    seen = np.isfinite(want.lse)
    assert (output[~seen] == 0).all()
    error = row_error(lse[seen], want.lse[seen], lse_size(want.lse[seen]))
    assert error <= TOLERANCE[case.dtype], f"lse: error {error:.2e}"


def varied(case: PagedCase, **changes: Any) -> PagedCase:
    return replace(case, **changes)
