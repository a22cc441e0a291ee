"""Calls of the TPU kernels in Pallas' interpreter, on the arrays of paged_batches turned to each layout."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import paged_batches as batches
from paged_batches import PagedCase

from attnops.operators.kernels.pages.tpu import paged_attention_tpu

ALTERNATING = ("interleaved", "packed")
LAYOUTS = ("heads", "split", "joined", *ALTERNATING)
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
