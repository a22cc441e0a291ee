"""Marks on arrays that refuse derivatives which a computation doesn't have, with a reason.

jax.custom_vjp and Pallas raise bare errors for them, and under jax.jit only where attnops is no longer on the stack. A mark is a
primitive that returns its arrays unchanged and adds nothing to a compiled program; its rules for derivatives raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...errors import InputTypeError, RefusedError

__all__ = ["once", "once_in_reverse", "reverse_only", "twice_forward_only"]

_Tree = TypeVar("_Tree")
_Attend = Callable[[Any], Any]
_Context = Callable[[], AbstractContextManager[Any]]
_PLAIN = "'vanilla' with operation_configs={'vanilla': {'path': 'plain'}}"


def reverse_only(tree: _Tree, what: str, instead: str = _PLAIN) -> _Tree:
    """Arguments of a jax.custom_vjp function. Forward mode through it raises InputTypeError, which calls it `what`. instead: what
    else to declare, "" for nothing."""
    return _marked(
        _reverse_only,
        tree,
        f"{what}: no derivative in forward mode (jax.jvp, jax.linearize, jax.jacfwd), because the gradient is a backward pass of "
        f"its own; use reverse mode (jax.grad, jax.vjp, jax.jacrev){', or ' if instead else ''}{instead}.",
    )


def once(tree: _Tree, what: str) -> _Tree:
    """Arrays that enter a pass of a gradient which can't be differentiated itself: its derivative raises RefusedError."""
    return _marked(_once, tree, what)


def twice_forward_only(tree: _Tree) -> _Tree:
    """Results of a loop with traced bounds in a pass of a gradient: reverse mode through it raises RefusedError."""
    return _marked(_twice_forward_only, tree, "")


def once_in_reverse(attend: _Attend, arrays: Any, what: str, *, within: _Context = nullcontext) -> Any:
    """attend(arrays), for another library's function that has a first derivative, in reverse mode, and no other.

    within: the context in which both passes are traced.
    """
    return _borrowed(attend, what, within, reverse_only(arrays, what))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _borrowed(attend: _Attend, what: str, within: _Context, arrays: Any) -> Any:
    with within():
        return attend(arrays)


def _borrowed_forward(attend: _Attend, what: str, within: _Context, arrays: Any) -> tuple[Any, Any]:
    with within():
        return jax.vjp(attend, once(arrays, what))


def _borrowed_backward(attend: _Attend, what: str, within: _Context, pull: Any, cotangents: Any) -> Any:
    with within():  # the function's own backward pass is traced only here
        return pull(once(cotangents, what))


_borrowed.defvjp(_borrowed_forward, _borrowed_backward)


# -- the primitives ----------------------------------------------------------------------------------------------------


def _marked(primitive: Primitive, tree: _Tree, what: str) -> _Tree:
    """The tree with its floating-point arrays marked, all by one equation: the innermost derivative then meets them together,
    as it does those of a custom_vjp function."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    for i, x in zip(places, primitive.bind(*(leaves[i] for i in places), what=what) if places else (), strict=True):
        leaves[i] = x
    marked: _Tree = jax.tree.unflatten(structure, leaves)
    return marked


def _mark(name: str, tangents: Callable[[list[Any], str], list[Any]]) -> Primitive:
    """A primitive that returns its arrays. tangents: those of its results, from those that aren't zero; may raise."""
    primitive = Primitive(f"attnops_{name}")
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, what: list(xs))
    primitive.def_abstract_eval(lambda *xs, what: list(xs))
    mlir.register_lowering(primitive, lambda _, *xs, what: list(xs))
    batching.primitive_batchers[primitive] = lambda xs, dims, *, what: (primitive.bind(*xs, what=what), dims)

    # Not bound again: what stands behind the results is a derivative's own pass, no longer the custom_vjp function.
    def jvp(primals: Any, primal_tangents: Any, *, what: str) -> tuple[Any, Any]:
        moving = [i for i, t in enumerate(primal_tangents) if not isinstance(t, ad.Zero)]
        marked_tangents = list(primal_tangents)
        for i, t in zip(moving, tangents([primal_tangents[i] for i in moving], what) if moving else (), strict=True):
            marked_tangents[i] = t
        return list(primals), marked_tangents

    ad.primitive_jvps[primitive] = jvp
    return primitive


def _tangent(name: str, *, run: Callable[[str], None], transpose: Callable[[], None]) -> Primitive:
    """A linear primitive that returns its arrays. run: raises where their values are wanted; transpose: where it's transposed."""
    primitive = Primitive(f"attnops_{name}_tangent")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *xs, what: list(xs))

    def evaluate(*xs: Any, what: str) -> list[Any]:
        run(what)
        return list(xs)

    def batch(xs: Any, dims: Any, *, what: str) -> tuple[Any, Any]:
        run(what)  # before the rule of the custom_vjp function, whose tangents can't be mapped
        return primitive.bind(*xs, what=what), dims

    def transposed(cotangents: Any, *xs: Any, what: str) -> list[Any]:
        transpose()
        return list(cotangents)

    primitive.def_impl(evaluate)
    mlir.register_lowering(primitive, lambda _, *xs, what: evaluate(*xs, what=what))
    batching.primitive_batchers[primitive] = batch
    ad.deflinear2(primitive, transposed)
    return primitive


def _allowed(*_: Any) -> None:
    """Nothing to refuse."""


def _no_forward_mode(why: str) -> None:
    raise InputTypeError(why)


def _no_second(tangents: list[Any], what: str) -> list[Any]:
    raise RefusedError(
        f"{what}: no second derivative, because the passes of the first are kernels, which jax can't differentiate; use {_PLAIN}."
    )


def _no_second_reverse() -> None:
    raise RefusedError(
        "blockwise attention: no second derivative in reverse mode over reverse mode (jax.grad of jax.grad), because its loops "
        f"have traced bounds; use forward mode over reverse mode (jax.hessian, jax.jvp of jax.grad), or {_PLAIN}."
    )


_reverse_tangent = _tangent("reverse_only", run=_no_forward_mode, transpose=_allowed)
_loop_tangent = _tangent("twice_forward_only", run=_allowed, transpose=_no_second_reverse)
_reverse_only = _mark("reverse_only", lambda ts, what: _reverse_tangent.bind(*ts, what=what))
_twice_forward_only = _mark("twice_forward_only", lambda ts, what: _loop_tangent.bind(*ts, what=what))
_once = _mark("once", _no_second)
