"""What to run first on a GPU of the Hopper generation: numbers of the Hopper kernels' features, repetitions, times. Ten minutes.

    python benchmarks/gpu_first_run.py --json FILE [--minutes N]

Each feature is compared with the float64 reference, in bfloat16 or float16, forward and backward. The same call and its gradient
are repeated REPEATS times: results that differ in a bit tell of a race. Then causal, full, windowed and packed attention over
4,096 tokens and its gradient are timed by turns: the Hopper kernels, those in Triton, and cuDNN by jax.nn where it takes the
call; a row has the median milliseconds of a call. Steps over pages are checked and repeated in the same way, and decoding steps
are timed with the bandwidth of their pages (gpu_first_pages.py). The file is written after each row. The exit status is 0 if all
numbers agree, 1 if some don't, 2 if there is no such GPU or jax here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np
from gpu_first_pages import STEPS, check_pages, page_features, timed_pages

from attnops import (
    ALiBi,
    Causal,
    Chunked,
    Full,
    Mask,
    OperationMetadata,
    OperationRegistry,
    Positions,
    Prefix,
    SlidingWindow,
)
from attnops.devices import gpu_variant
from attnops.operators.kernels.local_mask import Dropout, dropout_seed
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

REPEATS, ROUNDS, CALLS = 50, 7, 5
FORWARD = {"bfloat16": 2e-2, "float16": 3e-3}  # published tolerances, and twice as much for gradients
LENGTH, WINDOW = 4096, 1024
DOCUMENTS = (1000, 531, 747, 290, 873, 117, 401, 137)
TIMED = {"D64": (2, 16, 16, 64), "D128": (2, 16, 16, 128), "D128 gqa": (2, 32, 8, 128), "D256": (2, 8, 8, 256)}
MASKS = {"full": Full(), "causal": Causal(), "window": Causal() & SlidingWindow(WINDOW - 1), "packed": Causal()}


def features() -> dict[str, dict[str, Any]]:
    """Calls: mask, what else the call has, lengths (q, kv), heads (q, kv), dims (query, value), dtype, layout."""
    ids = (np.arange(600) // 170).astype(np.int32)[None]
    positions = np.arange(600, dtype=np.int32)[None] // 2
    dims = (32, 32), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (64, 128)
    wide = {f"dims {one}": {"dims": one} for one in dims}
    rng, key = np.random.default_rng(1), jax.random.key(3)
    bias = rng.standard_normal((1, 4, 600, 600)).astype(np.float32)
    dropped = {"dropout_prob": 0.3, "deterministic": False, "dropout_rng": key}
    keep = np.asarray(Dropout(dropout_seed(key), 0.3, 0, 0, 0).keep_all(1, 4, 600, slice(0, 600)))
    dense = rng.random((1, 1, 600, 600)) < 0.7
    return {
        "causal": {},
        "full": {"mask": Full()},
        "float16": {"dtype": "float16"},
        "bhtd": {"layout": "bhtd"},
        "window": {"mask": Causal() & SlidingWindow(100)},
        "chunks": {"mask": Causal() & Chunked(96)},
        "prefix": {"mask": Prefix(70) | Causal()},
        "negated": {"mask": ~SlidingWindow(30, 30)},
        "gqa": {"heads": (8, 2)},
        "ragged": {"lengths": (517, 601), "mask": Full()},
        "offset": {"lengths": (200, 600), "call": {"query_offset": 400}},
        "traced offset": {"lengths": (200, 600), "call": {"query_offset": np.array([400], np.int32)}},
        "packed": {"call": {"q_segment_ids": ids, "kv_segment_ids": ids}, "same": ids},
        "lengths": {"call": {"kv_lengths": np.array([333], np.int32)}, "keys": 333},
        "positions": {"mask": Positions(jnp.asarray(positions), jnp.asarray(positions)), "causal_by": positions},
        "soft cap": {"call": {"logits_soft_cap": 5.0}},
        "sinks": {"call": {"softmax_aux": np.linspace(-2, 2, 4, dtype=np.float32)}},
        "bias": {"call": {"bias": bias}, "known": {"bias": bias}},
        "alibi": {"call": {"score": ALiBi()}, "known": {"score": ALiBi()}},
        "dropout": {"call": dropped, "known": {"keep": keep, "keep_probability": 0.7}},
        "boolean array": {"call": {"mask": dense}, "seen": dense[0, 0]},
        **wide,
    }


def operation(kernel: str, dtype: str) -> Any:
    """flash_attn2 with one of its kernels."""
    configs = {"flash_attn2": {"kernel": kernel}}
    metadata = OperationMetadata(fallback="error", tuning="off", runtime_dtype=dtype, operation_configs=configs)
    return OperationRegistry.create("flash_attn2", metadata)


def check(feature: dict[str, Any]) -> dict[str, Any]:
    """The greatest errors, and whether repeated calls agree bit by bit."""
    dtype, layout = feature.get("dtype", "bfloat16"), feature.get("layout", "bthd")
    (q_len, kv_len), (heads, kv_heads) = feature.get("lengths", (600, 600)), feature.get("heads", (4, 4))
    dim, value_dim = feature.get("dims", (128, 128))
    mask: Mask = feature.get("mask", Causal())
    call = dict(feature.get("call", {}))
    rng = np.random.default_rng(0)
    shapes = (q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, value_dim), (q_len, heads, value_dim)
    *qkv, pull = (rng.standard_normal((1, *shape)).astype(jnp.dtype(dtype)) for shape in shapes)
    offset = int(np.ravel(call.get("query_offset", 0))[0])
    rows, keys = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    seen = np.ones((q_len, kv_len), bool)
    if mask.is_static and "seen" not in feature:
        seen = seen & np.asarray(mask.test(rows, rows + offset, keys))
    if "same" in feature:
        seen = seen & (feature["same"][0][:, None] == feature["same"][0][None])
    if "causal_by" in feature:
        seen = seen & (feature["causal_by"][0][:, None] >= feature["causal_by"][0][None])
    if "keys" in feature:
        seen = seen & (keys < feature["keys"])
    if "seen" in feature:
        seen, mask = feature["seen"], jnp.asarray(call.pop("mask"))
    known = {
        "scale": dim**-0.5, "mask": seen[None, None], "soft_cap": call.get("logits_soft_cap"), "sinks": call.get("softmax_aux"),
    } | feature.get("known", {})  # fmt: skip
    wide = [x.astype(np.float64) for x in (*qkv, pull)]
    want = reference_attention(*wide[:3], **known)
    attend = operation("mosaic", dtype)
    traced = {name: jnp.asarray(x) for name, x in call.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in call.items() if name not in traced} | {"mask": mask, "layout": layout}
    static |= {"causal": False} if "seen" in feature else {}

    def order(x: Any) -> Any:
        return x if layout == "bthd" else x.swapaxes(1, 2)

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, return_lse=True, **static, **traced)

    arrays = [order(jnp.asarray(x)) for x in qkv]
    assert attend.plan(*arrays, return_lse=True, **static, **traced).method == "forward_hopper"
    forward = jax.jit(lambda *x: (run(*x).attention_outputs, run(*x).lse))
    first = jax.block_until_ready(forward(*arrays))
    alike = all(bool((a == b).all()) for _ in range(REPEATS) for a, b in zip(first, forward(*arrays), strict=True))
    row: dict[str, Any] = {"alike": alike, "forward": _error(order(first[0]), want.output)}
    row["lse"] = float(np.abs(np.asarray(first[1], np.float64) - want.lse)[np.isfinite(want.lse)].max())
    bounds = [(row["forward"], FORWARD[dtype]), (row["lse"], 1e-2)]
    gradient = jax.jit(lambda *x: jax.vjp(lambda *y: run(*y).attention_outputs, *x)[1](order(jnp.asarray(pull))))
    exact, terms = reference_gradients(*wide, **known), term_sizes(*wide, **known)
    found = jax.block_until_ready(gradient(*arrays))
    alike &= all(bool((a == b).all()) for _ in range(REPEATS) for a, b in zip(found, gradient(*arrays), strict=True))
    row["alike"] = alike
    for name, got in zip(("query", "key", "value"), found, strict=True):
        sizes = row_sizes(exact[name], terms[name])
        row[f"d_{name}"] = row_error(np.asarray(order(got), np.float64), exact[name], sizes, jnp.dtype(dtype))
        bounds.append((row[f"d_{name}"], 2 * FORWARD[dtype]))
    row["agrees"] = alike and all(error <= bound for error, bound in bounds)
    return row


def _error(got: Any, want: np.ndarray) -> float:
    """The greatest error, relative to the size of its row or a twentieth of the largest number, whichever is greater."""
    sizes = np.maximum(row_sizes(want), np.abs(want).max() / 20)
    return row_error(np.asarray(got, np.float64), want, sizes)


def rivals(shape: str, mask: str) -> dict[str, Callable[..., Any]]:
    """Functions of query, key and value, by who wrote them."""
    ids = jnp.asarray(np.repeat(np.arange(len(DOCUMENTS), dtype=np.int32), DOCUMENTS)[None].repeat(2, 0))
    packed = {"q_segment_ids": ids, "kv_segment_ids": ids} if mask == "packed" else {}

    def ours(kernel: str) -> Callable[..., Any]:
        attend = operation(kernel, "bfloat16")
        return lambda q, k, v: attend(q, k, v, mask=MASKS[mask], **packed).attention_outputs

    found = {"attnops mosaic": ours("mosaic"), "attnops triton": ours("triton")}
    if mask != "packed":
        window = (WINDOW - 1, 0) if mask == "window" else None
        found["cudnn"] = lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=mask != "full", local_window_size=window, implementation="cudnn"
        )
    return found


def timed(shape: str, mask: str, part: str) -> dict[str, Any]:
    """Median milliseconds of each, of a forward pass or of both passes; why it doesn't run."""
    batch, heads, kv_heads, dim = TIMED[shape]
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((batch, LENGTH, n, dim) for n in (heads, kv_heads, kv_heads))
    given = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    row: dict[str, Any] = {"ms": {}, "failed": {}}
    ready: dict[str, Any] = {}
    for name, run in rivals(shape, mask).items():
        both = jax.grad(lambda *x, run=run: run(*x).astype(jnp.float32).sum(), (0, 1, 2))
        try:
            ready[name] = jax.jit(run if part == "forward" else both)
            jax.block_until_ready(ready[name](*given))
        except Exception as error:  # the compiler's or the driver's
            row["failed"][name] = f"{type(error).__name__}: {str(error)[:200]}"
            del ready[name]
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, run in ready.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                out = run(*given)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / CALLS * 1e3)
    row["ms"] = {name: round(statistics.median(taken), 4) for name, taken in times.items()}
    return row


