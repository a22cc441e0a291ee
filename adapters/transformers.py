"""transformers: attention for its AttentionInterface, and masks for its AttentionMaskInterface. Requires torch and transformers.

Call `register()` once, then set `attn_implementation="attnops"` in from_pretrained, from_config or set_attn_implementation.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError, InputTypeError, a_type, is_whole, shown
from ..operators.api.attention import Attention
from ..operators.api.attention_keywords import is_operation_name
from .extra import extra
from .front import Declared, declared_attention

with extra("torch"):
    import torch

    from .torch_call import DTYPES, CallOptions, TorchCall, check_tensors
    from .torch_tensors import check_tensor
    from .transformers_alibi import declared_mask, runs_here
with extra("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

__all__ = ["TransformersAttention", "attention_for", "register"]

# What models pass to every attention function although none uses it: positions are in the masks and the rotations.
_OF_OTHERS = frozenset({
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits", "return_dict",
    "num_items_in_batch", "logits_to_keep", "deterministic", "position_embeddings", "token_type_ids", "labels",
})  # fmt: skip
_HINTS = {
    "output_attentions": "attnops returns no weights here; use attn_implementation='eager' for them",
    "cache": "pages of continuous batching aren't supported; use its own attention there",
}
_PACKED = "lengths of packed sequences are for Flash Attention; remove them: masks follow from position_ids"
_HINTS |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"), _PACKED)


def register(
    declared: Declared = "vanilla", *, name: str | None = None, round_lengths: bool = True, **keywords: Any
) -> str:
    """Make `attn_implementation` of this name run the declared attention, including masks; returns the name.

    declared: an operation's name with keywords of an Attention, an Attention, a declaration or its path. name: "attnops" by
    default, "attnops:FILE" for a path. round_lengths: see TorchCall. Registering a name again replaces it, in
    existing models too. BLOOM and MPT, whose own code computes the attention, run it too. Errors: ConfigError for a declaration
    with "enabled": false. Another model whose own code computes the attention, whatever is set, raises ConfigError when it
    makes its masks.
    """
    attention = attention_for(declared, round_lengths=round_lengths, **keywords)
    if name is None:
        of_file = isinstance(declared, Path) or (isinstance(declared, str) and not is_operation_name(declared))
        name = f"attnops:{declared}" if of_file else "attnops"
    if (
        not isinstance(name, str)
        or name in ("eager", "sdpa", "flex_attention")
        or name.startswith(("flash_", "paged|"))
    ):
        raise ConfigError(
            f"name={shown(name)}; wanted a string that transformers doesn't use itself, such as 'attnops'."
        )
    AttentionInterface.register(name, attention)
    # A name without its own masks gets none from transformers.
    AttentionMaskInterface.register(name, partial(_mask, attention))
    return name


def _mask(function: TransformersAttention, *args: Any, config: Any = None, **others: Any) -> torch.Tensor | None:
    """The mask that sdpa would get: bool, or None where is_causal says the same. A model that would add it is refused."""
    kind: Any = type(config)
    module = None if config is None else _computing_itself(kind)
    if module is not None and runs_here(module):
        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return declared_mask(module, sdpa_mask(*args, config=config, **(others | whole)), function)
    if module is not None:
        raise ConfigError(
            f"{module} computes attention itself, without transformers' AttentionInterface: the declared attention wouldn't "
            "run, and the masks made for it would be misread. Use attn_implementation='eager' for this model."
        )
    return sdpa_mask(*args, config=config, **others)


@lru_cache(maxsize=256)
def _computing_itself(config: type) -> str | None:
    """The module of a config's models, if it makes masks for an attention of its own. Its source tells, as it does for
    transformers' set_attn_implementation."""
    package, _, last = config.__module__.rpartition(".")
    modules = [m for n, m in sorted(sys.modules.items()) if n.startswith(f"{package}.modeling_") and m is not None]
    for module in modules if last.startswith("configuration_") else ():
        try:
            source = inspect.getsource(module)
        except (OSError, TypeError):
            continue
        attention_class = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
        if attention_class and "masking_utils" in source and "ALL_ATTENTION_FUNCTIONS" not in source:
            return module.__name__
    return None


def attention_for(declared: Declared, *, round_lengths: bool = True, **keywords: Any) -> TransformersAttention:
    """The function that `register` registers."""
    attention: Attention = declared_attention(declared, keywords)
    if not attention.enabled:
        raise ConfigError('the declaration says "enabled": false; set attn_implementation="sdpa" instead.')
    return TransformersAttention(attention, round_lengths)


class TransformersAttention(TorchCall):
    """A declared attention with the signature of transformers' attention functions.

    `attention.plans` holds the plans of the calls so far, for all layers and models that use it.
    """

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend. Differentiable once, in s_aux and position_bias too.

        Shapes: query [batch, heads, q, dim], key and value [batch, kv_heads, kv, dim]; attention_mask, bool or added, and
        position_bias, added, broadcast to [batch, heads, q, kv]; s_aux [heads]. Returns [batch, q, heads, value_dim] and None.
        Without a mask a call of several queries is causal, from the first key, if the module is or is_causal is set, and
        sees the last `sliding_window` keys. Errors: InputError, InputTypeError and ConfigError name what is refused.
        """
        _check_others(others)
        tensors = {"query": query, "key": key, "value": value}
        check_tensors("batch, heads, length, dim", **tensors)
        for name, added in (("attention_mask", attention_mask), ("position_bias", position_bias)):
            if added is None:
                continue
            check_tensor(name, added, DTYPES if name == "position_bias" else (torch.bool, *DTYPES))
            if added.dtype == torch.bool:
                tensors["mask"] = added
            else:
                tensors["bias"] = tensors["bias"] + added if "bias" in tensors else added
        if s_aux is not None:
            check_tensor("s_aux", s_aux, DTYPES)
            tensors["softmax_aux"] = s_aux
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and attention_mask is None and query.shape[2] > 1
        options = CallOptions(
            causal,
            scaling,
            float(dropout),
            (*query.shape[:3], value.shape[3]),
            None if not softcap else float(softcap),
            _window(sliding_window, attention_mask, causal, key.shape[2]),
        )
        return self.run(tensors, options, compiled=True).transpose(1, 2).contiguous(), None

    def __repr__(self) -> str:
        return f"{__name__}.attention_for({self.attention.declared().to_json(indent=None)})"


def _window(tokens: Any, mask: torch.Tensor | None, causal: bool, keys: int) -> tuple[int, int] | None:
    """The window of a call without a mask; a mask already has it, because `register` has transformers make them."""
    if tokens is None or mask is not None:
        return None
    if not is_whole(tokens, 1):
        raise InputTypeError(f"sliding_window is {shown(tokens)}; wanted a number of tokens, or None.")
    if causal:
        return tokens - 1, 0  # the query's own token is one of them
    if keys > tokens:
        raise InputError(
            f"sliding_window={tokens} with {keys} keys, no mask and no causality doesn't define which keys are seen; pass a "
            "mask, as models do if register() set their attention."
        )
    return None


def _check_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in _OF_OTHERS or value is None or value is False:
            continue
        raise ConfigError(
            f"{name} ({a_type(value)}) is passed to the attention function, which doesn't support it: "
            f"{_HINTS.get(name, 'if it changes the result, put it into the mask or the bias')}."
        )
