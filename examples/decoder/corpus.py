"""The decoder's training text: Python's own manual, letter by letter."""

from __future__ import annotations

from typing import Any

import numpy as np


def corpus() -> str:
    """The texts behind `help()`, which come with Python: half a million characters of English about the language."""
    import pydoc_data.topics

    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


class Alphabet:
    """Characters as numbers; characters that occur fewer than 50 times in the corpus share one number."""

    def __init__(self, text: str) -> None:
        symbols, counts = np.unique(np.array(list(text)), return_counts=True)
        self.symbols = ["\N{REPLACEMENT CHARACTER}", *symbols[counts >= 50]]
        self.number = {symbol: i for i, symbol in enumerate(self.symbols)}

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.number.get(c, 0) for c in text], np.int32)

    def decode(self, numbers: np.ndarray) -> str:
        return "".join(self.symbols[i] for i in numbers)


def unigram_entropy(tokens: np.ndarray) -> float:
    """The entropy in nats per character."""
    share = np.bincount(tokens) / len(tokens)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def batches(tokens: np.ndarray, batch: int, length: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - length - 1, batch)
        yield np.stack([tokens[s : s + length + 1] for s in starts])
