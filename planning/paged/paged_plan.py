"""PagedPlan: what was decided for a step over pages, as text, pictures and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from ...drawing import DevicePicture
from ...drawing.html import fragment, heading, pictures, rows
from ...sharding import FittedSpec
from ...sharding.mesh import AnyMesh
from ..cache.cache_plan import CachePlan, fact_rows
from ..decision import WHY, Decision
from ..notes import is_info
from ..text import bytes_text, spec_text
from .draw_step import draw_step
from .page_reads import PageReads
from .paged_problem import PagedProblem

__all__ = ["PagedPlan", "StepPlacement", "step_rows", "token_rows"]


class StepPlacement(NamedTuple):
    """Where a step's arrays are: query, key, value and what else it has, and its results."""

    tensors: tuple[FittedSpec, ...]


@dataclass(frozen=True, eq=False, repr=False)
class PagedPlan(Decision[PagedProblem, StepPlacement]):
    """The plan of a step whose keys lie in a cache's pages. `reads` is None if the batch's lengths are unknown."""

    reads: PageReads | None = None

    def _key(self) -> tuple[object, ...]:
        return (*super()._key(), self.reads)

    @property
    def tensors(self) -> tuple[FittedSpec, ...]:
        """The step's arrays and results."""
        return self.placement.tensors

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

    def explain(self, verbose: bool = False) -> str:
        """The decision as text: the step's, then the cache's, with what needs your attention. With `verbose`, all of it."""
        lines = [self.problem.describe(), f"runs      {self.implementation or 'nothing'} ({WHY[self.kind]})"]
        lines += [f"{name:<9} {text}" for name, text in step_rows(self, verbose=verbose)]
        for rejected in self.rejected:
            lines.append(f"not       {rejected.implementation}:")
            lines.extend(f"            {reason}" for reason in rejected.reasons)
        # On one device specs split nothing.
        whole = verbose or math.prod(axis.size for axis in self.problem.mesh) > 1
        if whole:
            lines.append("tensors   spec, shape -> per device, bytes per device")
            for name, spec, shape, local, size in token_rows(self):
                lines.append(f"  {name:<15} {spec}  {shape} -> {local}  {size}")
        shown_notes = [note for note in self.notes if verbose or not is_info(note)]
        lines += [*(f"note      {note}" for note in shown_notes), "", self.cache.explain(arrays=whole)]
        if not verbose:
            lines.append(f"more      verbose=True adds defaults of the config{'' if whole else ', arrays'}")
        return "\n".join(lines)

    def draw(self, mesh: AnyMesh | None = None) -> DevicePicture:
        """Draw tokens and pages over the mesh, device by device, with dropped axes, copies, and arrows for what is sent.

        `mesh` names the devices, which are numbered otherwise. Errors: ShardingError for another mesh than the plan's.
        """
        return draw_step(self.problem, self.tensors, mesh)

    def _repr_html_(self) -> str:
        runs = ("runs", f"{self.implementation or 'nothing'} ({WHY[self.kind]})")
        note_rows = [("note", note) for note in self.notes if not is_info(note)]
        parts = [heading(self.problem.describe()), rows([runs, *step_rows(self, verbose=False), *note_rows])]
        parts += [heading(self.cache.describe()), rows(fact_rows(self.cache))]
        if math.prod(axis.size for axis in self.problem.mesh) > 1:
            parts.append(pictures([self.draw().svg()]))
        return fragment(parts)

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        problem = self.problem
        return self.decision_dict() | {
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
            "tensors": {
                fitted.tensor: {
                    "spec": spec_text(fitted.spec),
                    "shape": list(fitted.shape),
                    "device_shape": list(fitted.local_shape),
                    "device_bytes": fitted.local_bytes,
                    "dropped": [asdict(drop) for drop in fitted.dropped],
                }
                for fitted in self.tensors
            },
            "reads": None if self.reads is None else self.reads._asdict(),
            "cache": self.cache.to_dict(),
        }


def step_rows(plan: PagedPlan, *, verbose: bool = True) -> list[tuple[str, str]]:
    """The labelled lines between what runs and the reasons against the others: all of them, or those of one screen."""
    problem = plan.problem
    rows = [
        ("platform", f"{problem.platform}, from {problem.platform_source}"),
        ("mask", problem.mask.describe()),
        (
            "scale",
            f"{problem.softmax_scale:.6g}, {'softmax' if problem.top_k is None else 'scores'} in {problem.softmax_dtype}",
        ),
    ]
    if problem.logits_soft_cap is not None:
        rows.append(("soft cap", f"{problem.logits_soft_cap:g}"))
    if problem.score is not None:
        rows.append(("score", problem.score.describe()))
    if problem.cache.group is not None:
        number, count = problem.cache.group
        window = problem.cache.window_tokens
        tokens_text = "all tokens" if window is None else f"a window of {window} tokens"
        rows.append(("layers", f"of group {number} of {count}: {tokens_text}"))
    if problem.reads_layer is not None:
        rows.append(("keys", f"those of layer {problem.reads_layer}, which this layer reads"))
    rows.append(("update", (_UPDATES if problem.top_k is None else _INDEX_UPDATES)[problem.update]))
    lines = [] if plan.method is None else plan.config_lines()
    if lines := [line for line in lines if verbose or line.origin != "default"]:
        rows.append(("config", ", ".join(lines)))
    if plan.tuning is not None and (verbose or plan.tuning.source != "heuristic"):
        rows.append(("tuning", f"{plan.tuning.source}: {plan.tuning.why}"))
    if plan.reads is not None:
        rows.append(("reads", plan.reads.describe()))
    return rows


def token_rows(plan: Decision[Any, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows (tensor, spec, shape, per-device shape, per-device bytes)."""

    def shape(sizes: tuple[int, ...]) -> str:
        return "x".join(map(str, sizes))

    return [
        (x.tensor, spec_text(x.spec), shape(x.shape), shape(x.local_shape), bytes_text(x.local_bytes))
        for x in plan.placement.tensors
    ]


_UPDATES = {
    "before": "before: keys and values are written to their pages, then attended to",
    "fused": "fused: the kernel writes keys and values to their pages while it attends, if it can",
    "none": "none: the pages are used as they are",
}
_INDEX_UPDATES = dict.fromkeys(("before", "fused"), "before: index keys are written to their pages, then selected from")
_INDEX_UPDATES["none"] = _UPDATES["none"]
