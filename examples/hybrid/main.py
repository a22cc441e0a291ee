"""Train models of Qwen3-Next's and Nemotron-H's class on Python's own manual, over dp, sp and tp; then let them write.

    python examples/hybrid/main.py [--model qwen3_next] [--steps 30]

Each layer is declared in JSON: its attention, its recurrence, its convolution. Prints the plan of each, the loss beside the
entropy of single characters, how far decoding with the layers' states and keys is from the whole forward pass, and a sample.
Exits with status 1 if the loss or the decoding isn't what it should be.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Eight virtual devices; the loops of these small models don't repay all optimisations of the compiler.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "decoder")]
from corpus import Alphabet, batches, corpus, unigram_entropy  # noqa: E402
from hybrid_decoding import logits_in_parts, sample  # noqa: E402
from hybrid_model import Model  # noqa: E402
from hybrid_pasts import Whole  # noqa: E402
from hybrid_training import Trainer, train  # noqa: E402
from hybrid_weights import initial, placed  # noqa: E402

LENGTH, BATCH = 128, 8
FAMILIES = ("qwen3_next", "nemotron_h")


def plans(model: Model) -> list[str]:
    """A line for each kind of layer and each of its operations: what ran, and what is sent along the split sequence."""
    lines = []
    for layer in {layer.kind: layer for layer in model.layers}.values():
        which = ", ".join(map(str, layer.declared.layers))
        for attend in filter(None, (layer.attention, layer.recurrence, layer.convolution)):
            plan = attend.plans[0]
            lines.append(f"layers {which}: {plan.implementation}, {plan.placement.strategy}")
        if not layer.declared.declarations:
            lines.append(f"layers {which}: {layer.kind}, nothing declared")
    return lines


def run(name: str, steps: int) -> bool:
    """Train a model and let it write; whether the loss and the decoding are what they should be."""
    text = corpus()
    alphabet = Alphabet(text)
    tokens = alphabet.encode(text)
    cut = len(tokens) * 9 // 10
    model = Model.load(name)
    weights = initial(model, 0)
    count = sum(x.size for x in weights.values())
    print(f"{name}: {count} parameters on {model.mesh.devices.size} devices, {dict(model.mesh.shape)}", flush=True)
    trainer = Trainer(model, placed(weights, model.mesh), steps)
    held_out = next(batches(tokens[cut:], BATCH, LENGTH, 1))
    losses = train(trainer, batches(tokens[:cut], BATCH, LENGTH, 0), held_out, steps, every=10)
    for line in plans(model):
        print(line)
    final, entropy = losses[-1][2], unigram_entropy(tokens[cut:])
    print(f"held-out loss {final:.3f} nats a character; single characters have {entropy:.3f}")

    # From here on, on one device.
    alone, weights = Model.load(name, mesh=None, sequence_parallel="auto"), jax.device_get(trainer.weights)
    rows = jnp.asarray(tokens[cut : cut + 96].reshape(1, -1))
    whole = jax.jit(lambda weights, rows: alone(weights, rows, Whole(alone, rows)))(weights, rows)
    found = logits_in_parts(alone, weights, np.asarray(rows), np.array([64]), chunk=32)
    apart = float(np.abs(found - whole).max() / np.abs(whole).max())
    print(f"two chunks of 32 and 32 steps: logits differ from the whole forward pass by {apart:.1e} of the largest")
    prompt = alphabet.encode('The "for" statement is used to')
    print("\n" + alphabet.decode(sample(alone, weights, prompt, 200, temperature=0.7, seed=0)) + "\n")
    return final < 0.75 * entropy and apart < 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, action="append", help="by default both, one after the other")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    began = time.monotonic()
    right = [run(name, options.steps) for name in options.model or FAMILIES]
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
