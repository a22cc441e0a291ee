"""BLOOM and MPT of transformers, whose own modules add ALiBi and compute attention without the AttentionInterface."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .extra import extra

with extra("torch"):
    import torch

__all__ = ["declared_mask", "runs_here"]

_WEIGHTS = "output_attentions is set; attnops returns no weights here: use attn_implementation='eager' for them."


class _DeclaredMask(torch.Tensor):
    """A mask, True where a query may attend, whose class has the attention function that the layers are to call."""

    function: Callable[..., Any]


def runs_here(module: str) -> bool:
    """Whether the attention of a module of transformers can be run by a declared one."""
    return module in _MODULES


def declared_mask(module: str, mask: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
    """The mask for a module's layers, which then call the function instead of their own attention."""
    name, forward = _MODULES[module]
    _patch(getattr(sys.modules[module], name), forward)
    return mask.as_subclass(_kind_of(function))


def _kind_of(function: Callable[..., Any]) -> type[_DeclaredMask]:
    """The class of a function's masks: its own, as equal functions hold different plans."""
    kind: type[_DeclaredMask] = vars(function).setdefault(
        "_mask_kind", type("DeclaredMask", (_DeclaredMask,), {"function": staticmethod(function)})
    )
    return kind


@functools.cache
def _patch(kind: Any, forward: Callable[..., Any]) -> None:
    """Make a class's forward call the declared attention where the mask says so."""
    own = kind.forward

    @functools.wraps(own)
    def dispatched(self: Any, *args: Any, **others: Any) -> Any:
        mask = next((x for x in (*args, *others.values()) if isinstance(x, _DeclaredMask)), None)
        return own(self, *args, **others) if mask is None else forward(self, *args, **others)

    kind.forward = dispatched


def _bloom(
    self: Any, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, layer_past: Any = None,
    use_cache: bool = False, output_attentions: bool = False, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """BloomAttention.forward."""
    if output_attentions:
        raise ConfigError(_WEIGHTS)
    batch, length, _ = hidden_states.shape
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    dropout = self.attention_dropout.p if self.training else 0.0
    # A number per head and key: ALiBi up to what a row's softmax cancels, counting only tokens that aren't padding.
    bias = alibi.reshape(batch, self.num_heads, 1, -1)
    out = _attend(self, attention_mask, query, key, value, bias, dropout, self.inv_norm_factor)
    out = self.dense(out.reshape(batch, length, -1))
    return residual + torch.nn.functional.dropout(out, self.hidden_dropout, self.training), None


def _mpt(
    self: Any, hidden_states: Any, position_bias: Any, cache: Any = None, attention_mask: Any = None, **others: Any
) -> tuple[Any, None]:
    """MptAttention.forward."""
    if others.get("output_attentions"):
        raise ConfigError(_WEIGHTS)
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    batch, length, _ = mixed.shape
    query, key, value = mixed.view(batch, length, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    bias = None if position_bias is None else position_bias[None, :, :, -key.shape[2] :].to(query.dtype)
    dropout = self.attn_dropout_p if self.training else 0.0
    out = _attend(self, attention_mask, query, key, value, bias, dropout, self.softmax_scale)
    return self.out_proj(out.reshape(batch, length, -1)), None


def _attend(
    module: Any, mask: _DeclaredMask, query: Any, key: Any, value: Any, bias: Any, dropout: float, scale: float
) -> Any:
    plain, function = mask.as_subclass(torch.Tensor), type(mask).function
    return function(module, query, key, value, plain, dropout=dropout, scaling=scale, position_bias=bias)[0]


_MODULES = {
    "transformers.models.bloom.modeling_bloom": ("BloomAttention", _bloom),
    "transformers.models.mpt.modeling_mpt": ("MptAttention", _mpt),
}
