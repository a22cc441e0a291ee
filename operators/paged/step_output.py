"""StepOutput: what a step over pages returns, and the plan that ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import jax

from ...compat import tree_of
from ...errors import InputTypeError, shown
from ...planning.paged.paged_plan import PagedPlan
from ...pytree_export import exported
from ..paged_cache.state import CacheState

__all__ = ["StepOutput"]


@exported()
@tree_of(["attention_outputs", "lse", "state"], dropped=["plan"])
@dataclass(frozen=True)
class StepOutput:
    """The results of one step; a JAX pytree.

    attention_outputs: [tokens, heads, value_dim], 0 for a token that belongs to no sequence; None in mode 'insert'.
    lse: float32 [tokens, heads], if it was requested. state: the cache after the step. plan: what ran and why; not part of
    the tree, so the result of jit has None here.
    """

    attention_outputs: jax.Array | None
    lse: jax.Array | None
    state: CacheState
    plan: PagedPlan | None = field(default=None, kw_only=True)

    def __getitem__(self, index: object) -> NoReturn:
        raise InputTypeError(
            f"StepOutput isn't a tuple and has no item {shown(index)}; wanted an attribute: .attention_outputs, the result, "
            "or another of attention_outputs, lse, state or plan."
        )
