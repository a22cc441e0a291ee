"""RecurrentOutput: what a recurrent operation returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from ...compat import tree_of
from ...planning.tables.table_plan import TablePlan
from ...pytree_export import exported

__all__ = ["RecurrentOutput"]


@exported()
@tree_of(["attention_outputs", "state", "windows"], dropped=["plan"])
@dataclass(frozen=True)
class RecurrentOutput:
    """A JAX pytree. attention_outputs: of each token, in the call's layout; state: after the last token, the initial_state of a
    next call. windows: of a step over slots with convolutions, the slots of each one's last tokens, by the name of the argument.
    plan: what ran and why; not part of the tree, so the result of jit has None here."""

    attention_outputs: jax.Array
    state: jax.Array
    windows: Mapping[str, jax.Array] = field(default_factory=dict)
    plan: TablePlan | None = field(default=None, kw_only=True)
