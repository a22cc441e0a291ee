"""LayerAttention: the attention of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..masks import Mask
from ..scores import Score

__all__ = ["LayerAttention", "LayerSizes"]


class LayerSizes(NamedTuple):
    """What layers of an image model have of their own: heads, their dim, tokens, and how many windows an image has: as many rows
    of the batch. masked: whether an array hides keys of other parts of the image."""

    q_heads: int
    head_dim: int
    tokens: int
    windows: int
    masked: bool = False


@dataclass(frozen=True)
class LayerAttention:
    """One layer: its kind ('global', 'local 4096' and so on), its mask, its scale if scales differ between layers, its score
    without arrays, and its sizes if they are those of an image."""

    kind: str
    mask: Mask
    softmax_scale: float | None = None
    score: Score | None = None
    sizes: LayerSizes | None = None
