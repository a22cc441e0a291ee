"""Masks and other features of calls whose kernels in Mosaic GPU are compiled: of 1024 tokens, or of 5 queries and 8192 keys."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attnops import (
    T5,
    ALiBi,
    Causal,
    Chunked,
    Dense,
    Full,
    Lengths,
    Mask,
    Positions,
    Prefix,
    RelativeBias,
    RelativeBias2D,
    ScoreFunction,
    SegmentIds,
    SlidingWindow,
    register_score_function,
)
from attnops.masks import Blocks

_IDS = jax.ShapeDtypeStruct((1, 1024), "int32")
MASKS: dict[str, Mask] = {
    "full": Full(),
    "window": Causal() & SlidingWindow(100),
    "chunks": Causal() & Chunked(96),
    "prefix": Prefix(100) | Causal(),
    "negated": ~SlidingWindow(20, 20),
    "blocks": Blocks(np.eye(8, dtype=bool), 128, 128),
    "small_blocks": Blocks(np.tri(16, dtype=bool), 64, 64) & Causal(),
    "segments": Causal() & SegmentIds(_IDS, _IDS),
    "lengths": Causal() & Lengths(jax.ShapeDtypeStruct((1,), "int32")),
    "positions": Positions(_IDS, _IDS),
}


@register_score_function("mosaic_compile.gated")
def _gated(x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return x + 0.01 * head.astype(x.dtype) * (kv - q).astype(x.dtype)


@register_score_function("mosaic_compile.repeated")
def _repeated(x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return x + 0.1 * x * jax.nn.sigmoid(x) + jax.nn.relu(x)


GATED, REPEATED = ScoreFunction("mosaic_compile.gated"), ScoreFunction("mosaic_compile.repeated")
DROPOUT = {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.ShapeDtypeStruct((2,), "uint32")}
FEATURES: list[dict[str, Any]] = [
    {"logits_soft_cap": 20.0},
    {"softmax_aux": jax.ShapeDtypeStruct((4,), "float32")},
    {"return_lse": True},
    {"query_offset": jax.ShapeDtypeStruct((1,), "int32")},
    {"bias": jax.ShapeDtypeStruct((1, 4, 1024, 1024), "float32")},
    {"bias": jax.ShapeDtypeStruct((1, 1, 1, 1024), "bfloat16")},
    {"score": ALiBi()},
    {"score": GATED},
    {"score": RelativeBias(buckets=T5()), "table": jax.ShapeDtypeStruct((32, 4), "float32")},
    {
        "score": RelativeBias(buckets=T5()),
        "table": jax.ShapeDtypeStruct((32, 4), "float32"),
        "mask": Positions(_IDS, _IDS),
    },
    {"score": RelativeBias2D(grid=(32, 32)), "table": jax.ShapeDtypeStruct((63 * 63, 4), "float32"), "mask": Full()},
    {
        "score": RelativeBias2D(grid=(32, 32), decomposed=True),
        "mask": Full(),
        **dict.fromkeys(("height", "width"), jax.ShapeDtypeStruct((1, 4, 1024, 32), "float32")),
    },
    {"mask": Dense(jax.ShapeDtypeStruct((1, 1, 1024, 1024), "bool"))},
    DROPOUT,
]
# A mask and another feature: a soft cap with each, and each with a window.
PAIRS: list[dict[str, Any]] = [
    *({"mask": mask, "logits_soft_cap": 20.0} for mask in MASKS.values()),
    *({"mask": MASKS["window"]} | call for call in FEATURES[1:] if "mask" not in call),
]
FEW: dict[str, dict[str, Any]] = {
    "decoding": {},
    "sinks": {"softmax_aux": jax.ShapeDtypeStruct((8,), "float32")},
    "lengths": {"mask": Causal() & Lengths(jax.ShapeDtypeStruct((1,), "int32"))},
    "segments": {
        "mask": Causal() & SegmentIds(jax.ShapeDtypeStruct((1, 5), "int32"), jax.ShapeDtypeStruct((1, 8192), "int32"))
    },
    "dense": {"mask": Dense(jax.ShapeDtypeStruct((1, 8, 5, 8192), "bool"))},
    "bias": {"bias": jax.ShapeDtypeStruct((1, 8, 5, 8192), "float32")},
    "alibi": {"score": ALiBi()},
    "score": {"score": GATED},
    "distance": {"score": RelativeBias(buckets=T5()), "table": jax.ShapeDtypeStruct((32, 8), "float32")},
    "lse": {"return_lse": True},
    "dropout": DROPOUT,
}
