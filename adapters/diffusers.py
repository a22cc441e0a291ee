"""diffusers: a declared attention as a backend of its attention dispatcher. Requires torch and diffusers.

Call `register()` once, then `model.set_attention_backend("attnops")`, or `with attention_backend("attnops"):`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError, a_type, shown
from ..operators.api.attention import Attention
from ..operators.api.attention_keywords import is_operation_name
from .extra import extra
from .front import Declared, declared_attention

with extra("torch"):
    import torch

    from .torch_call import CallOptions, TorchCall, check_mask, check_tensors
with extra("diffusers"):
    from diffusers.models import attention_dispatch

__all__ = ["DiffusersAttention", "attention_for", "register"]

_SUPPORTED_ARGUMENTS = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse", "_parallel_config",
)  # fmt: skip
_HINTS = {
    "return_lse": "a backend returns only its output",
    "_parallel_config": "declare a mesh and sequence_parallel in attnops' metadata instead",
    "window_size": "declare call.sliding_window instead",
}


def register(
    declared: Declared = "vanilla", *, name: str | None = None, round_lengths: bool = False, **keywords: Any
) -> str:
    """Make the attention backend of this name run the declared attention; returns the name.

    declared: an operation's name with keywords of an Attention, an Attention, a declaration or its path. name: "attnops" by
    default, "attnops:FILE" for a path; lower case, as diffusers reads names. round_lengths: see TorchCall. Registering a name
    again replaces it, in existing models too. Errors: ConfigError for "enabled": false and for names that diffusers
    uses.
    """
    backend = attention_for(declared, round_lengths=round_lengths, **keywords)
    if name is None:
        of_file = isinstance(declared, Path) or (isinstance(declared, str) and not is_operation_name(declared))
        name = f"attnops:{declared}".lower() if of_file else "attnops"
    names = attention_dispatch.AttentionBackendName
    registry = attention_dispatch._AttentionBackendRegistry
    members = {x.value: x for x in names}
    is_foreign = name in members and not isinstance(registry._backends.get(members[name]), DiffusersAttention)
    if not isinstance(name, str) or not name or name != name.lower() or is_foreign:
        raise ConfigError(
            f"name={shown(name)}; wanted a lower-case name that diffusers doesn't use, such as 'attnops'."
        )
    member = members.get(name)
    if member is None:  # its names are an Enum, which set_attention_backend and attention_backend look up
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        names._member_map_[member._name_] = names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
    registry.register(member)(backend)
    return name


def attention_for(declared: Declared, *, round_lengths: bool = False, **keywords: Any) -> DiffusersAttention:
    """The function that `register` registers."""
    attention: Attention = declared_attention(declared, keywords)
    if not attention.enabled:
        raise ConfigError('the declaration says "enabled": false; use set_attention_backend("native") instead.')
    return DiffusersAttention(attention, round_lengths)


class DiffusersAttention(TorchCall):
    """A declared attention with the signature of diffusers' backends. `attention.plans` holds the plans of the calls so far."""

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters of all backends: the dispatcher drops any argument that isn't in this signature."""
        supported = attention_dispatch._AttentionBackendRegistry._supported_arg_names.values()
        names = dict.fromkeys((*_SUPPORTED_ARGUMENTS, *sorted(set().union(*supported))))
        return inspect.Signature([inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in names])

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Attend. Differentiable once, also in attn_mask if it is a float tensor that requires a gradient.

        Shapes: query [batch, q, heads, dim], key and value [batch, kv, kv_heads, dim]; attn_mask, bool (True = may attend) or
        float (added), broadcasts to [batch, heads, q, kv], or is [batch, kv]: a two-dimensional mask of these sizes masks keys.
        is_causal lets query i see the keys up to i. Errors: InputError, InputTypeError and ConfigError name what is refused.
        """
        for name, x in others.items():
            if x is not None and x is not False:
                raise ConfigError(
                    f"{name} ({a_type(x)}) is passed to attnops' backend, which doesn't support it: "
                    f"{_HINTS.get(name, 'it belongs to other backends; remove it from attention_kwargs')}."
                )
        tensors = {"query": query, "key": key, "value": value}
        check_tensors("batch, length, heads, dim", **tensors)
        if key.shape[2] != query.shape[2] and not enable_gqa:
            raise InputError(
                f"query has {query.shape[2]} heads, key has {key.shape[2]}; grouped heads require enable_gqa=True, as in torch."
            )
        tensors = {name: x.transpose(1, 2) for name, x in tensors.items()}
        if attn_mask is not None:
            kind = check_mask(attn_mask, is_causal)
            if attn_mask.shape == (key.shape[0], key.shape[1]):
                attn_mask = attn_mask[:, None, None]
            tensors[kind] = attn_mask
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        options = CallOptions(bool(is_causal), scale, float(dropout_p), shape)
        return self.run(tensors, options, compiled=True).transpose(1, 2)

    def __repr__(self) -> str:
        return f"{__name__}.attention_for({self.attention.declared().to_json(indent=None)})"
