"""Plan: what was decided for a call and why, as data, text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding, PartitionSpec

from ..lazy import LazyModule
from ..sharding import AttnShardingRules
from ..sharding.mesh import AnyMesh
from ..symbolic import size_value
from .call_arrays import CallArray, call_arrays
from .decision import Screen
from .named import named_shardings
from .plan_fields import PlanFields
from .plan_text import decision_rows, explain, placement_rows, screen_rows, tensor_rows
from .repeated import repeated_work
from .text import bytes_text, spec_text
from .traffic import sends

if TYPE_CHECKING:
    from .. import drawing
else:
    drawing = LazyModule("attnops.drawing")  # with the first picture

__all__ = ["Plan"]


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanFields):
    """The plan of a call whose keys are arrays."""

    @property
    def shardings(self) -> AttnShardingRules:
        """The ten declared specs."""
        return self.problem.rules

    def named_shardings(self, mesh: AnyMesh | None = None) -> Mapping[str, NamedSharding]:
        """The shardings of the call's arrays and of the output, by name, for jax.device_put and jax.jit.

        These are the fitted specs on `mesh`; default: the plan's mesh, else the context's. Heads that will be repeated are not
        split. Errors: ShardingError for a plan without a mesh, or for another mesh.
        """
        return named_shardings(self.problem, self.placement, self.mesh if mesh is None else mesh)

    def spec_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of the call, of this name and shape, before the call starts."""
        return self.placement.call_spec(name, shape)

    def brief_rows(self) -> list[tuple[str, str]]:
        """A device's part of the query, and what is done about a split sequence."""
        query, rows = self.placement.fitted.get("query"), []
        if query is not None and self.problem.devices > 1:
            shape = "x".join(map(str, query.local_shape))
            rows.append(
                ("device", f"query {shape} ({bytes_text(query.local_bytes)}) on each of {self.problem.devices}")
            )
        return [*rows, *placement_rows(self)]

    def explain(self, verbose: bool = False) -> str:
        """The decision as text: what runs and why, and what needs your attention. With `verbose`, all of it."""
        return explain(self, verbose=verbose)

    def screen(self, more: str, notes: tuple[str, ...] = (), verbose: bool = False) -> Screen:
        """See Decision."""
        if not verbose:
            return Screen(screen_rows(self, notes, more))
        rows = self.rejected_rows
        for label, line in decision_rows(self):
            rows += [(label, text) for text in (self.config_lines() if label == "config" else [line])]
        head = ("tensor", "declared", "fitted", "shape", "per device", "bytes")
        same = tuple((x[0], x[1], "same" if x[3] and x[1] == x[2] else x[2], *x[3:]) for x in tensor_rows(self))
        every_note = [("note", str(note)) for note in (*self.notes, *notes)]
        return Screen(rows, (head, *same), (*placement_rows(self, brief=False), *every_note))

    def page_rows(self) -> list[tuple[str, str]]:
        """One screen of it as labelled lines, after what runs, for a page."""
        return [row for row in screen_rows(self) if row[0] != "more"]

    def draw(self, mesh: AnyMesh | None = None) -> drawing.DevicePicture:
        """Draw each tensor over the mesh, device by device, with dropped axes, copies, and arrows for what is sent.

        `mesh` names the devices; default: the plan's mesh, else devices are numbered. Errors: ShardingError for another mesh.
        """
        from .draw_plan import draw_plan

        return draw_plan(self, mesh)

    def placement_picture(self) -> drawing.DevicePicture | None:
        """What `draw` draws."""
        return self.draw()

    def _repr_html_(self) -> str:
        from .plan_html import plan_html

        return plan_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        problem, placement = self.problem, self.placement
        tensors = {}
        arrays = {array.name: array for array in call_arrays(self)}
        for tensor in (*AttnShardingRules._fields, *(name for name in arrays if name not in AttnShardingRules._fields)):
            declared, fitted = getattr(problem.rules, tensor, None), placement.fitted.get(tensor)
            array = arrays.get(tensor)
            if array is None and fitted is not None:  # query3d, a query of one token
                local = fitted.local_shape, fitted.local_bytes
                array = CallArray(tensor, problem.dtype_of(tensor), fitted.spec, fitted.shape, *local)
            tensors[tensor] = {
                "declared": None if declared is None else spec_text(declared),
                "fitted": None if fitted is None else spec_text(fitted.spec),
                "dtype": None if array is None else array.dtype,
                "shape": None if array is None else [*map(size_value, array.shape)],
                "device_shape": None if array is None else [*map(size_value, array.device_shape)],
                "device_bytes": None if array is None else size_value(array.device_bytes),
                "inside_bytes": None if array is None or array.inside is None else size_value(array.inside[1]),
                "dropped": [] if fitted is None else [asdict(d) for d in fitted.dropped],
            }
        return self.decision_dict() | {
            "layout": problem.layout,
            "dtypes": {"query": problem.input_dtype, "key": problem.key_dtype, "value": problem.value_dtype},
            "tensors": tensors,
            "inside": {name: spec_text(spec) for name, spec in placement.run},
            "device_problem": {name: size_value(size) for name, size in placement.local._asdict().items()},
            "kv_repeat": placement.kv_repeat,
            "repeated_work": repeated_work(placement.repeated),
            "sequence_parallel": placement.sequence.strategy,
            "ring_order": ("zigzag" if placement.sequence.zigzag else "contiguous")
            if placement.sequence.ring_axes
            else None,
            "changes": list(placement.changes),
            "sends": {
                name: {"bytes": None if traffic.unknown else traffic.sent_bytes, "unknown": list(traffic.unknown)}
                for name, traffic in sends(self).items()
            },
            "padding": None if self.padding is None else self.padding._asdict(),
            "route": None if self.route is None else self.route.to_dict(),
        }
