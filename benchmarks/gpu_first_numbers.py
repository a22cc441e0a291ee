"""The numbers of gpu_first_run.py: each feature of the kernels in Mosaic GPU against the float64 reference, and repeated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
from attnops.operators.call.key_columns import KeyColumns
from attnops.operators.kernels.local_mask import Dropout, dropout_seed
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

__all__ = ["INTERPRETED", "LENGTH", "check", "features"]

REPEATS, LENGTH = 50, 600
FORWARD = {"bfloat16": 2e-2, "float16": 3e-3}  # published tolerances, and twice as much for gradients
# The kernel to declare for a generation's kernels to be interpreted.
INTERPRETED = {"hopper": "mosaic", "blackwell": "blackwell"}


def features(length: int = LENGTH) -> dict[str, dict[str, Any]]:
    """Calls of that many tokens: mask, what else the call has, lengths (q, kv), heads (q, kv), dims (query, value), dtype,
    layout, the dtype that keys and values are stored in, whether values are columns of the keys."""
    third, both = length // 3, (length, length)
    ids = (np.arange(length) // (2 * length // 7)).astype(np.int32)[None]
    positions = np.arange(length, dtype=np.int32)[None] // 2
    dims = (32, 32), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (64, 128)
    wide = {f"dims {one}": {"dims": one} for one in dims}
    rng, key = np.random.default_rng(1), jax.random.key(3)
    bias = rng.standard_normal((1, 4, *both)).astype(np.float32)
    dropped = {"dropout_prob": 0.3, "deterministic": False, "dropout_rng": key}
    keep = np.asarray(Dropout(dropout_seed(key), 0.3, 0, 0, 0).keep_all(1, 4, length, slice(0, length)))
    dense = rng.random((1, 1, *both)) < 0.7
    made: dict[str, dict[str, Any]] = {
        "causal": {},
        "full": {"mask": Full()},
        "float16": {"dtype": "float16"},
        "bhtd": {"layout": "bhtd"},
        "window": {"mask": Causal() & SlidingWindow(100)},
        "chunks": {"mask": Causal() & Chunked(96)},
        "prefix": {"mask": Prefix(70) | Causal()},
        "negated": {"mask": ~SlidingWindow(30, 30)},
        "gqa": {"heads": (8, 2)},
        "few queries": {"lengths": (5, length), "heads": (8, 2), "call": {"query_offset": length - 5}},
        "ragged": {"lengths": (length - 83, length + 1), "mask": Full()},
        "offset": {"lengths": (third, length), "call": {"query_offset": length - third}},
        "traced offset": {"lengths": (third, length), "call": {"query_offset": np.array([length - third], np.int32)}},
        "packed": {"call": {"q_segment_ids": ids, "kv_segment_ids": ids}, "same": ids},
        "lengths": {"call": {"kv_lengths": np.array([length // 2 + 33], np.int32)}, "keys": length // 2 + 33},
        "positions": {"mask": Positions(jnp.asarray(positions), jnp.asarray(positions)), "causal_by": positions},
        "soft cap": {"call": {"logits_soft_cap": 5.0}},
        "sinks": {"call": {"softmax_aux": np.linspace(-2, 2, 4, dtype=np.float32)}},
        "bias": {"call": {"bias": bias}, "known": {"bias": bias}},
        "alibi": {"call": {"score": ALiBi()}, "known": {"score": ALiBi()}},
        "dropout": {"call": dropped, "known": {"keep": keep, "keep_probability": 0.7}},
        "boolean array": {"call": {"mask": dense}, "seen": dense[0, 0]},
        "int8": {"stored": "int8"},
        "float8_e4m3fn": {"stored": "float8_e4m3fn"},
        "int8, few queries": {
            "stored": "int8",
            "lengths": (1, length),
            "heads": (8, 2),
            "call": {"query_offset": length - 1},
        },
        "latents": {"latents": True, "dims": (576, 512), "heads": (2, 1)},
        "latents, few queries": {
            "latents": True,
            "dims": (576, 512),
            "heads": (16, 1),
            "lengths": (3, length),
            "call": {"query_offset": length - 3},
        },
        **wide,
    }
    return {name: {"lengths": both} | feature for name, feature in made.items()}


def operation(generation: str, dtype: str, interpret: bool) -> Any:
    """flash_attn2 with a generation's kernels."""
    config = {"kernel": INTERPRETED[generation], "interpret": True} if interpret else {"kernel": "mosaic"}
    metadata = OperationMetadata(
        fallback="error", tuning="off", runtime_dtype=dtype, operation_configs={"flash_attn2": config}
    )
    return OperationRegistry.create("flash_attn2", metadata)


