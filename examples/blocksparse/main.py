"""Train the decoder of examples/decoder twice: with all keys before each token, and with the blocks of keys that it chooses.

    python examples/blocksparse/main.py [--steps 100]

Both start with the same weights and see the same text. Prints the plan of the chosen blocks, both losses next to the entropy of
single characters, and how far the gradients of chosen blocks are from those of the reference's formula. Exits with status 1 if
the model with chosen blocks learned too little, or if the two implementations of its attention disagree.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from attnops import Attention

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "decoder")]
from choose_blocks import ChosenAttention  # noqa: E402
from corpus import Alphabet, batches, corpus, unigram_entropy  # noqa: E402
from decoder_model import Decoder, Sizes  # noqa: E402

LENGTH, BATCH, BLOCK, CHOSEN = 256, 8, 32, 2


def build(symbols: int, *, chosen: bool, operation: str = "blocksparse") -> Decoder:
    """The decoder with attention to all keys, or to chosen blocks; the weights are the same."""
    attend: Any = Attention(operation, fallback="error", tuning="off")
    attend = ChosenAttention(attend, BLOCK, CHOSEN) if chosen else attend
    return Decoder(Sizes(symbols, layers=2), attend, nnx.Rngs(0))


def loss_of(model: Decoder, rows: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats, of each character given those before it."""
    logits, _ = model(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, rows)
    optimizer.update(model, gradients)
    return loss


evaluate = nnx.jit(loss_of)


def train(model: Decoder, tokens: np.ndarray, held_out: jax.Array, steps: int) -> float:
    """Train; returns the loss on held-out text."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(1, steps // 10), steps, 4e-4)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    for _, batch in zip(range(steps), batches(tokens, BATCH, LENGTH, 0), strict=False):
        train_step(model, optimizer, batch)
    return float(evaluate(model, held_out))


def disagreement(tokens: np.ndarray, symbols: int) -> float:
    """The difference between gradients by visited tiles and by whole logits, relative to the largest."""
    rows = jnp.asarray(next(batches(tokens, 2, 4 * BLOCK, 3)))
    found = []
    for path in ("blockwise", "plain"):
        attend = Attention("vanilla", path=path)
        model = Decoder(Sizes(symbols, layers=2), ChosenAttention(attend, BLOCK, CHOSEN), nnx.Rngs(0))
        found.append(jax.tree.leaves(nnx.jit(nnx.grad(loss_of))(model, rows)))
    largest = max(float(jnp.abs(x).max()) for x in found[1])
    return max(float(jnp.abs(a - b).max()) for a, b in zip(*found, strict=True)) / largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    began = time.monotonic()
    text = corpus()
    alphabet = Alphabet(text)
    tokens = alphabet.encode(text)
    cut, symbols = len(tokens) * 9 // 10, len(alphabet.symbols)
    held_out = jnp.asarray(
        np.concatenate([r for r, _ in zip(batches(tokens[cut:], BATCH, LENGTH, 1), range(2), strict=False)])
    )
    entropy = unigram_entropy(tokens[cut:])
    losses = {}
    for name, chosen in (("all keys", False), (f"{CHOSEN} of the blocks before, and the own", True)):
        model, start = build(symbols, chosen=chosen), time.monotonic()
        losses[name] = train(model, tokens[:cut], held_out, options.steps)
        print(
            f"{name}: held-out loss {losses[name]:.3f} nats a character, {time.monotonic() - start:.0f} s", flush=True
        )
    for note in model.blocks[0].attention.attend.attend.plans[0].notes:
        print(f"  {note}")
    apart = disagreement(tokens, symbols)
    print(
        f"single characters have {entropy:.3f}; gradients by tiles and by whole logits differ by {apart:.1e} of the largest"
    )
    print(f"{time.monotonic() - began:.0f} s")
    dense, sparse = losses.values()
    return 0 if sparse < min(0.85 * entropy, 1.1 * dense) and apart < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
