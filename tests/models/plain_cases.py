"""What attnops declares for a config, in the words of what transformers_probe.py catches."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnops import ModelDeclaration

LENGTH = 24

# Name: (part, heads, head dim, tokens, layers) of models of images.
IMAGES: dict[str, tuple[str | None, int, int, int, int]] = {
    "clip-vit-base-patch32": ("vision", 12, 64, 7 * 7 + 1, 12),
    "dinov2-base": (None, 12, 64, 37 * 37 + 1, 12),
    "vit-base-patch16-224": (None, 12, 64, 14 * 14 + 1, 12),
}


def declared_calls(config: Any, part: str = "", length: int = LENGTH) -> list[dict[str, Any]]:
    """Each layer's call. length: of tokens, if the config doesn't have the size of an image."""
    sizes = {} if "image_size" in config else {"q_len": length}
    sizes |= ({"part": part} if part else {}) | ({"kv_len": length} if part == "cross" else {})
    made: dict[int, dict[str, Any]] = {}
    layers = []
    for layer in ModelDeclaration.from_config(config, **sizes).layers:
        declaration = layer.declaration
        if id(declaration) not in made:
            made[id(declaration)] = _call(declaration)
        layers.append(made[id(declaration)])
    return layers


def _call(declaration: Any) -> dict[str, Any]:
    call, metadata = declaration.call, declaration.metadata
    shapes = call.shapes()
    scale = metadata.get("softmax_scale") if call.softmax_scale is None else call.softmax_scale
    return {
        "q_heads": shapes["query"].shape[2],
        "kv_heads": shapes["key"].shape[2],
        "head_dim": shapes["query"].shape[3],
        "value_dim": shapes["value"].shape[3],
        "scale": shapes["query"].shape[3] ** -0.5 if scale is None else scale,
        "soft_cap": call.logits_soft_cap,
        "sinks": list(shapes["softmax_aux"].shape) if "softmax_aux" in shapes else None,
        "dropout": metadata.get("dropout_prob", 0.0),
        "rows": _rows(call.mask, shapes["query"].shape[1], shapes["key"].shape[1]),
    }


def _rows(mask: Any, q_len: int, kv_len: int) -> list[list[int]]:
    """First and last visible key of every row; there are no holes between them."""
    seen = np.asarray(mask.materialise(slice(0, q_len), slice(0, kv_len), query_offset=0)).reshape(q_len, kv_len)
    rows = [[int(row.argmax()), int(kv_len - 1 - row[::-1].argmax())] for row in seen]
    assert int(seen.sum()) == sum(last - first + 1 for first, last in rows)
    return rows
