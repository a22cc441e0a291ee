"""Calls of the TPU kernels in Pallas' interpreter, on the arrays of paged_batches turned to each layout."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import paged_batches as batches
from paged_batches import PagedCase

from attnops.operators.kernels.pages.tpu import paged_attention_tpu

LAYOUTS = ("heads", "split", "joined")
SIZES = {"pages_per_block": 2, "queries_per_block": 16, "buffers": 3}


def laid_out(arrays: dict[str, Any], layout: str, pad: int = 0) -> dict[str, Any]:
    """Pages and scales as the layout has them, each row with `pad` more numbers."""
    if layout == "latent":
        return batches.as_latents(arrays)
    made = dict(arrays)
    if layout != "split":
        for name in ("key_pages", "value_pages", "key_scale", "value_scale"):
            if np.ndim(made.get(name)) >= 3:
                made[name] = np.swapaxes(made[name], 1, 2)
    if layout == "joined":
        made["key_pages"] = np.concatenate([made["key_pages"], made["value_pages"]], axis=-1)
        made["value_pages"] = None
    for name in ("key_pages", "value_pages"):
        if pad and made[name] is not None:
            made[name] = np.pad(made[name], ((0, 0), (0, 0), (0, 0), (0, pad)), constant_values=1)
    return made


def program(case: PagedCase, layout: str = "heads", **more: Any) -> Any:
    """A compiled function of the arrays, laid out: (output, lse)."""
    static = {"max_q_len": case.static["max_q_len"], "interpret": True} | case.call | SIZES | more
    if case.latent:
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
