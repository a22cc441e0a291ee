"""The layers of published models with states, by kind, as their cards and configs describe them."""

from __future__ import annotations

HYBRIDS: dict[str, dict[str, list[int]]] = {
    "bamba-9b": {"global": [9, 18, 27], "mamba2": [n for n in range(32) if n not in (9, 18, 27)]},
    "granite-4.0-h-small": {"global": [5, 15, 25, 35], "mamba2": [n for n in range(40) if n % 10 != 5]},
    "jamba-v0.1": {"global": [4, 12, 20, 28], "mamba1": [n for n in range(32) if n % 8 != 4]},
    "kimi-linear-48b-a3b": {"global": [*range(3, 24, 4), 26], "kda": [n for n in range(26) if n % 4 != 3]},
    "lfm2-1.2b": {"global": [2, 5, 8, 10, 12, 14], "causal_conv1d": [0, 1, 3, 4, 6, 7, 9, 11, 13, 15]},
    "mamba-codestral-7b": {"mamba2": [*range(64)]},
    "minimax-text-01": {"global": [*range(7, 80, 8)], "lightning": [n for n in range(80) if n % 8 != 7]},
    "nemotron-h-8b": {
        "global": [7, 18, 29, 40],
        "mamba2": [0, 2, 4, 6, *range(9, 18, 2), *range(20, 29, 2), *range(31, 40, 2), *range(42, 51, 2)],
        "mlp": [1, 3, 5, *range(8, 18, 2), *range(19, 29, 2), *range(30, 40, 2), *range(41, 52, 2)],
    },
    "qwen3-next-80b-a3b": {"global": [*range(3, 48, 4)], "gated_delta_rule": [n for n in range(48) if n % 4 != 3]},
}
