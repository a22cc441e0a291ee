"""LayerAttention: the attention of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..masks import Mask
from ..scores import Score

__all__ = ["LayerAttention", "LayerHeads", "LayerSizes"]


class LayerSizes(NamedTuple):
    """What layers of an image model have of their own: heads, their dim, tokens, and how many windows an image has: as many rows
    of the batch. masked: whether an array hides keys of other parts of the image."""

    q_heads: int
    head_dim: int
    tokens: int
    windows: int
    masked: bool = False


class LayerHeads(NamedTuple):
    """What a layer of text has of its own if heads differ between layers. sinks: whether each query head has a learned logit."""

    kv_heads: int
    head_dim: int
    value_dim: int
    sinks: bool = False


@dataclass(frozen=True)
class LayerAttention:
    """One layer: its kind ('global', 'local 4096' and so on), its mask, its scale if scales differ between layers, its score
    without arrays, its sizes if they are those of an image, and its heads if they differ between layers. indexed: whether an
    indexer picks keys from those that the mask shows. reads_layer: the layer whose keys and values it reads; None: its own."""

    kind: str
    mask: Mask
    softmax_scale: float | None = None
    score: Score | None = None
    sizes: LayerSizes | None = None
    heads: LayerHeads | None = None
    indexed: bool = False
    reads_layer: int | None = None
