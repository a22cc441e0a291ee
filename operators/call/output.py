"""AttentionOutput: what a call returns, and the plan that ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn

import jax
from typing_extensions import TypeVar  # with defaults, which typing has from Python 3.13 on

from ...compat import tree_of
from ...errors import InputTypeError, shown
from ...planning import Plan
from ...pytree_export import exported

__all__ = ["AttentionOutput"]


Weights = TypeVar("Weights", bound="jax.Array | None", default="jax.Array | None", covariant=True)
Lse = TypeVar("Lse", bound="jax.Array | None", default="jax.Array | None", covariant=True)
Ran = TypeVar("Ran", bound="Plan | None", default="Plan | None", covariant=True)


@exported()
@tree_of(["attention_outputs", "attention_weights", "lse"], dropped=["plan"])
@dataclass(frozen=True)
class AttentionOutput(Generic[Weights, Lse, Ran]):
    """The results of one attention call; a JAX pytree. `outputs, weights, lse = attend(...)` unpacks it.

    attention_outputs: in the query's layout, with the value's head dim.
    attention_weights: [batch, heads, q, kv] (thd: [heads, q, kv]) before dropout, or None. With sinks a row sums to
        less than 1; a fully masked row is 0.
    lse: [batch, heads, q] (thd: [heads, q]), in the softmax dtype, or None. A fully masked row has -inf, or, with sinks,
        the log-sum-exp of its head's sinks.
    plan: what ran and why. The call itself sets it, and it isn't part of the tree: branches of lax.cond may have different
        plans, and the result of jit, scan or tree_map has None here.
    """

    attention_outputs: jax.Array
    attention_weights: Weights = None  # type: ignore[assignment]
    lse: Lse = None  # type: ignore[assignment]
    plan: Ran = field(default=None, kw_only=True)  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        from ...drawing.html import fragment, heading, rows

        arrays: dict[str, jax.Array | None] = {
            "attention_outputs": self.attention_outputs,
            "attention_weights": self.attention_weights,
            "lse": self.lse,
        }
        table = rows((name, _shape_text(array)) for name, array in arrays.items() if array is not None)
        where = "no plan: what comes out of jax.jit, scan or tree_map has none"
        plan = rows([("plan", where)]) if self.plan is None else self.plan._repr_html_()
        return fragment([heading("AttentionOutput"), table, plan])

    def __getitem__(self, index: object) -> NoReturn:
        raise InputTypeError(
            f"AttentionOutput isn't a tuple and has no item {shown(index)}; wanted an attribute: .attention_outputs, the result, "
            "or another of attention_outputs, attention_weights, lse or plan."
        )

    def __iter__(self) -> Iterator[Any]:  # each an array or None: no annotation says which
        return iter((self.attention_outputs, self.attention_weights, self.lse))


def _shape_text(array: jax.Array) -> str:
    return f"{'x'.join(map(str, array.shape))} {array.dtype}"
