"""Calls of the TPU kernels in Pallas' interpreter, on the arrays of paged_batches turned to each layout."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import paged_batches as batches
from paged_batches import PagedCase

from attnops.operators.kernels.pages.tpu import PageArrays, paged_attention_tpu

ALTERNATING = ("interleaved", "packed")
LAYOUTS = ("heads", "split", "joined", *ALTERNATING)
PAGES = ("key_pages", "value_pages", "key_scale", "value_scale")
SIZES = {"pages_per_block": 2, "queries_per_block": 16, "buffers": 3}


def fits(layout: str, case: PagedCase) -> bool:
    """Whether pages of the layout can hold a case's: one dim where keys and values alternate, and whole words if packed."""
    pack = 4 // np.dtype(case.quantised or case.dtype).itemsize
    same = layout not in ALTERNATING or case.dims[0] == case.dims[1]
    return same and (layout != "packed" or 2 * case.heads[1] % pack == 0)


def laid_out(arrays: dict[str, Any], layout: str, pad: int = 0) -> dict[str, Any]:
    """Pages and scales as the layout has them, each row with `pad` more numbers."""
    if layout == "latent":
        return batches.as_latents(arrays)
    made = dict(arrays)
    if layout in ("heads", "joined"):
        for name in ("key_pages", "value_pages", "key_scale", "value_scale"):
            if np.ndim(made.get(name)) >= 3:
                made[name] = np.swapaxes(made[name], 1, 2)
    if layout == "joined":
        made["key_pages"] = np.concatenate([made["key_pages"], made["value_pages"]], axis=-1)
        made["value_pages"] = None
    for name in ("key_pages", "value_pages"):
        if pad and made[name] is not None:
            made[name] = np.pad(made[name], ((0, 0), (0, 0), (0, 0), (0, pad)), constant_values=1)
    if layout in ALTERNATING:
        made["key_pages"], made["value_pages"] = alternating(layout, made["key_pages"], made["value_pages"]), None
    return made


def alternating(layout: str, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Keys and values [..., kv_heads, dim] in turn; packed: the rows that share 32 bits apart, each of whole lanes."""
    both = np.stack([key, value], axis=-2).reshape(*key.shape[:-2], -1, key.shape[-1])
    if layout == "interleaved":
        return both
    both = np.pad(both, [(0, 0)] * (both.ndim - 1) + [(0, -both.shape[-1] % 128)])
    pack = 4 // key.dtype.itemsize
    return both.reshape(*both.shape[:-2], both.shape[-2] // pack, pack, both.shape[-1])


def program(case: PagedCase, layout: str = "heads", **more: Any) -> Any:
    """A compiled function of the arrays, laid out: (output, lse)."""
    static = {"max_q_len": case.static["max_q_len"], "interpret": True} | case.call | SIZES | more
    if case.latent or layout == "packed":
        static["value_dim"] = case.dims[1]
    return jax.jit(lambda arrays: paged_attention_tpu(**arrays, **static, layout=layout)[:2])


def run(
    case: PagedCase, arrays: dict[str, Any], layout: str = "heads", pad: int = 0, **more: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(output, lse) of the kernels."""
    output, lse = program(case, layout, **more)(laid_out(arrays, layout, pad))
    assert output.dtype == case.dtype
    assert lse.dtype == np.float32
    return np.asarray(output, np.float64), np.asarray(lse, np.float64)


def check(case: PagedCase, layout: str, **more: Any) -> None:
    """Hold a call against the reference."""
    arrays = batches.make(case)
    batches.agree(case, run(case, arrays, layout, **more), batches.expect(case, arrays))


def last_rows(case: PagedCase, arrays: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(token, page id, row in the page) of each sequence with one row."""
    found = []
    for s in range(int(arrays["num_seqs"][0])):
        first, last = arrays["cu_q_lens"][s : s + 2]
        if last - first == 1:
            position = int(arrays["kv_lens"][s]) - 1
            found.append((int(first), int(arrays["page_table"][s, position // case.page]), position % case.page))
    return found


def split(case: PagedCase, whole: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the arrays before single rows were written: junk in their places; those rows [tokens, ...], junk for other tokens)."""
    before, rows, tokens = dict(whole), {}, len(whole["query"])
    for name in PAGES:
        x = whole.get(name)
        if np.ndim(x) < 3:
            continue
        junk = 127 if x.dtype == np.int8 else np.nan
        before[name], rows[name] = x.copy(), np.full((tokens, *x.shape[2:]), junk, x.dtype)
        for token, page, row in last_rows(case, whole):
            rows[name][token] = x[page, row]
            before[name][page, row] = junk
    return before, rows


def as_rows(layout: str, rows: dict[str, Any]) -> PageArrays:
    """Rows of `split` as pages of the layout store them."""
    key, value = rows["key_pages"], rows["value_pages"]
    scales = rows.get("key_scale"), rows.get("value_scale")
    if layout == "latent":
        return PageArrays(np.pad(key, ((0, 0), (0, 0), (0, -key.shape[-1] % 128))), None, scales[0])
    if layout in ALTERNATING:
        return PageArrays(alternating(layout, key, value), None, *scales)
    if layout == "joined":
        return PageArrays(np.concatenate([key, value], axis=-1), None, *scales)
    return PageArrays(key, value, *scales)


def bits(x: Any) -> np.ndarray:
    """The same as whole numbers, of which NaN equals itself."""
    x = np.asarray(x)
    return x.view(np.dtype(f"uint{8 * x.dtype.itemsize}"))
