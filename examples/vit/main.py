"""A vision transformer on handwritten digits: 197 tokens, not causal, its attention declared in a JSON file.

    python examples/vit/main.py [--steps 500] [--picture FILE]      (requires flax, optax, scikit-learn)

The digits of scikit-learn, 8 x 8, are enlarged to 56 x 56 and cut into 14 x 14 patches of 4 x 4: with the class token 197 tokens,
a multiple of no block size. The model is plain flax nnx; nnx.MultiHeadAttention gets its attention function from
attention.json, and with "enabled": false there it has flax's own. Exits with status 1 below 95 % accuracy on test images.
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

from attnops.adapters.flax_nnx import attention_fn

HERE = Path(__file__).resolve().parent
SIDE, PATCH, DIM, HEADS, LAYERS, CLASSES = 56, 4, 64, 4, 3, 10
TOKENS = (SIDE // PATCH) ** 2 + 1
BATCH = 64


class Block(nnx.Module):
    def __init__(self, attend: Any, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, attention_fn=attend, decode=False, rngs=rngs)
        self.before_attention, self.before_mlp = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Linear(3 * DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before_attention(x))
        return x + self.narrow(nnx.gelu(self.wide(self.before_mlp(x))))


class VisionTransformer(nnx.Module):
    """images float32 [batch, 56, 56] -> logits [batch, classes]."""

    def __init__(self, attend: Any, rngs: nnx.Rngs) -> None:
        self.inward, self.outward = nnx.Linear(PATCH * PATCH, DIM, rngs=rngs), nnx.Linear(DIM, CLASSES, rngs=rngs)
        self.first = nnx.Param(jnp.zeros((1, 1, DIM)))
        self.place = nnx.Param(0.1 * jax.random.normal(rngs.params(), (TOKENS, DIM)))
        self.blocks = nnx.List([Block(attend, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        rows = SIDE // PATCH
        x = images.reshape(-1, rows, PATCH, rows, PATCH).transpose(0, 1, 3, 2, 4).reshape(len(images), rows * rows, -1)
        x = (
            jnp.concatenate([jnp.broadcast_to(self.first[...], (len(x), 1, DIM)), self.inward(x)], 1)
            + self.place[...][None]
        )
        for block in self.blocks:
            x = block(x)
        return self.outward(self.norm(x[:, 0]))


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(training images, labels, test images, labels); every fifth image is a test image."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.asarray(jax.image.resize(found.images / 8 - 1, (len(found.images), SIDE, SIDE), "linear"), np.float32)
    test = np.arange(len(images)) % 5 == 0
    return images[~test], found.target[~test], images[test], found.target[test]


def shifted(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each image shifted by up to 5 pixels, so that the model doesn't memorise the few images."""
    moves = random.integers(-5, 6, (len(images), 2))
    return np.stack([np.roll(image, move, (0, 1)) for image, move in zip(images, moves, strict=True)])


@nnx.jit
def train_step(model: VisionTransformer, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    def loss_of(model: VisionTransformer) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model: VisionTransformer, images: jax.Array) -> jax.Array:
    return model(images).argmax(-1)


def train(model: VisionTransformer, steps: int) -> tuple[list[tuple[int, float]], np.ndarray]:
    """(losses by step, predictions of the test images)."""
    images, labels, test_images, _ = data()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, max(1, steps // 10), steps, 1e-5)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.05), wrt=nnx.Param)
    random, losses = np.random.default_rng(0), []
    for step in range(steps):
        chosen = random.integers(0, len(images), BATCH)
        loss = train_step(model, optimizer, shifted(images[chosen], random), labels[chosen])
        if step % 25 == 0 or step == steps - 1:
            losses.append((step + 1, float(loss)))
            print(f"step {step + 1:4}: loss {losses[-1][1]:.3f}", flush=True)
    parts = [predict(model, test_images[i : i + BATCH]) for i in range(0, len(test_images), BATCH)]
    return losses, np.concatenate([np.asarray(part) for part in parts])


def draw(losses: list[tuple[int, float]], predictions: np.ndarray, path: Path) -> None:
    """The loss, and test images with the model's predictions; wrong ones first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, style in (("", "default"), ("-dark", HERE.parent / "dark.mplstyle")):
        with pyplot.style.context(style):
            figure = _figure(losses, predictions)
            figure.savefig(path.with_stem(path.stem + name), dpi=120)
            pyplot.close(figure)


def _figure(losses: list[tuple[int, float]], predictions: np.ndarray) -> Any:
    from matplotlib import pyplot

    _, _, images, labels = data()
    order = np.argsort(predictions == labels, kind="stable")[:16]
    figure = pyplot.figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.2))
    axes = left.subplots()
    axes.plot(*zip(*losses, strict=True), marker=".")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    for place, number in zip(right.subplots(2, 8).flat, order, strict=True):
        place.imshow(images[number], cmap="gray")
        wrong = predictions[number] != labels[number]
        place.set_title(f"{predictions[number]}", color="red" if wrong else pyplot.rcParams["text.color"], fontsize=10)
        place.set_axis_off()
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", type=Path, help="file for the picture (requires matplotlib)")
    options = parser.parse_args()
    began = time.monotonic()
    attend = attention_fn(HERE / "attention.json")
    model = VisionTransformer(attend, nnx.Rngs(0))
    losses, predictions = train(model, options.steps)
    labels = data()[3]
    accuracy = float((predictions == labels).mean())
    print(f"{accuracy:.1%} of {len(labels)} test images are right; {time.monotonic() - began:.0f} s")
    plan = attend.attention.plans[0]
    print(f"{plan.implementation}: {plan.problem.describe()}; {plan.problem.mask.describe()}")
    if options.picture is not None:
        draw(losses, predictions, options.picture)
    return 0 if accuracy > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
