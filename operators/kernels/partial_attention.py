"""PartialAttention: a flash kernel whose passes can run over parts of the keys; and its gradient in jax.

The log-sum-exp of a part is enough to merge its output with another's; and given the output and the log-sum-exp of all
keys, the backward pass over a part computes exactly that part's share of every gradient.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from ...scores.steps import Steps
from .derivatives import reverse_only
from .local_mask import Dropout, LocalMask
from .operands import DynamicArgs, Operands, Results, StaticArgs, no_gradients, split_static
from .varying import alike

__all__ = ["PartialAttention", "attend_partial", "differentiable", "differentiate_partial", "residual_names"]


def residual_names(declared: str | None = None) -> tuple[str, str]:
    """What a jax.checkpoint policy can save the output and the lse by."""
    return ("attnops_output", "attnops_lse") if declared is None else (declared, declared)


class PartialAttention(Protocol):
    """Hashable; `layout` is that of its tensors. It doesn't handle sinks and biases: they belong to all keys together."""

    @property
    def layout(self) -> str:
        """bthd or bhtd."""
        ...

    @property
    def title(self) -> str:
        """What an error calls it."""
        ...

    @property
    def names(self) -> tuple[str, str]:
        """The names of the output and the lse for jax.checkpoint policies."""
        ...

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """(output in the layout, lse [batch, heads, q]) of only these keys; rows that see none give 0 and -inf."""
        ...

    def differentiate(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
    ) -> Operands:
        """These keys' share of the gradients."""
        ...


def differentiable(
    kernel: PartialAttention,
    operands: Operands,
    mask: LocalMask,
    dropout: Dropout | None,
    score: Steps | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) of a kernel over the mask's keys, both differentiable in reverse; they are also the residuals."""
    static_args, dynamic = split_static(mask, dropout, score)
    operands, dynamic = reverse_only(alike((operands, dynamic)), kernel.title)
    return _attend(_PartialStatic(kernel, static_args), operands, dynamic)


@dataclass(frozen=True)
class _PartialStatic:
    kernel: PartialAttention
    static_args: StaticArgs


def attend_partial(
    kernel: PartialAttention, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs
) -> tuple[jax.Array, jax.Array]:
    """`kernel.attend`, traced once."""
    with _named_mesh():
        return _attend_once(kernel, static_args, operands, dynamic)


def differentiate_partial(
    kernel: PartialAttention, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
) -> Operands:
    """`kernel.differentiate`, traced once."""
    with _named_mesh():
        return _differentiate_once(kernel, static_args, operands, dynamic, results)


# jax caches the traces of a jitted function by its static arguments and the shapes of the others. So a kernel is traced
# once for the steps of a ring and for all layers of a model, whatever made their operations, and occurs once in a program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_once(
    kernel: PartialAttention, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs
) -> tuple[jax.Array, jax.Array]:
    return kernel.attend(static_args, operands, dynamic)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _differentiate_once(
    kernel: PartialAttention, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
) -> Operands:
    return kernel.differentiate(static_args, operands, dynamic, results)


def _named_mesh() -> AbstractContextManager[None]:
    """The mesh of the context, set anew. To the cache of traces no mesh and an empty one differ, and the rules of a custom_vjp
    have an empty one: a gradient would trace the forward pass twice."""
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _PartialStatic, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
    return attend_partial(static.kernel, static.static_args, operands, dynamic)


def _attend_forward(static: _PartialStatic, operands: Operands, dynamic: DynamicArgs) -> tuple[Any, Any]:
    results = attend_partial(static.kernel, static.static_args, operands, dynamic)
    output, lse = (checkpoint_name(x, name) for x, name in zip(results, static.kernel.names, strict=True))
    return (output, lse), (operands, dynamic, output, lse)


def _attend_backward(static: _PartialStatic, residuals: Any, cotangents: Any) -> tuple[Operands, DynamicArgs]:
    operands, dynamic, output, lse = residuals
    results = Results(output, lse, *cotangents)
    gradients = differentiate_partial(static.kernel, static.static_args, operands, dynamic, results)
    return gradients, no_gradients(dynamic)


_attend.defvjp(_attend_forward, _attend_backward)
