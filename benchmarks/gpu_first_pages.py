"""The pages of gpu_first_run.py: numbers of the device's kernel over pages, repetitions, times and bandwidth of decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops.devices import gpu_variant, spec_of_kind
from attnops.operators.kernels.pages.mosaic.attend import PageRows, paged_attention_mosaic
from attnops.operators.kernels.pages.mosaic.page_sizes import BLACKWELL_SIZING, HOPPER_SIZING
from attnops.operators.kernels.pages.mosaic.page_tiles import StepShape
from attnops.operators.kernels.pages.paged import paged_attention
from attnops.page_layouts import LAYOUTS, ArraySize
from attnops.verify.closeness import row_error, row_sizes
from attnops.verify.paged_reference import paged_reference

__all__ = ["STEPS", "check_pages", "page_features", "timed_pages"]

REPEATS, ROUNDS, CALLS = 50, 7, 5
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}  # as published
# (queries of the step, keys after it) of each sequence.
BATCHES = {
    "decode": ((1, 5000), (1, 64), (0, 0), (1, 1), (1, 700), (1, 65)),
    "chains": ((4, 3000), (2, 2), (0, 9), (4, 129), (3, 64)),
    "mixed": ((1, 3000), (300, 300), (1, 65), (0, 12), (129, 1000), (2, 40), (64, 2000)),
}
MOST = {"decode": 1, "chains": 4}
# Sequences, keys of each, query heads, kv heads, dims, tokens of a page: steps that are timed.
STEPS: dict[str, tuple[int, int, int, int, tuple[int, int], int]] = {
    "llama-3-8b, 32 x 8k": (32, 8192, 32, 8, (128, 128), 16),
    "llama-3-8b, 1 x 128k": (1, 131072, 32, 8, (128, 128), 16),
    "llama-3-8b, 256 x 1k": (256, 1024, 32, 8, (128, 128), 16),
    "llama-3-70b, one of 8 devices, 32 x 8k": (32, 8192, 8, 1, (128, 128), 16),
    "llama-3.2-1b, 32 x 8k": (32, 8192, 32, 8, (64, 64), 16),
    "deepseek-v3, 32 x 8k": (32, 8192, 128, 1, (576, 512), 64),
}


def page_features() -> dict[str, dict[str, Any]]:
    """Steps: batch, layout, heads (q, kv), dims (key, value), tokens of a page, dtype, what else the call has."""
    latent = {"layout": "latent", "heads": (16, 1), "dims": (576, 512), "page": 64}
    return {
        **{f"decode {layout}": {"layout": layout} for layout in ("split", "heads", "joined", "interleaved", "packed")},
        **{f"decode pages of {page}": {"page": page} for page in (8, 64, 256)},
        "decode float16": {"dtype": "float16"},
        "decode one head of many": {"heads": (80, 1)},
        "decode D64": {"dims": (64, 64)},
        "decode D256": {"dims": (256, 256)},
        "decode 192/128": {"dims": (192, 128), "layout": "heads"},
        "decode window": {"call": {"sliding_window": (700, 0)}},
        "decode chunks": {"call": {"chunk_size": 512}},
        "decode soft cap": {"call": {"logits_soft_cap": 5.0}},
        "decode sinks": {"sinks": True},
        "decode latents": latent,
        "decode latents of 128 heads": latent | {"heads": (128, 1)},
        "decode written by the kernel": {"writes": True},
        "decode written by the kernel, packed": {"writes": True, "layout": "packed"},
        "decode written by the kernel, latents": latent | {"dims": (320, 256), "writes": True},
        "decode written by the kernel, int8": {"writes": True, "quantised": ("int8", "head"), "layout": "joined"},
        "chains": {"batch": "chains"},
        "chains latents": latent | {"batch": "chains"},
        "mixed": {"batch": "mixed"},
        "mixed packed": {"batch": "mixed", "layout": "packed"},
        "mixed D64": {"batch": "mixed", "dims": (64, 64)},
        "mixed window, cap, sinks": {
            "batch": "mixed", "sinks": True, "call": {"sliding_window": (200, 0), "logits_soft_cap": 5.0},
        },
        "mixed not causal": {"batch": "mixed", "call": {"causal": False}},
        "mixed latents": latent | {"batch": "mixed"},
        "decode int8 by token": {"quantised": ("int8", "token_head")},
        "decode int8 by head, D64": {"quantised": ("int8", "head"), "dims": (64, 64), "layout": "heads"},
        "decode fp8 by token": {"quantised": ("float8_e4m3fn", "token_head"), "layout": "heads"},
        "mixed int8 by token": {"batch": "mixed", "quantised": ("int8", "token_head")},
        "mixed fp8": {"batch": "mixed", "quantised": ("float8_e5m2", "tensor"), "dtype": "float16"},
        "mixed int8 latents": latent | {"batch": "mixed", "quantised": ("int8", "token_head")},
        "chains of drafts in trees": {"batch": "chains", "tree": 4},
        "mixed trees, window": {"batch": "mixed", "tree": 64, "call": {"sliding_window": (30, 0)}},
        "mixed prefixes, window": {"batch": "mixed", "prefix": 200, "call": {"sliding_window": (30, 0)}},
    }  # fmt: skip


def _made(
    sequences: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page: int,
    layout: str,
    dtype: str,
    sinks: bool = False,
    tree: int = 0,
    prefix: int = 0,
    quantised: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """The arrays of a call; the slots that no token lies in hold NaN, and ids that pad the table are out of range."""
    rng, form, kv_heads = np.random.default_rng(0), LAYOUTS[layout], heads[1]
    width = max(-(-n // page) for _, n in sequences)
    held = [-(-n // page) for _, n in sequences]
    pages = sum(held) + 2
    ids = 1 + rng.permutation(pages - 2)
    table = np.full((len(sequences), width), pages, np.int32)
    hidden = np.ones((pages, page), bool)
    at = 0
    for row, (count, (_, length)) in enumerate(zip(held, sequences, strict=True)):
        table[row, :count] = ids[at : at + count]
        at += count
        for number, own in enumerate(table[row, :count]):
            hidden[own, : min(page, length - number * page)] = False
    arrays: dict[str, Any] = {"value_pages": None}
    for name, dim in zip(("key_pages",) if form.one_array else ("key_pages", "value_pages"), dims, strict=False):
        shape = form.array_shape(ArraySize(pages, page, kv_heads, dim, dims, 2 if quantised is None else 4))
        stored = rng.standard_normal(shape, np.float32)
        lost = hidden.reshape(
            pages, *((1, page) if form.heads_first else (page,)), *[1] * (len(shape) - 2 - form.heads_first)
        )
        if quantised is not None and quantised[0] == "int8":
            arrays[name] = np.where(lost, 127, np.clip(np.round(40 * stored), -127, 127)).astype(np.int8)
        else:
            arrays[name] = np.where(lost, np.nan, stored).astype(
                jnp.dtype(dtype if quantised is None else quantised[0])
            )
    if quantised is not None:
        for name in ("key_scale",) if form.values_in_keys else ("key_scale", "value_scale"):
            sizes = {"tensor": (), "head": (kv_heads,), "token_head": (pages, page, kv_heads)}[quantised[1]]
            scale = np.asarray(rng.uniform(0.01, 0.03, sizes), np.float32)
            if scale.ndim == 3:
                scale[hidden] = np.nan
                scale = scale.swapaxes(1, 2) if form.heads_first else scale
            arrays[name] = scale
    tokens = sum(q for q, _ in sequences)
    arrays |= {
        "query": rng.standard_normal((tokens, heads[0], dims[0]), np.float32).astype(jnp.dtype(dtype)),
        "cu_q_lens": np.cumsum([0, *(q for q, _ in sequences)]).astype(np.int32),
        "kv_lens": np.array([n for _, n in sequences], np.int32),
        "page_table": table,
        "num_seqs": np.array([len(sequences)], np.int32),
    }
    if tree:  # two branches of every other draft
        branches = np.tri(tree, dtype=bool) & ((np.arange(tree)[:, None] - np.arange(tree)[None]) % 2 == 0)
        arrays["draft_tree"] = np.stack([branches & (0 < q <= tree) for q, _ in sequences])
    if prefix:
        arrays["prefix_lengths"] = np.array([min(prefix, n) for _, n in sequences], np.int32)
    return arrays | ({"sinks": rng.standard_normal(heads[0]).astype(np.float32)} if sinks else {})


def _kernel(shape: StepShape, layout: str, most: int | None, **call: Any) -> Callable[[dict[str, Any]], Any]:
    """The kernel as a function of the arrays, with the sizes of this device."""
    gpu = gpu_variant(jax.devices()[0].device_kind)
    sizing = BLACKWELL_SIZING if gpu is not None and gpu.architecture == "blackwell" else HOPPER_SIZING
    step = sizing.step(shape, 132 if gpu is None else gpu.cores)
    static = {"layout": layout, "value_dim": shape.dims[1], "softmax_scale": shape.dims[0] ** -0.5, "max_q_len": most}
    return jax.jit(lambda x: paged_attention_mosaic(**x, **(static | call), step=step, generation=sizing.generation))


def _unwritten(arrays: dict[str, Any], layout: str) -> dict[str, Any]:
    """The same before the last key of each sequence is written, and these: of steps with one token of each sequence."""
    form, (junk, rows) = LAYOUTS[layout], (dict(arrays), {})
    last, table = arrays["kv_lens"] - 1, arrays["page_table"]
    page = arrays["key_pages"].shape[2 if form.heads_first else 1]
    at = form.places(table[np.arange(len(last)), last // page], last % page)
    for name in ("key_pages", "value_pages"):
        if (x := arrays[name]) is not None:
            rows[name], junk[name] = x[at], x.copy()
            junk[name][at] = 127 if x.dtype == np.int8 else np.nan
    return junk | {"rows": PageRows(rows["key_pages"], rows.get("value_pages"))}


def check_pages(feature: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The greatest errors, and whether repeated calls agree bit by bit. more: of the kernel's call, as interpret=True."""
    batch, layout, dtype = (
        feature.get(n, d) for n, d in (("batch", "decode"), ("layout", "split"), ("dtype", "bfloat16"))
    )
    heads, dims, page = feature.get("heads", (8, 2)), feature.get("dims", (128, 128)), feature.get("page", 16)
    sequences, call = feature.get("sequences", BATCHES[batch]), feature.get("call", {})
    beside = {name: feature[name] for name in ("sinks", "tree", "prefix", "quantised") if name in feature}
    arrays = _made(sequences, heads, dims, page, layout, dtype, **beside)
    key, value = LAYOUTS[layout].separate(arrays["key_pages"], arrays["value_pages"], *dims)
    wide = {n: x for n, x in arrays.items() if n not in ("key_pages", "value_pages", "query", "num_seqs")}
    separate = {
        n: np.asarray(x[..., :dim]).reshape(*x.shape[:2], heads[1], dim)
        for n, x, dim in zip(("key_pages", "value_pages"), (key, value), dims, strict=True)
    }
    for name in ("key_scale", "value_scale"):
        if np.ndim(wide.get(name)) == 3 and LAYOUTS[layout].heads_first:
            wide[name] = wide[name].swapaxes(1, 2)
    if "key_scale" in wide:
        wide.setdefault("value_scale", wide["key_scale"])
    query = np.asarray(arrays["query"], np.float64)
    want = paged_reference(query, num_seqs=len(sequences), **separate, **wide, softmax_scale=dims[0] ** -0.5, **call)
    shape = StepShape(len(query), *heads, dims, page, LAYOUTS[layout].values_in_keys, "quantised" in feature)
    given = _unwritten(arrays, layout) if feature.get("writes") else arrays
    if feature.get("writes"):
        shape = shape._replace(rows=tuple(x.shape[-1] for x in given["rows"] if x is not None))
    run = _kernel(shape, layout, MOST.get(batch), **call, **more)
    given = jax.tree.map(jnp.asarray, given)
    *first, after = jax.block_until_ready(run(given))
    repeats = 1 if more else REPEATS
    alike = all(bool((a == b).all()) for _ in range(repeats) for a, b in zip(first, run(given)[:2], strict=True))
    output, lse = (np.asarray(x, np.float64) for x in first)
    seen = np.isfinite(want.lse)
    row = {
        "alike": alike,
        "forward": float(row_error(output, want.output, row_sizes(want.output, want.sizes), dtype)),
        "lse": float(np.abs(lse[seen] - want.lse[seen]).max()),
    }
    hidden = bool((np.isneginf(lse) == ~seen).all() and (output[~seen] == 0).all())
    for name, x in () if after is None else zip(("key_pages", "value_pages"), after, strict=True):
        hidden &= x is None or np.asarray(x).tobytes() == arrays[name].tobytes()
    return row | {"agrees": alike and hidden and row["forward"] <= TOLERANCE[dtype] and row["lse"] <= 1e-2}


