"""Tiny random models of Qwen3-Next's and Nemotron-H's class from transformers: their weights, and their logits.

With torch and transformers installed, `python tests/examples/hybrid_decoder_probe.py` writes tests/data/hybrid_decoders.npz. Of
each model of examples/hybrid, by its name: `weights/NAME` as in transformers' state_dict, float16; `tokens`, prompts of PROMPTS
tokens and then NEW that the model chooses, one sequence after the other; and `logits` float32 [tokens, vocabulary], from prefill
of each prompt by itself and NEW steps from the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["MODELS", "NEW", "PROMPTS", "RECORD"]

FOLDER = Path(__file__).parents[2] / "examples" / "hybrid"
RECORD = Path(__file__).parents[1] / "data" / "hybrid_decoders.npz"
MODELS = ("qwen3_next", "nemotron_h")
PROMPTS, NEW = (70, 5, 37, 20), 64
# Sums of strong decays have few digits in transformers' chunks of tokens; its step from Nemotron-H's cache doesn't clip dt.
_SHIFTS = {("qwen3_next", "A_log"): -4.0, ("nemotron_h", "dt_bias"): 4.0}


def _model(name: str) -> Any:
    """A random model, all of whose weights are float16 values and matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(FOLDER / name)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            drawn = torch.randn(weight.shape)
            if weight.ndim > 1:
                weight.copy_(1.5 * drawn * weight.shape[-1] ** -0.5)
            else:  # norms, decays, biases: around what transformers starts with
                weight.add_(_SHIFTS.get((name, key.rpartition(".")[2]), 0.0) + 0.2 * drawn)
            weight.copy_(weight.half())
    return model


def _sequence(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logits of a prompt and NEW greedy tokens; decoding from the cache gives what the whole sequence gives."""
    import torch

    tokens = torch.from_numpy(prompt)[None]
    with torch.no_grad():
        made = model(tokens, use_cache=True, logits_to_keep=0)
        logits = [made.logits]
        for _ in range(NEW):
            token = made.logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], 1)
            made = model(token, cache=made.past_key_values, use_cache=True)
            logits.append(made.logits)
        found, whole = torch.cat(logits, 1), model(tokens, use_cache=False, logits_to_keep=0).logits
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-5 * float(whole.abs().max()))
    best = found[0, len(prompt) - 1 : -1].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4 * float(whole.abs().max())
    return tokens[0].numpy(), found[0].numpy()


def main() -> None:
    record: dict[str, np.ndarray] = {}
    for name in MODELS:
        model, random = _model(name), np.random.default_rng(0)
        made = [_sequence(model, random.integers(0, model.config.vocab_size, length)) for length in PROMPTS]
        record[f"{name}/tokens"] = np.concatenate([tokens for tokens, _ in made]).astype(np.int32)
        record[f"{name}/logits"] = np.concatenate([logits for _, logits in made])
        record |= {f"{name}/weights/{key}": weight.half().numpy() for key, weight in model.state_dict().items()}
    np.savez_compressed(RECORD, **record)


if __name__ == "__main__":
    main()
