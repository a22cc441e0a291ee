"""A small video diffusion model on declared attention: moving handwritten digits, denoised.

    python examples/video/main.py [--steps 400] [--picture FILE]      (requires flax, optax, scikit-learn)

self_attention.json declares the attention over all patches of all frames (not causal), cross_attention.json that to a padded line
of text, of which the first `kv_lengths` letters count. Trains by flow matching on videos at all noise
levels; then denoises held-out videos in one step. Exits with status 1 if the remaining error isn't well below that
of the best linear fit from noisy to clean pixels, which is the best that a single pixel allows.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
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
LEVEL = 0.5  # noise level of the held-out videos


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


@nnx.jit
def cleaned(model: Denoiser, noisy: jax.Array, level: jax.Array, text: jax.Array, lengths: jax.Array) -> jax.Array:
    """The model's estimate of the clean videos."""
    return noisy - level[:, None, None, None] * model(noisy, level, text, lengths)


def held_out(level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(clean videos of digits that training hasn't seen, the same at a noise level, texts, lengths)."""
    images, labels = digits()
    clean, text, lengths = videos(images[1500:], labels[1500:], BATCH, seed=10**6)
    noise = np.random.default_rng(1).standard_normal(clean.shape, np.float32)
    return clean, (1 - level) * clean + level * noise, text, lengths


def errors(model: Denoiser, level: float) -> tuple[float, float]:
    """Mean squared error of the model's clean videos, and of the best linear fit from noisy to clean pixels."""
    clean, noisy, text, lengths = held_out(level)
    made = np.asarray(cleaned(model, noisy, np.full(len(noisy), level, np.float32), text, lengths))
    slope, offset = np.polyfit(noisy.ravel(), clean.ravel(), 1)
    return float(((made - clean) ** 2).mean()), float(((slope * noisy + offset - clean) ** 2).mean())


def build(seed: int = 0) -> tuple[Denoiser, Attention, Attention]:
    of_video, of_text = Attention(HERE / "self_attention.json"), Attention(HERE / "cross_attention.json")
    return Denoiser(of_video, of_text, nnx.Rngs(seed)), of_video, of_text


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images.astype(np.float32), data.target


def train(model: Denoiser, steps: int) -> list[tuple[int, float]]:
    """The losses by step."""
    images, labels = digits()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(40, steps), steps + 1, 1e-4)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    losses = []
    for step in range(steps):
        batch = videos(images[:1500], labels[:1500], BATCH, seed=step)
        loss = train_step(model, optimizer, batch, jax.random.key(step))
        if step % 25 == 0 or step == steps - 1:
            losses.append((step + 1, float(loss)))
            print(f"step {step + 1:4}: loss {losses[-1][1]:.3f}", flush=True)
    return losses


def draw(model: Denoiser, level: float, path: Path) -> None:
    """Two held-out videos: clean, noisy, and denoised."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, style in (("", "default"), ("-dark", HERE.parent / "dark.mplstyle")):
        with pyplot.style.context(style):
            figure = _figure(model, level)
            figure.savefig(path.with_stem(path.stem + name), dpi=120)
            pyplot.close(figure)


def _figure(model: Denoiser, level: float) -> Any:
    from matplotlib import pyplot

    clean, noisy, text, lengths = held_out(level)
    made = cleaned(model, noisy, np.full(len(noisy), level, np.float32), text, lengths)
    figure, axes = pyplot.subplots(6, FRAMES, figsize=(9, 5.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.97))  # room for the first title
    for number in range(2):
        line = "".join(map(chr, text[number, : lengths[number]]))
        for row, (what, clip) in enumerate((("clean", clean), ("noisy", noisy), ("made", np.asarray(made)))):
            for frame in range(FRAMES):
                axes[3 * number + row, frame].imshow(clip[number, frame], cmap="gray", vmin=-1, vmax=1)
                axes[3 * number + row, frame].set_axis_off()
            title = axes[3 * number + row, 0].text(
                -0.5, -1.2, f"{line}: {what}" if row == 0 else what, fontsize=9, clip_on=False
            )
            title.set_in_layout(False)  # a long one would widen its column
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--picture", type=Path, help="file for a picture of the videos: clean, noisy and denoised (requires matplotlib)"
    )
    options = parser.parse_args()
    began = time.monotonic()
    model, of_video, of_text = build()
    train(model, options.steps)
    error, of_pixels = errors(model, LEVEL)
    print(f"held out, noise level {LEVEL}: squared error {error:.4f}; of pixels alone {of_pixels:.4f}")
    for plan in (of_video.plans[0], of_text.plans[0]):
        print(f"{plan.implementation}: {plan.problem.describe()}; {plan.problem.mask.describe()}")
    if options.picture is not None:
        draw(model, LEVEL, options.picture)
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if error < 0.7 * of_pixels else 1


if __name__ == "__main__":
    sys.exit(main())
