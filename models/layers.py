"""LayerAttention: the attention of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..masks import Mask
from ..scores import Score

__all__ = ["Convolution", "LayerAttention", "LayerHeads", "LayerSizes", "LayerState"]


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


class Convolution(NamedTuple):
    """The causal convolution of a layer with a state. activation: 'silu' or none. bias: whether it adds one."""

    channels: int
    width: int
    activation: str | None
    bias: bool


class LayerState(NamedTuple):
    """What a layer carries along the tokens. operation: the one with a state, None for a convolution alone; call: the sizes of
    its call, in the names of CallDeclaration; operands: the optional arrays that the model passes, and their shapes or True;
    config: fields of its config. convolution: what goes before it; None without one."""

    operation: str | None
    call: tuple[tuple[str, Any], ...] = ()
    operands: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    convolution: Convolution | None = None


@dataclass(frozen=True)
class LayerAttention:
    """One layer: its kind ('global', 'local 4096' and so on), its mask, its scale if scales differ between layers, its score
    without arrays, its sizes if they are those of an image, and its heads if they differ between layers. indexed: whether an
    indexer picks keys from those that the mask shows. reads_layer: the layer whose keys and values it reads; None: its own.
    A layer without attention has no mask. state: what it carries along the tokens, if it does."""

    kind: str
    mask: Mask | None
    softmax_scale: float | None = None
    score: Score | None = None
    sizes: LayerSizes | None = None
    heads: LayerHeads | None = None
    indexed: bool = False
    reads_layer: int | None = None
    state: LayerState | None = None
