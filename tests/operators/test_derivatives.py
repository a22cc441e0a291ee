"""Derivatives besides the first in reverse mode: right where a route has them, else refused with a reason, however they are asked
for. Right values come from jax.nn.dot_product_attention, which jax differentiates by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, Causal, RefusedError
from attnops.errors import InputTypeError

Q, K, V, DIRECTION = (jax.random.normal(key, (1, 48, 2, 16)) for key in jax.random.split(jax.random.key(0), 4))
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "splash": ("splash", {"interpret": True}),
    "flash": ("flash_attn2", {"interpret": True}),
    "borrowed": ("splash", {"interpret": True, "kernel": "jax"}),
    "ring": ("ring", {"interpret": True, "mesh": {"sp": 2}}),
}
XLA: dict[str, tuple[str, dict[str, Any]]] = {
    "tiles": ("vanilla", {"path": "blockwise", "block_q": 16, "block_kv": 16}),
    "tile": ("vanilla", {"path": "blockwise"}),
    "decode": ("vanilla", {"path": "decode", "block_kv": 16}),
    "decode-rows": ("vanilla", {"path": "decode_rows", "block_kv": 16}),
    "xla-ring": ("vanilla", {"path": "blockwise", "mesh": {"sp": 2}, "sequence_parallel": "ring"}),
}
ROUTES = KERNELS | XLA


def _attend(route: str) -> Callable[..., jax.Array]:
    operation, declared = ROUTES[route]
    attend = Attention(operation, **declared)
    return lambda q, k=K, v=V: attend(q, k, v, mask=Causal()).attention_outputs


def _theirs(q: jax.Array, k: jax.Array = K, v: jax.Array = V) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


FORWARD: dict[str, Callable[[Callable[..., jax.Array]], Any]] = {
    "jvp": lambda f: jax.jvp(f, (Q,), (DIRECTION,)),
    "jvp of jit": lambda f: jax.jvp(jax.jit(f), (Q,), (DIRECTION,)),
    "jit of jvp": lambda f: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(Q),
    "linearize": lambda f: jax.linearize(f, Q)[1](DIRECTION),
    "linearize of jit": lambda f: jax.linearize(jax.jit(f), Q)[1](DIRECTION),
    "jacfwd": lambda f: jax.jacfwd(lambda s: f(s * Q))(1.0),
    "jacfwd of jit": lambda f: jax.jacfwd(jax.jit(lambda s: f(s * Q)))(1.0),
    "jvp of scan": lambda f: jax.jvp(lambda q: jax.lax.scan(lambda c, _: (f(c), None), q, None, 2)[0], (Q,), (Q,)),
    "jvp of checkpoint": lambda f: jax.jvp(jax.checkpoint(f), (Q,), (DIRECTION,)),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (Q[None],), (DIRECTION[None],)),
}


@pytest.mark.parametrize(
    ("route", "way"),
    [("tiles", way) for way in FORWARD] + [pytest.param("splash", way, marks=pytest.mark.slow) for way in FORWARD],
)
def test_forward_mode_is_refused_however_it_is_asked_for(route: str, way: str) -> None:
    with pytest.raises(InputTypeError, match="'path': 'plain'"):
        FORWARD[way](_attend(route))


@pytest.mark.parametrize("route", ROUTES)
def test_forward_mode_is_refused_on_every_route_with_a_backward_pass(route: str) -> None:
    with pytest.raises(InputTypeError, match="jacrev"):
        FORWARD["jit of jvp"](_attend(route))


def _squares(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *arrays: (f(*arrays) ** 2).sum()


def _penalty(f: Callable[..., jax.Array], of: int) -> Callable[[jax.Array], jax.Array]:
    """The gradient, for the query, of the sum of squares of the gradient for an operand."""
    return jax.grad(lambda q: (jax.grad(_squares(f), of)(q, K, V) ** 2).sum())


def _product(f: Callable[..., jax.Array], of: int) -> Callable[[jax.Array], jax.Array]:
    """A row of the Hessian times a vector: forward mode over reverse mode."""
    return lambda q: jax.jvp(lambda q: jax.grad(_squares(f), of)(q, K, V), (q,), (DIRECTION,))[1]


@pytest.mark.parametrize("second", [_penalty, _product])
@pytest.mark.parametrize("route", KERNELS)
def test_second_derivatives_of_kernels_are_refused(route: str, second: Any) -> None:
    with pytest.raises(RefusedError, match="'path': 'plain'"):
        jax.jit(second(_attend(route), 0))(Q)


@pytest.mark.parametrize(("route", "of"), [("tiles", 0), ("tiles", 1), ("tile", 1), ("decode", 1), ("xla-ring", 1)])
def test_forward_over_reverse_is_right_in_xla(route: str, of: int) -> None:
    made, wanted = (jax.jit(_product(f, of))(Q) for f in (_attend(route), _theirs))
    np.testing.assert_allclose(made, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))


def test_reverse_over_reverse_in_xla() -> None:
    made, wanted = (jax.jit(_penalty(f, 1))(Q) for f in (_attend("tile"), _theirs))
    np.testing.assert_allclose(made, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))
    with pytest.raises(RefusedError, match="hessian"):  # its loops have bounds that jax can't transpose
        jax.jit(_penalty(_attend("tiles"), 1))(Q)


@pytest.mark.parametrize("route", ["splash", "tiles", "borrowed"])
def test_first_derivatives_pass_through_transformations(route: str) -> None:
    def layers(f: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
        def layer(x: jax.Array, _: Any) -> Any:
            return jax.checkpoint(lambda x: jax.vmap(f)(x[None])[0])(x), None

        return jax.jit(jax.grad(lambda q: (jax.lax.scan(layer, q, None, 2)[0] * DIRECTION).sum()))

    made, wanted = layers(_attend(route))(Q), layers(_theirs)(Q)
    np.testing.assert_allclose(made, wanted, atol=3e-5 * float(jnp.abs(wanted).max()))
    pull = jax.vjp(_attend(route), Q)[1]
    rows = jnp.stack([DIRECTION, Q])
    if route == "borrowed":
        return  # jax's kernel has no vmap over the gradient alone
    for row, own in zip(rows, jax.vmap(lambda d: pull(d)[0])(rows), strict=True):
        np.testing.assert_allclose(own, jax.vjp(_theirs, Q)[1](row)[0], atol=2e-5)


def test_marks_add_nothing_to_a_program() -> None:
    text = jax.jit(jax.grad(_squares(_attend("tiles")))).lower(Q).as_text()
    assert "reverse_only" not in text
    assert "twice" not in text


def test_an_unperturbed_operand_is_no_derivative() -> None:
    """Forward mode in a model around an attention that doesn't depend on what is differentiated."""
    f = _attend("tiles")
    made, moved = jax.jvp(lambda scale: scale * f(Q), (2.0,), (1.0,))
    np.testing.assert_allclose(made, 2 * moved)
    with pytest.raises(InputTypeError):
        jax.jvp(lambda scale: f(scale * Q), (2.0,), (1.0,))
