"""Train models of Qwen3-Next's and Nemotron-H's class on Python's own manual, over dp, sp and tp; then serve them.

    python examples/hybrid/main.py [--model qwen3_next] [--steps 24]

Each layer is declared in JSON: its attention, its recurrence, its convolution. Prints what each runs and how it splits sequences,
the loss beside the entropy of single characters, and how prompts are served together. Exits with status 1 if the loss isn't well
below that of counting characters, or a token served isn't the one that the whole forward pass chooses.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Eight virtual devices. Small models on a CPU don't repay all optimisations of the compiler.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("decoder", "serve"))]
from corpus import Alphabet, batches, corpus, unigram_entropy  # noqa: E402
from hybrid_engine import engine  # noqa: E402
from hybrid_model import Model  # noqa: E402
from hybrid_pasts import Whole  # noqa: E402
from hybrid_serving import Steps  # noqa: E402
from hybrid_training import Trainer, train  # noqa: E402
from hybrid_weights import initial, placed  # noqa: E402
from serving_loop import Request, ServingLoop  # noqa: E402

LENGTH, BATCH, NEW = 128, 8, 40
FAMILIES = ("qwen3_next", "nemotron_h")


def plans(model: Model) -> list[str]:
    """A line for each kind of layer and each of its operations: what ran, and how it splits sequences."""
    lines = []
    for layer in {layer.kind: layer for layer in model.layers}.values():
        which = "layers " + ", ".join(map(str, layer.declared.layers))
        for attend in filter(None, (layer.attention, layer.recurrence, layer.convolution)):
            plan = attend.plans[0]
            placement = plan.placement.sequence if attend is layer.attention else plan.placement
            lines.append(f"{which}: {plan.implementation}, sequences by {placement.strategy!r}")
        if not layer.declared.declarations:
            lines.append(f"{which}: {layer.kind}, which has nothing to declare")
    return lines


def prompts(tokens: np.ndarray, count: int) -> list[Request]:
    """Prompts of 40 to 80 tokens from the text, of which the first 36 are the same."""
    asked = []
    for n in range(count):
        start = 1000 * (n + 1)
        own = tokens[start : start + 4 + 40 * n // max(1, count - 1)]
        asked.append(Request(str(n), [*tokens[:36].tolist(), *own.tolist()], NEW))
    return asked


def run(name: str, steps: int) -> bool:
    """Train a model and serve it; whether the loss and the tokens are what they should be."""
    text = corpus()
    alphabet = Alphabet(text)
    tokens = alphabet.encode(text)
    cut = len(tokens) * 9 // 10
    model = Model.load(name)
    weights = initial(model, 0)
    count = sum(x.size for x in weights.values())
    print(f"{name}: {count} parameters on {model.mesh.devices.size} devices, {dict(model.mesh.shape)}", flush=True)
    trainer = Trainer(model, placed(weights, model.mesh), steps)
    train(trainer, batches(tokens[:cut], BATCH, LENGTH, 0), steps, every=8)
    print("\n".join(plans(model)), flush=True)

    # From here on, on one device.
    alone, weights = (
        Model.load(name, mesh=None, sequence_parallel="auto"),
        placed(jax.device_get(trainer.weights), None),
    )
    whole = jax.jit(lambda weights, rows: jax.nn.log_softmax(alone(weights, rows, Whole(alone, rows))))
    held_out = next(batches(tokens[cut:], BATCH, LENGTH, 1))
    chances = np.asarray(whole(weights, held_out[:, :-1]))
    final, entropy = -np.take_along_axis(chances, held_out[:, 1:, None], -1).mean(), unigram_entropy(tokens[cut:])
    print(f"held-out loss {final:.3f} nats a character; single characters have {entropy:.3f}", flush=True)

    loop, asked = ServingLoop(engine(Steps.load(name), weights)), prompts(tokens[cut:], BATCH)
    loop.serve(asked)
    loop.pool.check()
    print(f"served {len(asked)} prompts, {loop.slots} at a time, in {len(loop.totals.moments)} steps: "
          f"{loop.totals.prefilled} tokens of prompts, {loop.totals.matched} more from the cache")  # fmt: skip
    rows = np.zeros((BATCH, LENGTH), np.int32)
    for row, request in zip(rows, asked, strict=True):
        row[: len(request.context)] = request.context
    logits = np.asarray(whole(weights, rows))
    same, apart = 0, 0.0
    for row, request in zip(logits, asked, strict=True):
        at = len(request.prompt) - 1
        best = np.sort(row[at : at + NEW], -1)[:, :-3:-1]
        same += row[at : at + NEW].argmax(-1).tolist() == request.out
        apart = max(apart, float(np.abs(best[:, 0] - best[:, 1] - request.leads).max()))
    print(
        f"{same} of {len(asked)} got the tokens that the whole forward pass chooses; leads of their logits differ by {apart:.0e}"
    )
    return final < 0.8 * entropy and same == len(asked) and apart < 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, action="append", help="by default both, one after the other")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    began = time.monotonic()
    right = [run(name, options.steps) for name in options.model or FAMILIES]
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
