"""PagedPlan: what was decided for a step over pages, as text, pictures and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from ...drawing import DevicePicture
from ...drawing.html import fragment, heading, pictures, rows
from ...sharding import FittedSpec
from ...sharding.mesh import AnyMesh
from ..cache.cache_plan import CachePlan, fact_rows
from ..decision import WHY
from ..notes import is_info
from ..tables.fitted_plan import FittedPlan
from ..text import bytes_text
from .draw_step import draw_step
from .page_reads import PageReads
from .paged_problem import PagedProblem

__all__ = ["PagedPlan", "StepPlacement"]


class StepPlacement(NamedTuple):
    """Where a step's arrays are: query, key, value and what else it has, and its results."""

    tensors: tuple[FittedSpec, ...]


@dataclass(frozen=True, eq=False, repr=False)
class PagedPlan(FittedPlan[PagedProblem, StepPlacement]):
    """The plan of a step whose keys lie in a cache's pages. `reads` is None if the batch's lengths are unknown."""

    reads: PageReads | None = None

    subject: ClassVar[str] = "step"

    def _key(self) -> tuple[object, ...]:
        return (*super()._key(), self.reads)

    @property
    def cache(self) -> CachePlan:
        """The memory of the cache, and where its arrays are."""
        return self.problem.cache

    @property
    def runs(self) -> Any:
        """The PagedImplementation that was chosen; None if nothing can run."""
        return super().runs

    def require(self) -> Self:
        """Return self. Errors: RefusedError with every reason if nothing can run, or the cache can't be created."""
        self.cache.require()
        return super().require()

    def brief_rows(self) -> list[tuple[str, str]]:
        """Scalar memory that the page table takes, and the pages that a known batch reads."""
        cache, rows = self.cache, []
        if cache.scalar_limit is not None:
            table, limit = bytes_text(cache.page_table_bytes), bytes_text(cache.scalar_limit)
            rows.append(("cache", f"page table: {table} of {limit} of scalar memory"))
        return rows if self.reads is None else [*rows, ("reads", self.reads.describe())]

    def draw(self, mesh: AnyMesh | None = None) -> DevicePicture:
        """Draw tokens and pages over the mesh, device by device, with dropped axes, copies, and arrows for what is sent.

        `mesh` names the devices, which are numbered otherwise. Errors: ShardingError for another mesh than the plan's.
        """
        return draw_step(self.problem, self.tensors, mesh)

    def placement_picture(self) -> DevicePicture | None:
        """What `draw` draws; none on one device."""
        return None if self.on_one_device else self.draw()

    def _repr_html_(self) -> str:
        runs = ("runs", f"{self.implementation or 'nothing'} ({WHY[self.kind]})")
        note_rows = [("note", note) for note in self.notes if not is_info(note)]
        parts = [heading(self.problem.describe()), rows([runs, *self.rows(), *note_rows])]
        parts += [heading(self.cache.describe()), rows(fact_rows(self.cache))]
        if (picture := self.placement_picture()) is not None:
            parts.append(pictures([picture.svg()]))
        return fragment(parts)

    def facts(self) -> dict[str, Any]:
        """The step, what is read of the pages, and the cache's plan."""
        problem = self.problem
        return {
            "update": problem.update,
            "max_q_len": problem.max_q_len,
            **({} if problem.top_k is None else {"top_k": problem.top_k}),
            "reads_layer": problem.reads_layer,
            "group": 0 if problem.cache.group is None else problem.cache.group[0],
            "dtypes": {
                "query": problem.input_dtype,
                "key": problem.key_dtype,
                "value": problem.value_dtype,
                "run": problem.runtime_dtype,
                "pages": problem.stored_dtype,
            },
            "reads": None if self.reads is None else self.reads._asdict(),
            "cache": self.cache.to_dict(),
        }

    def rows(self, verbose: bool = False) -> list[tuple[str, str]]:
        """The labelled lines between what runs and the reasons against the others: those of one screen, or all of them."""
        problem = self.problem
        lines = [
            ("platform", f"{problem.platform}, from {problem.platform_source}"),
            ("mask", problem.mask.describe()),
            (
                "scale",
                f"{problem.softmax_scale:.6g}, {'softmax' if problem.top_k is None else 'scores'} in {problem.softmax_dtype}",
            ),
        ]
        if problem.logits_soft_cap is not None:
            lines.append(("soft cap", f"{problem.logits_soft_cap:g}"))
        if problem.score is not None:
            lines.append(("score", problem.score.describe()))
        if problem.cache.group is not None:
            number, count = problem.cache.group
            window = problem.cache.window_tokens
            tokens_text = "all tokens" if window is None else f"a window of {window} tokens"
            lines.append(("layers", f"of group {number} of {count}: {tokens_text}"))
        if problem.reads_layer is not None:
            lines.append(("keys", f"those of layer {problem.reads_layer}, which this layer reads"))
        lines.append(("update", (_UPDATES if problem.top_k is None else _INDEX_UPDATES)[problem.update]))
        lines += self.config_rows(verbose)
        if self.tuning is not None and (verbose or self.tuning.source != "heuristic"):
            lines.append(("tuning", f"{self.tuning.source}: {self.tuning.why}"))
        if self.reads is not None:
            lines.append(("reads", self.reads.describe()))
        return lines


_UPDATES = {
    "before": "before: keys and values are written to their pages, then attended to",
    "fused": "fused: the kernel writes keys and values to their pages while it attends, if it can",
    "none": "none: the pages are used as they are",
}
_INDEX_UPDATES = dict.fromkeys(("before", "fused"), "before: index keys are written to their pages, then selected from")
_INDEX_UPDATES["none"] = _UPDATES["none"]
