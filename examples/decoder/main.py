"""Train the decoder on Python's own manual, sharded over eight virtual devices; then prefill, decode and sample from it.

    python examples/decoder/main.py [--steps 240] [--picture FILE]

attention.json declares the attention: one file for training, prefill and decoding. Prints the plan of each, the loss next to
the entropy of single characters (the loss of a model that only counts them), how far decoding with a cache is from
the whole forward pass, and a sample. Exits with status 1 if the loss or the cache isn't what it should be.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import Attention

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from corpus import Alphabet, batches, corpus, unigram_entropy  # noqa: E402
from decoder_model import Cache, Decoder, Sizes, empty_cache, placed  # noqa: E402

LENGTH, BATCH = 128, 32


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


@nnx.jit(static_argnums=1)
def forward(model: Decoder, mode: str, tokens: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
    return model(tokens, mode, cache)


def train(model: Decoder, train_tokens: np.ndarray, valid_tokens: np.ndarray, steps: int, mesh: Any) -> dict[str, Any]:
    """Train; returns (step, loss) on training text and on held-out text."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(1, steps // 10), steps, 4e-4)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    rows = NamedSharding(mesh, P(("fsdp",), None))
    held_out = np.concatenate([r for r, _ in zip(batches(valid_tokens, BATCH, LENGTH, 1), range(4), strict=False)])
    held_out = jax.device_put(held_out, rows)
    found: dict[str, Any] = {"train": [], "held out": []}
    for step, batch in zip(range(steps), batches(train_tokens, BATCH, LENGTH, 0), strict=False):
        loss = train_step(model, optimizer, jax.device_put(batch, rows))
        if step % 20 == 0 or step == steps - 1:
            found["train"].append((step + 1, float(loss)))
            found["held out"].append((step + 1, float(evaluate(model, held_out))))
            print(
                f"step {step + 1:4}: loss {found['train'][-1][1]:.3f}, held out {found['held out'][-1][1]:.3f}",
                flush=True,
            )
    return found


def decoded_logits(model: Decoder, tokens: jax.Array, prompt: int) -> jax.Array:
    """The logits of every position: the prompt by prefill, the rest one by one from the cache."""
    batch, length = tokens.shape
    logits, cache = forward(model, "prefill", tokens[:, :prompt], empty_cache(model.sizes, batch, length))
    made = [logits]
    for at in range(prompt, length):
        logits, cache = forward(model, "autoregressive", tokens[:, at : at + 1], cache)
        made.append(logits)
    return jnp.concatenate(made, axis=1)


def sample(model: Decoder, prompt: np.ndarray, count: int, temperature: float, seed: int) -> np.ndarray:
    """Continue a prompt [batch, time] by `count` tokens."""
    logits, cache = forward(
        model, "prefill", jnp.asarray(prompt), empty_cache(model.sizes, len(prompt), prompt.shape[1] + count)
    )
    key, made = jax.random.key(seed), [prompt]
    for _ in range(count):
        key, now = jax.random.split(key)
        token = jax.random.categorical(now, logits[:, -1] / temperature)[:, None].astype(jnp.int32)
        made.append(np.asarray(token))
        logits, cache = forward(model, "autoregressive", token, cache)
    return np.concatenate(made, axis=1)


def draw(losses: dict[str, Any], entropy: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, style in (("", "default"), ("-dark", HERE.parent / "dark.mplstyle")):
        with pyplot.style.context(style):
            figure = _figure(losses, entropy)
            figure.savefig(path.with_stem(path.stem + name), dpi=120)
            pyplot.close(figure)


def _figure(losses: dict[str, Any], entropy: float) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, points in losses.items():
        axes.plot(*zip(*points, strict=True), label=name, marker=".")
    axes.axhline(entropy, color="gray", linestyle="--", label="entropy of single characters")
    axes.set(xlabel="step", ylabel="nats a character", title="The decoder on Python's manual", ylim=(0, None))
    axes.legend()
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--picture", type=Path, help="file for the loss curve (requires matplotlib)")
    options = parser.parse_args()
    began = time.monotonic()
    attend = Attention(HERE / "attention.json")
    mesh = attend.operation.metadata.mesh
    text = corpus()
    alphabet = Alphabet(text)
    tokens = alphabet.encode(text)
    cut = len(tokens) * 9 // 10
    model = placed(Decoder(Sizes(len(alphabet.symbols)), attend, nnx.Rngs(0)), mesh)
    weights = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    entropy = unigram_entropy(tokens[cut:])
    print(
        f"{len(text)} characters, {len(alphabet.symbols)} symbols; {weights} parameters on {mesh.devices.size} devices"
    )

    losses = train(model, tokens[:cut], tokens[cut:], options.steps, mesh)
    final = losses["held out"][-1][1]
    print(f"held-out loss {final:.3f} nats a character; single characters have {entropy:.3f}")

    rows = jnp.asarray(np.stack([tokens[cut + i * 100 : cut + i * 100 + 96] for i in range(2)]))
    whole, _ = forward(model, "train", rows)
    apart = float(jnp.abs(decoded_logits(model, rows, prompt=40) - whole).max() / jnp.abs(whole).max())
    print(
        f"prefill of 40 and 56 steps from the cache: logits differ from the whole forward pass by {apart:.1e} of the largest"
    )

    prompt = 'The "for" statement is used to'
    print("\n" + alphabet.decode(sample(model, alphabet.encode(prompt)[None].repeat(2, 0), 240, 0.7, 0)[0]) + "\n")
    for plan in attend.plans:
        print(f"{plan.implementation}: {plan.problem.describe()}")
    if options.picture is not None:
        draw(losses, entropy, options.picture)
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if final < 0.75 * entropy and apart < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