def check(feature: dict[str, Any], generation: str, interpret: bool = False) -> dict[str, Any]:
    """The greatest errors, and whether repeated calls agree bit by bit; or why the kernels refuse the call. Interpreted kernels
    run once more only."""
    repeats = 1 if interpret else REPEATS
    dtype, layout = feature.get("dtype", "bfloat16"), feature.get("layout", "bthd")
    (q_len, kv_len), (heads, kv_heads) = feature["lengths"], feature.get("heads", (4, 4))
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
    if "stored" in feature:
        qkv[1:], scales = zip(*(_quantised(x, feature["stored"]) for x in qkv[1:]), strict=True)
        call |= dict(zip(("key_scale", "value_scale"), scales, strict=True))
    wide = [x.astype(np.float64) for x in (*qkv, pull)]
    wide[1:3] = [x * call.get(name, 1.0) for name, x in zip(("key_scale", "value_scale"), wide[1:3], strict=True)]
    columns = ()
    if "latents" in feature:
        wide[2], columns, qkv = wide[1][..., :value_dim], (KeyColumns(value_dim),), qkv[:2]
    want = reference_attention(*wide[:3], **known)
    attend = operation(generation, dtype, interpret)
    traced = {name: jnp.asarray(x) for name, x in call.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in call.items() if name not in traced} | {"mask": mask, "layout": layout}
    static |= {"causal": False} if "seen" in feature else {}

    def order(x: Any) -> Any:
        return x if layout == "bthd" else x.swapaxes(1, 2)

    forward_only = "stored" in feature or "latents" in feature
    static |= {"mode": "prefill"} if forward_only else {}

    def run(*arrays: Any) -> Any:
        return attend(*arrays, *columns, return_lse=True, **static, **traced)

    arrays = [order(jnp.asarray(x)) for x in qkv]
    plan = attend.plan(*arrays, *columns, return_lse=True, **static, **traced)
    if plan.kind == "refused":
        return {"agrees": True, "refused": [reason.code for rejected in plan.rejected for reason in rejected.reasons]}
    assert plan.method == f"forward_{generation}", plan.method
    forward = jax.jit(lambda *x: (run(*x).attention_outputs, run(*x).lse))
    first = jax.block_until_ready(forward(*arrays))
    alike = all(bool((a == b).all()) for _ in range(repeats) for a, b in zip(first, forward(*arrays), strict=True))
    row: dict[str, Any] = {"alike": alike, "forward": _error(order(first[0]), want.output)}
    row["lse"] = float(np.abs(np.asarray(first[1], np.float64) - want.lse)[np.isfinite(want.lse)].max())
    bounds = [(row["forward"], FORWARD[dtype]), (row["lse"], 1e-2)]
    if forward_only:
        return row | {"agrees": alike and all(error <= bound for error, bound in bounds)}
    gradient = jax.jit(lambda *x: jax.vjp(lambda *y: run(*y).attention_outputs, *x)[1](order(jnp.asarray(pull))))
    exact, terms = reference_gradients(*wide, **known), term_sizes(*wide, **known)
    found = jax.block_until_ready(gradient(*arrays))
    alike &= all(bool((a == b).all()) for _ in range(repeats) for a, b in zip(found, gradient(*arrays), strict=True))
    row["alike"] = alike
    for name, got in zip(("query", "key", "value"), found, strict=True):
        sizes = row_sizes(exact[name], terms[name])
        row[f"d_{name}"] = row_error(np.asarray(order(got), np.float64), exact[name], sizes, jnp.dtype(dtype))
        bounds.append((row[f"d_{name}"], 2 * FORWARD[dtype]))
    row["agrees"] = alike and all(error <= bound for error, bound in bounds)
    return row


def _quantised(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of an 8-bit dtype, and the scale of each token and head."""
    stored = jnp.dtype(dtype)
    greatest = 127.0 if stored.kind == "i" else float(jnp.finfo(stored).max)
    wide = np.asarray(x, np.float32)
    scale = np.abs(wide).max(-1, keepdims=True) / np.float32(greatest)
    return (np.rint(wide / scale) if stored.kind == "i" else wide / scale).astype(stored), scale


def _error(got: Any, want: np.ndarray) -> float:
    """The greatest error, relative to the size of its row or a twentieth of the largest number, whichever is greater."""
    sizes = np.maximum(row_sizes(want), np.abs(want).max() / 20)
    return row_error(np.asarray(got, np.float64), want, sizes)