def timed_pages(name: str) -> dict[str, Any]:
    """Median milliseconds of each, the bandwidth of the pages' bytes, and its share of the published one; why it doesn't run."""
    count, length, heads, kv_heads, dims, page = STEPS[name]
    latent = dims[0] != dims[1]
    layout, width = "latent" if latent else "heads", length // page
    pages, form = count * width, LAYOUTS["latent" if latent else "heads"]
    keys = jax.random.split(jax.random.key(0), 3)
    stored = [
        jax.random.normal(k, form.array_shape(ArraySize(pages, page, kv_heads, dim, dims, 2)), jnp.bfloat16)
        for k, dim in zip(keys, dims, strict=False)
    ]
    table = np.random.default_rng(0).permutation(pages).reshape(count, width).astype(np.int32)
    given: dict[str, Any] = {
        "query": jax.random.normal(keys[2], (count, heads, dims[0]), jnp.bfloat16),
        "key_pages": stored[0], "value_pages": None if latent else stored[1],
        "cu_q_lens": jnp.arange(count + 1, dtype=jnp.int32), "kv_lens": jnp.full((count,), length, jnp.int32),
        "page_table": jnp.asarray(table), "num_seqs": jnp.full((1,), count, jnp.int32),
    }  # fmt: skip
    scale, static = dims[0] ** -0.5, {"layout": layout, "value_dim": dims[1], "max_q_len": 1}
    found: dict[str, Callable[[dict[str, Any]], Any]] = {
        "attnops": _kernel(StepShape(count, heads, kv_heads, dims, page, latent), layout, 1),
        "attnops on xla": jax.jit(lambda x: paged_attention(**x, **static, softmax_scale=scale)),
    }
    row: dict[str, Any] = {"ms": {}, "failed": {}, "GB/s": {}, "of published": {}}
    times: dict[str, list[float]] = {}
    if not latent:
        try:
            found["jax in triton"] = _of_jax(scale)
        except ImportError as error:
            row["failed"]["jax in triton"] = str(error)
    for who, run in found.items():
        try:
            jax.block_until_ready(run(given))
            times[who] = []
        except Exception as error:  # the compiler's or the driver's
            row["failed"][who] = f"{type(error).__name__}: {str(error)[:200]}"
    for _ in range(ROUNDS):
        for who in times:
            start = time.perf_counter()
            for _ in range(CALLS):
                out = found[who](given)
            jax.block_until_ready(out)
            times[who].append((time.perf_counter() - start) / CALLS)
    size = count * length * kv_heads * (dims[0] if latent else sum(dims)) * 2
    spec = spec_of_kind(jax.devices()[0].device_kind)
    for who, taken in times.items():
        seconds = statistics.median(taken)
        row["ms"][who], row["GB/s"][who] = round(1e3 * seconds, 4), round(size / seconds / 1e9)
        if spec is not None:
            row["of published"][who] = round(size / seconds / spec.bytes_per_second, 3)
    return row


def _of_jax(scale: float) -> Callable[[dict[str, Any]], Any]:
    """JAX's kernel; its pages, [kv_heads, pages, page, dim], are made before it is timed."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    run, prepared = jax.jit(lambda q, *x: paged_attention(q * scale, *x)), dict[str, Any]()

    def timed(x: dict[str, Any]) -> Any:
        if not prepared:
            prepared.update({n: jnp.swapaxes(x[n], 0, 1).copy() for n in ("key_pages", "value_pages")})
        return run(x["query"], prepared["key_pages"], prepared["value_pages"], x["page_table"], x["kv_lens"])

    return timed
