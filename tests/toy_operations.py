"""Toy operations for the tests of the registry and the plan: any set of forward methods, each able to refuse."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from attnops.operators import Operation
from attnops.operators.vanilla import Vanilla
from attnops.planning import ALL_FEATURES, OperationConfig, Rule, implementation

PLATFORM_METHODS = (
    "forward_tpu", "forward_gpu", "forward_blackwell", "forward_hopper", "forward_cuda", "forward_rocm", "forward_cpu",
)  # fmt: skip


class ToyConfig(OperationConfig):
    """One field that a metadata's block size feeds, one that nothing feeds."""

    feeds: ClassVar = {"blocksize_q": "block"}

    operation: Literal["toy"] = "toy"
    block: int | None = None
    label: str = "plain"


def rule(code, test, message="q_len={p.q_len}", hint="Change q_len."):
    return Rule(code, "q_len", test, message, hint)


def make(methods=(), *, refusing=(), consumes=ALL_FEATURES, rules=(), native_rules=(), name="toy"):
    """An operation class with these platform methods; those in `refusing` have a rule that always fails."""

    def own(method):
        never = (rule(f"{method}.never", lambda p, c: False),) if method in refusing else ()

        @implementation(consumes=consumes, rules=(*rules, *never), tolerance={})
        def forward(self, call):
            return Vanilla.forward_native(call)

        return forward

    @implementation(consumes=ALL_FEATURES, rules=native_rules, tolerance={})
    def forward_native(self, call):
        return Vanilla.forward_native(call)

    body = {method: own(method) for method in methods}
    return type("Toy", (Operation,), {"name": name, "config": ToyConfig, "forward_native": forward_native, **body})


def shapes(batch=2, q_len=8, heads=4, dim=8, kv_heads=None, dtype=jnp.float32):
    """query, key, value as shapes only."""
    query = jax.ShapeDtypeStruct((batch, q_len, heads, dim), dtype)
    key = jax.ShapeDtypeStruct((batch, q_len, kv_heads or heads, dim), dtype)
    return query, key, key