def hopper_here() -> str | None:
    """Why nothing can be run here; None if there is a GPU for it."""
    if jax.__version_info__ < JAX_NEEDED:
        return f"jax {jax.__version__} is installed; wanted {'.'.join(map(str, JAX_NEEDED))} or later"
    device = jax.devices()[0]
    gpu = gpu_variant(device.device_kind) if device.platform == "gpu" else None
    if gpu is None or gpu.architecture != "hopper":
        return f"there is no GPU of the Hopper generation here: jax's first device is {device.device_kind} ({device.platform})"
    return None


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    if why := hopper_here():
        print(f"gpu_first_run: {why}. Nothing was run.", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    data: dict[str, Any] = {
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind}, "numbers": {}, "times": {}, "left_out": [],
    }  # fmt: skip
    work = [("numbers", name, lambda f=feature: check(f)) for name, feature in features().items()]
    work += [
        ("numbers", f"pages: {name}", lambda f=feature: check_pages(f)) for name, feature in page_features().items()
    ]
    work += [("times", f"pages: {name}", lambda n=name: timed_pages(n)) for name in STEPS]
    parts = ("forward", "both passes")
    work += [
        ("times", f"{s} {m} {p}", lambda s=s, m=m, p=p: timed(s, m, p)) for p in parts for s in TIMED for m in MASKS
    ]
    for part, name, run in work:
        if time.monotonic() > end:
            data["left_out"].append(f"{part}: {name}")
            continue
        try:
            data[part][name] = run()
        except Exception as error:  # the compiler's or the driver's
            data[part][name] = {"agrees": False, "failure": f"{type(error).__name__}: {str(error)[:400]}"}
        print(part, name, data[part][name], flush=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    wrong = [name for name, row in data["numbers"].items() if not row["agrees"]]
    print(f"disagree: {', '.join(wrong) or 'none'}; left out for lack of time: {len(data['left_out'])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
