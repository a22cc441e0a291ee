"""A video-diffusion-style model on declared attention: handwritten digits that move, made from noise and a line of text.

    python examples/video/main.py [--steps 500] [--picture FILE]      (needs flax, optax, scikit-learn)

self_attention.json declares the attention over all patches of all frames (not causal), cross_attention.json that to a text of
another length, padded, of which the first `kv_lengths` letters count. Trains by flow matching; prints the loss with the right
text and with another video's text on held-out videos. Ends with status 1 if the text doesn't help.
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
sys.path.insert(0, str(HERE))
from video_model import FRAMES, LONGEST_TEXT, SIDE, Denoiser  # noqa: E402

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WAYS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
BATCH = 16


def videos(images: np.ndarray, labels: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(videos in -1..1, texts, their lengths): 8 x 8 digits that cross a field of 12 x 12."""
    random = np.random.default_rng(seed)
    made = np.full((count, FRAMES, SIDE, SIDE), -1, np.float32)
    lines = []
    for number in range(count):
        which, way = random.integers(len(images)), random.choice(list(WAYS))
        step = np.array(WAYS[way])
        start = np.where(step > 0, 0, np.where(step < 0, SIDE - 8, random.integers(0, SIDE - 7)))
        for frame in range(FRAMES):
            row, column = start + step * round(frame * (SIDE - 8) / (FRAMES - 1))
            made[number, frame, row : row + 8, column : column + 8] = images[which] / 8 - 1
        lines.append(f"a {NAMES[labels[which]]} moving {way}")
    return made, *written(lines)


def written(lines: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(letters int32 [lines, LONGEST_TEXT], padded with zeros, how many count)."""
    text = np.zeros((len(lines), LONGEST_TEXT), np.int32)
    for number, line in enumerate(lines):
        text[number, : len(line)] = [ord(c) for c in line]
    return text, np.array([len(line) for line in lines], np.int32)


def noised(clean: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(noisy videos, levels, velocities): straight lines from video to noise."""
    of_level, of_noise = jax.random.split(key)
    level = jax.random.uniform(of_level, (len(clean),))
    noise = jax.random.normal(of_noise, clean.shape)
    share = level[:, None, None, None]
    return (1 - share) * clean + share * noise, level, noise - clean


def loss_of(model: Denoiser, clean: jax.Array, text: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
    noisy, level, velocity = noised(clean, key)
    return ((model(noisy, level, text, lengths) - velocity) ** 2).mean()


@nnx.jit
def train_step(model: Denoiser, optimizer: nnx.Optimizer, batch: Any, key: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, *batch, key)
    optimizer.update(model, gradients)
    return loss


evaluate = nnx.jit(loss_of)


@nnx.jit
def denoise(model: Denoiser, x: jax.Array, level: jax.Array, text: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(x, jnp.full(len(x), level), text, lengths)


def sample(model: Denoiser, lines: list[str], seed: int, steps: int = 32) -> np.ndarray:
    """Videos for lines of text, from noise."""
    text, lengths = (jnp.asarray(x) for x in written(lines))
    x = jax.random.normal(jax.random.key(seed), (len(lines), FRAMES, SIDE, SIDE))
    for step in range(steps, 0, -1):
        x = x - denoise(model, x, jnp.float32(step / steps), text, lengths) / steps
    return np.asarray(x)


def build(seed: int = 0) -> tuple[Denoiser, Attention, Attention]:
    of_video, of_text = Attention(HERE / "self_attention.json"), Attention(HERE / "cross_attention.json")
    return Denoiser(of_video, of_text, nnx.Rngs(seed)), of_video, of_text


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images.astype(np.float32), data.target


def train(model: Denoiser, steps: int) -> tuple[list[tuple[int, float]], float, float]:
    """(losses, held-out loss with the right text, with that of another video)."""
    images, labels = digits()
    optimizer = nnx.Optimizer(
        model, optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 40, max(steps, 41), 1e-4)), wrt=nnx.Param
    )
    losses = []
    for step in range(steps):
        batch = videos(images[:1500], labels[:1500], BATCH, seed=step)
        loss = train_step(model, optimizer, batch, jax.random.key(step))
        if step % 25 == 0 or step == steps - 1:
            losses.append((step + 1, float(loss)))
            print(f"step {step + 1:4}: loss {losses[-1][1]:.3f}", flush=True)
    clean, text, lengths = videos(images[1500:], labels[1500:], 64, seed=10**6)
    right, wrong = [], []
    for at in range(0, 64, BATCH):
        part, key = slice(at, at + BATCH), jax.random.key(at)
        right.append(evaluate(model, clean[part], text[part], lengths[part], key))
        wrong.append(evaluate(model, clean[part], np.roll(text, 7, 0)[part], np.roll(lengths, 7)[part], key))
    return losses, float(np.mean(right)), float(np.mean(wrong))


def draw(model: Denoiser, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = ["a zero moving right", "a one moving down", "a three moving left", "a six moving up"]
    made = sample(model, lines, seed=3)
    figure, axes = pyplot.subplots(len(lines), FRAMES, figsize=(9, 3.4), layout="constrained")
    for row, line in enumerate(lines):
        for frame in range(FRAMES):
            axes[row, frame].imshow(made[row, frame], cmap="gray", vmin=-1, vmax=1)
            axes[row, frame].set_axis_off()
        axes[row, 0].set_title(line, loc="left", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", type=Path, help="where made videos go (needs matplotlib)")
    options = parser.parse_args()
    began = time.monotonic()
    model, of_video, of_text = build()
    _, right, wrong = train(model, options.steps)
    print(f"held out: loss {right:.3f} with the right text, {wrong:.3f} with another's")
    for plan in (of_video.plans[0], of_text.plans[0]):
        print(f"{plan.implementation}: {plan.problem.describe()}; {plan.problem.mask.describe()}")
    if options.picture is not None:
        draw(model, options.picture)
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if right < 0.99 * wrong else 1


if __name__ == "__main__":
    sys.exit(main())
