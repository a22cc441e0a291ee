"""TorchCall: torch tensors to a declared attention and back, with JAX's gradient as torch's; shared by the torch adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..errors import InputError, InputTypeError, RefusedError
from ..operators.api.attention import Attention
from .front import attend
from .torch_tensors import Padding, check_tensor, dropout_key, is_torchax, to_jax, to_torch

__all__ = ["DTYPES", "CallOptions", "TorchCall", "check_mask", "check_tensors"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_COMPILED = 512  # compiled calls kept per function
_ROUNDED = (
    "keys are padded to {}; only the given ones count (kv_lengths), so that a growing cache compiles once for each "
    "power of 2; round_lengths=False of the adapter turns it off"
)
_MIN_KEYS = 32  # the fewest keys of a rounded call


class CallOptions(NamedTuple):
    """Compile-time options. `shape`: of the output [..., heads, q, value_dim]."""

    causal: bool
    scale: float | None
    dropout_p: float
    shape: tuple[int, ...]
    soft_cap: float | None = None
    window: tuple[int, int] | None = None


def check_tensors(axes: str, **tensors: torch.Tensor) -> None:
    """Refuse what JAX can't accept, tensors without these four axes ("" for any number), and several dtypes. Errors:
    InputTypeError, InputError."""
    for name, x in tensors.items():
        check_tensor(name, x, DTYPES)
        if axes and x.ndim != 4:
            raise InputError(f"{name} has shape {tuple(x.shape)}; wanted [{axes}].")
    if len({x.dtype for x in tensors.values()}) > 1:
        *first, last = tensors
        *others, dtype = (str(x.dtype) for x in tensors.values())
        raise InputTypeError(f"{', '.join(first)} and {last} are {', '.join(others)} and {dtype}; wanted one dtype.")


def check_mask(attn_mask: torch.Tensor, is_causal: bool) -> str:
    """The name of a mask in a call: 'mask' for booleans, 'bias' for numbers. Errors: InputTypeError, and InputError beside
    is_causal."""
    check_tensor("attn_mask", attn_mask, (torch.bool, *DTYPES))
    if is_causal:
        raise InputError(
            "attn_mask with is_causal=True is an error, as in torch; include the causal mask in attn_mask."
        )
    return "mask" if attn_mask.dtype == torch.bool else "bias"


class TorchCall:
    """A declared attention behind torch's tensors. `attention.plans` holds the plans of the calls so far.

    round_lengths: calls with fewer queries than keys, or with one query, as in decoding from a growing cache, pad their keys
    to a power of 2, at least 32; no query sees the padding. A generation then compiles once for each of a few
    sizes, not once for each token.
    """

    def __init__(self, attention: Attention, round_lengths: bool = True) -> None:
        self.attention, self.round_lengths = attention, round_lengths
        self._compiled: dict[CallOptions, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def run(self, tensors: dict[str, torch.Tensor], options: CallOptions, *, compiled: bool) -> torch.Tensor:
        """Attend to tensors by their names in a call, [..., heads, length, dim]. `compiled`: the whole call is one program, in
        which mask values aren't known; so are rounded calls and those with a gradient.
        """
        padding, lengths = self._rounded(tensors)
        rng = dropout_key(tensors["query"]) if options.dropout_p > 0 else None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values()):
            return _Differentiable.apply(self, options, padding, (rng, lengths), tuple(tensors), *tensors.values())
        arrays, home = to_jax(self.attention, tensors, padding)
        if compiled or lengths is not None:
            return to_torch(self.programs(options)[0](arrays, rng, lengths), home)
        return to_torch(_attend(self.attention, options, arrays, rng, lengths), home)

    def _rounded(self, tensors: dict[str, torch.Tensor]) -> tuple[Padding, np.ndarray | None]:
        """What to add to the tensors for a rounded number of keys, and how many keys count, [1]; None if it isn't rounded."""
        q_len, keys = tensors["query"].shape[-2], tensors["key"].shape[-2]
        grows = q_len < keys or q_len == 1
        # A file that declares lengths, or a segment for each key, requires them from the call.
        if not (self.round_lengths and grows) or is_torchax(tensors["query"]) or self._declares_keys():
            return {}, None
        padding_keys = max(_MIN_KEYS, 1 << (keys - 1).bit_length()) - keys
        padding = {}
        if padding_keys:
            padding = {"key": (-2, padding_keys), "value": (-2, padding_keys)}
            for name in ("mask", "bias"):
                if name in tensors and tensors[name].shape[-1] == keys:  # else 1, which covers all keys
                    padding[name] = -1, padding_keys
        return padding, np.full((1,), keys, np.int32)

    def _declares_keys(self) -> bool:
        call = self.attention.declaration.call
        return any(getattr(call, name) is not None for name in ("kv_lengths", "kv_starts", "segment_ids"))

    def programs(self, options: CallOptions) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The compiled call, and the one that also returns its pull-back; they take the arrays to differentiate, and the
        others."""
        compiled = self._compiled.get(options)
        if compiled is not None:
            return compiled

        def call(arrays: dict[str, Any], rng: Any, lengths: Any) -> Any:
            return _attend(self.attention, options, arrays, rng, lengths)

        def forward(inexact: dict[str, Any], rest: dict[str, Any], rng: Any, lengths: Any) -> Any:
            return jax.vjp(lambda x: call({**x, **rest}, rng, lengths), inexact)

        if len(self._compiled) >= _MAX_COMPILED:
            self._compiled.clear()
        return self._compiled.setdefault(options, (jax.jit(call), jax.jit(forward)))

    def __reduce__(self) -> Any:
        return type(self), (self.attention, self.round_lengths)

    def _key(self) -> tuple[Any, ...]:
        return self.attention, self.round_lengths

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self).__name__, *self._key()))


class _Differentiable(torch.autograd.Function):
    """JAX's gradient as torch's. Only inputs that require a gradient are differentiated: a bias' own is as large as the
    logits."""

    @staticmethod
    def forward(
        ctx: Any,
        function: TorchCall,
        options: CallOptions,
        padding: Padding,
        others: Any,
        names: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        arrays, home = to_jax(function.attention, dict(zip(names, tensors, strict=True)), padding)
        differentiated = tuple(name for name, need in zip(names, ctx.needs_input_grad[5:], strict=True) if need)
        inexact = {name: arrays.pop(name) for name in differentiated}
        out, ctx.pull = function.programs(options)[1](inexact, arrays, *others)
        ctx.names, ctx.attention, ctx.padding = names, function.attention, padding
        result = to_torch(out, home)
        # The pull-back holds their memory; so torch's own check detects in-place changes.
        ctx.save_for_backward(*tensors, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # once_differentiable would let some of these pass without a gradient
            raise RefusedError(
                "create_graph=True: attnops' attention has one derivative behind torch's autograd, not two. Hint: take the "
                "second in JAX, or use torch's own attention there."
            )
        _ = ctx.saved_tensors  # raises if one was changed in place
        arrays, home = to_jax(ctx.attention, {"gradient": gradient})
        (gradients,) = _backward(ctx.pull, arrays["gradient"])
        tensors = {name: to_torch(x, home) for name, x in gradients.items()}
        for name, (dim, padded) in ctx.padding.items():
            if name in tensors:
                tensors[name] = tensors[name].narrow(dim, 0, tensors[name].shape[dim] - padded)
        return (None, None, None, None, None, *map(tensors.get, ctx.names))


@jax.jit
def _backward(pull: Any, gradient: jax.Array) -> Any:
    return pull(gradient)


def _attend(attention: Attention, options: CallOptions, arrays: dict[str, Any], rng: Any, lengths: Any) -> jax.Array:
    """The call on arrays; query, key and value get the batch dimensions and heads that torch would broadcast them to."""
    query, key, value = (
        arrays[n].reshape((1,) * (3 - arrays[n].ndim) + arrays[n].shape) for n in ("query", "key", "value")
    )
    batch = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    kv_heads = max(key.shape[-3], value.shape[-3])
    q_heads = max(query.shape[-3], kv_heads)
    query, key, value = (
        _broadcast(x, (*batch, heads, *x.shape[-2:]))
        for x, heads in ((query, q_heads), (key, kv_heads), (value, kv_heads))
    )
    positioned = options.causal or options.window is not None
    result = attend(
        attention,
        query,
        key,
        value,
        layout="bhtd",
        causal=options.causal,
        sliding_window=options.window,
        query_offset=0 if positioned else None,
        mask=arrays.get("mask"),
        bias=arrays.get("bias"),
        softmax_aux=arrays.get("softmax_aux"),
        softmax_scale=options.scale,
        logits_soft_cap=options.soft_cap,
        dropout_prob=options.dropout_p,
        dropout_rng=rng,
        deterministic=False,
        kv_lengths=None if lengths is None else jnp.broadcast_to(lengths, (int(np.prod(batch)),)),
        remarks=() if lengths is None else (_ROUNDED.format(key.shape[-2]),),
    )
    return result.output.reshape(options.shape)


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    return x if x.shape == shape else jnp.broadcast_to(x, shape)
