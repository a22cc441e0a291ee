"""A case: levels of every factor, and the sizes and numbers that make one call of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .features import Feature, Levels, default_levels, features_of

__all__ = ["Case", "made"]


@dataclass(frozen=True)
class Case:
    """One call. Arrays of integers and booleans follow from the levels and sizes by rule; numbers are drawn by `seed`.

    integers: draw whole numbers from -2 to 2, in the place of normal ones. offset: position of the first query.
    """

    levels: Levels = field(default_factory=default_levels)
    batch: int = 2
    q_len: int = 8
    kv_len: int = 8
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    seed: int = 0
    integers: bool = False
    offset: int = 0
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    cap: float | None = None

    def __hash__(self) -> int:
        return hash(repr(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @property
    def features(self) -> tuple[Feature, ...]:
        """What it has beside plain attention."""
        return features_of(self.levels)

    @property
    def dtype(self) -> str:
        """Of query, key, value and bias."""
        return self.levels["dtype"]

    @property
    def may_have_dead_rows(self) -> bool:
        """Whether a query may see no key."""
        levels = self.levels
        hidden = levels["mask"] == "dead" or levels["lengths"] == "zero" or levels["bias"] in ("dead", "infinite")
        return hidden or sum(self.has(name) for name in ("causal", "window", "segments", "lengths", "mask")) > 1

    @property
    def sees_all(self) -> bool:
        """Whether nothing hides a key."""
        return not any(self.has(name) for name in ("causal", "window", "segments", "lengths", "mask"))

    def has(self, factor: str) -> bool:
        """Whether a factor isn't at its default."""
        return self.levels[factor] != default_levels()[factor]

    def without(self, factor: str) -> Case:
        """The case with one factor at its default, and sizes that this takes back; the sizes of `made` otherwise."""
        levels = self.levels | {factor: default_levels()[factor]}
        changes: dict[str, Any] = {"levels": levels}
        if factor == "heads":
            changes["kv_heads"] = self.heads
        if factor in ("causal", "sizes") and self.q_len != self.kv_len:
            plain = factor == "sizes" or (levels["causal"] == "no" and levels["window"] == "no")
            if factor == "causal" and levels["sizes"] in ("cross", "one") and not plain:
                changes["levels"] = levels | {"sizes": "even"}
            if factor == "sizes":
                changes["levels"] = levels | {"causal": "yes" if self.has("causal") else "no"}
                changes |= {"q_len": self.kv_len}
            changes["offset"] = 0
        if factor == "dims":
            changes["value_dim"] = self.dim
        absent: dict[str, dict[str, Any]] = {
            "window": {"left": None, "right": None}, "scale": {"scale": None}, "soft_cap": {"cap": None},
        }  # fmt: skip
        return replace(self, **(changes | absent.get(factor, {})))

    # The small arrays, in the shapes of a call in bthd.

    def segment_ids(self) -> np.ndarray:
        """[batch, length]: three documents, or as many as fit; others in the next row. negative: the last one's id is -1."""
        rows, places = np.arange(self.batch)[:, None], np.arange(self.kv_len)[None]
        ids = np.minimum((places * 3 + rows) // self.kv_len, 2)
        return np.where(ids == ids.max(), -1, ids) if self.levels["segments"] == "negative" else ids

    def kv_lengths(self) -> np.ndarray:
        """[batch]: one less in each row, from kv_len - 1; zero: the last row's is 0."""
        lengths = np.maximum(self.kv_len - 1 - np.arange(self.batch), 1)
        if self.levels["lengths"] == "zero":
            lengths[-1] = 0
        return lengths

    def mask(self) -> np.ndarray:
        """True where a query may attend: [batch, 1, 1, kv], or by head [batch, heads, q, kv], where one query may see no key."""
        b, h, i, j = np.ogrid[: self.batch, : self.heads, : self.q_len, : self.kv_len]
        if self.levels["mask"] == "padding":
            return np.asarray((j < self.kv_len - 1 - b % 2) & (i == i) | (j == 0))[:, :1, :1]
        seen = (i + 2 * j + b + h) % 3 > 0
        seen = seen | (j == 0)
        return np.asarray(seen & (i != self.q_len // 2) if self.levels["mask"] == "dead" else seen)


_HEADS = {"no": (2, 2), "gqa": (4, 2), "groups_of_3": (6, 2), "mqa": (4, 1)}


def made(levels: Levels, seed: int, length_step: int = 1, dim_step: int = 1) -> Case:
    """A case of these levels, whose sizes are drawn by the seed: lengths and dims are multiples of the steps, unless 'odd'."""
    rng = np.random.default_rng([seed, 17])
    kv_len = (
        int(rng.choice([6, 8])) if length_step == 1 else length_step * (2 if levels["sizes"] in ("cross", "one") else 1)
    )
    if levels["sizes"] == "odd":
        kv_len = 7 if length_step == 1 else length_step - 3
    q_len = {"cross": 3 if length_step == 1 else length_step, "one": 1}.get(levels["sizes"], kv_len)
    heads, kv_heads = _HEADS[levels["heads"]]
    dim = 8 if dim_step == 1 else dim_step
    value_dim = dim
    if levels["dims"] == "value":
        value_dim = 2 * dim
    elif levels["dims"] == "odd":
        dim = value_dim = dim - 3
    ends = {"end": kv_len - q_len, "offset": max((kv_len - q_len) // 2, 1)}
    left, right = {
        "no": (None, None), "left": (2, 0), "both": (2, 1), "open": (1, None)
    }[levels["window"]]  # fmt: skip
    return Case(
        dict(levels), 1 if levels["layout"] == "thd" else 2, q_len, kv_len, heads, kv_heads, dim, value_dim, seed,
        offset=ends.get(levels["causal"], 0), left=left, right=right,
        scale=0.5 if levels["scale"] == "yes" else None, cap=2.0 if levels["soft_cap"] == "yes" else None,
    )  # fmt: skip
