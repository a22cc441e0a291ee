"""FAMILIES: what a search tries for calls of attention and of recurrences, and what it asks of their plans."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

from ..planning import Plan
from ..planning.policy import CHOICES
from ..planning.recurrent.planner import idle_axes
from ..planning.tables.table_plan import TablePlan
from ..verify.passes import Planned
from ..verify.recurrent_call import PlannedRecurrence
from .blocks import better_blocks
from .candidates import Family, SearchSpace
from .entries import Entry
from .latent_form import call_arguments_of, planned_of

__all__ = ["FAMILIES", "SearchedFamily"]

Ways = Iterator[tuple[str | None, str | None]]


class SearchedFamily(Family, Protocol):
    """What a search asks of a family's calls before they are planned, and of their plans."""

    def split(self, plan: Any) -> tuple[str, str | None]:
        """(what is done about a split sequence, '' if it isn't split; the order of a ring, None without one)."""
        raise NotImplementedError

    def repeated(self, plan: Any) -> str:
        """Why devices do the same work; '' if none do."""
        raise NotImplementedError

    def runs_as(self, entry: Entry) -> Hashable:
        """Equal for candidates that run the same."""
        raise NotImplementedError

    def refined(self, entry: Entry) -> Entry:
        """The entry with better sizes, if there are some."""
        return entry

    def planned(self, declaration: Any, operation: Any) -> Planned:
        """What is compiled."""
        raise NotImplementedError


class _Attention(SearchedFamily):
    strategies = tuple(name for name in CHOICES["sequence_parallel"] if name not in ("auto", "state"))
    # Operations tried besides the declared one, by platform; none whose kernels the declared one runs itself.
    others: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tpu": ("splash", "vanilla"),
        "cuda": ("flash_attn2", "sdpa", "vanilla"),
    }

    def operations(self, declared: str, platform: str, kind: Any) -> tuple[str, ...]:
        config = kind.config_elsewhere(platform)
        elsewhere = None if config is None else config.model_fields["operation"].default
        return tuple(dict.fromkeys((declared, *(name for name in self.others.get(platform, ()) if name != elsewhere))))

    def batch(self, problem: Any) -> int:
        return int(problem.batch)

    def split_by(self, problem: Any, generating: bool) -> tuple[tuple[str, int, str], ...]:
        tokens = (problem.kv_len, "keys") if generating else (problem.q_len, "queries")
        rows, heads = ("fsdp", problem.batch, "batch rows"), ("tp", problem.q_heads, "query heads")
        return rows, heads, ("sp", *tokens), ("sp", problem.kv_len, "keys")

    def second_axis(self, space: SearchSpace, sizes: Mapping[str, int]) -> str:
        both = "sp" in sizes and not space.generating
        return "" if both else "a second sequence axis requires ulysses_ring, which uses both"

    def ways(self, space: SearchSpace, sizes: Mapping[str, int]) -> Ways:
        if "sp" not in sizes:
            yield None, None
        elif space.generating:
            yield "auto", None
        else:
            for strategy in space.strategies:
                if (strategy == "ulysses_ring") != ("cp" in sizes):
                    continue
                rings = strategy in ("ring", "ulysses_ring")
                for order in space.orders if rings else (None,):
                    yield strategy, order

    def split(self, plan: Plan) -> tuple[str, str | None]:
        split = plan.placement.sequence
        order = None if not split.ring_axes else "zigzag" if split.zigzag else "contiguous"
        return split.strategy, order

    def repeated(self, plan: Plan) -> str:
        return plan.placement.repeated[0].reason if plan.placement.repeated else ""

    def runs_as(self, entry: Entry) -> Hashable:
        """'auto' where nothing is split, or a ring order equal to the plan's own."""
        native = entry.plan.kind != "platform"  # the same code for all
        name = str(entry.plan.route) if native and entry.plan.route else entry.candidate.operation
        return entry.candidate._replace(operation=name, strategy=entry.strategy, order=entry.order)

    def refined(self, entry: Entry) -> Entry:
        return better_blocks(entry)

    def planned(self, declaration: Any, operation: Any) -> Planned:
        return planned_of(declaration, operation)


class _Recurrence(SearchedFamily):
    strategies = ("state", "gather")

    def operations(self, declared: str, platform: str, kind: Any) -> tuple[str, ...]:
        return (declared,)

    def batch(self, problem: Any) -> int:
        return int(problem.size.get("batch", 1))

    def split_by(self, problem: Any, generating: bool) -> tuple[tuple[str, int, str], ...]:
        size = problem.size
        heads = ("heads", size["heads"]) if "heads" in size else ("channels", size["channels"])
        return (
            ("fsdp", self.batch(problem), "batch rows"),
            ("tp", heads[1], heads[0]),
            ("sp", size["q_len"], "tokens"),
        )

    def second_axis(self, space: SearchSpace, sizes: Mapping[str, int]) -> str:
        return "one axis splits the sequence of a recurrence"

    def ways(self, space: SearchSpace, sizes: Mapping[str, int]) -> Ways:
        for strategy in space.strategies if "sp" in sizes else (None,):
            yield strategy, None

    def split(self, plan: TablePlan) -> tuple[str, str | None]:
        placement = plan.placement
        return " ".join(word for word in (placement.strategy, placement.exchange) if word), None

    def repeated(self, plan: TablePlan) -> str:
        idle = idle_axes(plan.problem, plan.placement)
        return f"{', '.join(idle)} splits neither rows, heads nor tokens" if idle else ""

    def runs_as(self, entry: Entry) -> Hashable:
        return entry.candidate._replace(strategy=entry.strategy)

    def planned(self, declaration: Any, operation: Any) -> Planned:
        return PlannedRecurrence(operation, call_arguments_of(declaration))


FAMILIES: Mapping[str, SearchedFamily] = {"attention": _Attention(), "recurrence": _Recurrence()}
"""By the family of a declaration's operation."""
