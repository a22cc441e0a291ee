"""torch: scaled_dot_product_attention on torch tensors, run by JAX. Requires torch (`pip install 'attnops[torch]'`).

Tensors are shared with JAX without a copy if they are dense and on JAX's own device. torchax's tensors are JAX arrays and are
used as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import InputError
from ..operators.api.attention import Attention
from .extra import extra
from .front import Declared, declared_attention

with extra("torch"):
    import torch

    from .torch_call import CallOptions, TorchCall, check_mask, check_tensors

__all__ = ["ScaledDotProductAttention", "scaled_dot_product_attention", "scaled_dot_product_attention_for"]


def scaled_dot_product_attention_for(
    declared: Declared, *, round_lengths: bool = True, **metadata: Any
) -> Callable[..., torch.Tensor]:
    """A function like torch.nn.functional.scaled_dot_product_attention that runs the declared attention.

    declared: an Attention, a Declaration, its dict, or the path of its JSON file. metadata: fields of OperationMetadata that
    replace the file's, such as mesh. round_lengths: see TorchCall. With "enabled": false it is torch's own function.
    """
    attention = declared_attention(declared, metadata)
    if not attention.enabled:
        return torch.nn.functional.scaled_dot_product_attention
    return ScaledDotProductAttention(attention, round_lengths)


class ScaledDotProductAttention(TorchCall):
    """A declared attention with torch's signature. `attention.plans` holds the plans of the calls so far."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend. Differentiable once by torch's autograd, also in attn_mask if it is a float tensor that requires a gradient.

        Shapes: query [..., heads, q, dim], key [..., kv_heads, kv, dim], value [..., kv_heads, kv, value_dim]; attn_mask,
        bool (True = may attend) or float (added to the logits), broadcasts to [..., heads, q, kv]. is_causal lets query i
        see the keys up to i, whatever the lengths. Errors: InputError, InputTypeError and ConfigError name what is refused.
        """
        tensors = {"query": query, "key": key, "value": value}
        check_tensors("", **tensors)
        if attn_mask is not None:
            tensors[check_mask(attn_mask, is_causal)] = attn_mask
        shape = _output_shape(query, key, value, enable_gqa)
        if attn_mask is not None:
            _check_broadcasts(tuple(attn_mask.shape), (*shape[:-1], key.shape[-2]))
        return self.run(tensors, CallOptions(is_causal, scale, float(dropout_p), shape), compiled=False)

    def __repr__(self) -> str:
        return f"{__name__}.scaled_dot_product_attention_for({self.attention.declaration.to_json(indent=None)})"


scaled_dot_product_attention = ScaledDotProductAttention(Attention({"operation": "vanilla"}))


def _output_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Torch's shape of the output. Errors: InputError for shapes that torch refuses too."""
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    shapes_text = "query {}, key {} and value {}".format(*shapes)
    if min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise InputError(
            f"{shapes_text}; wanted [..., heads, q, dim], [..., kv_heads, kv, dim], [..., kv_heads, kv, value_dim]."
        )
    leading = [shape[:-2] for shape in shapes]
    if enable_gqa:
        heads = [shape[-1] if shape else 1 for shape in leading]
        if heads[1] != heads[2] or heads[0] % heads[1]:
            raise InputError(
                f"{shapes_text}: enable_gqa requires as many key as value heads, and a multiple of them as query heads."
            )
        leading = [(*shape[:-1], heads[0]) for shape in leading]
    try:
        return (*np.broadcast_shapes(*leading), shapes[0][-2], shapes[2][-1])
    except ValueError:
        hint = "" if enable_gqa else " Hint: grouped heads require enable_gqa=True."
        raise InputError(f"{shapes_text}: the dimensions before the last two don't broadcast.{hint}") from None


def _check_broadcasts(shape: tuple[int, ...], cells: tuple[int, ...]) -> None:
    if len(shape) > len(cells) or any(n not in (1, m) for n, m in zip(shape[::-1], cells[::-1], strict=False)):
        raise InputError(
            f"attn_mask has shape {shape}; wanted one that broadcasts to {cells}, [..., heads, query length, key length]."
        )
