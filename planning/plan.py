"""Plan: what was decided of a call and why, as data, as text that a person reads, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jax.sharding import NamedSharding

from ..errors import RefusedError
from ..sharding import AttnShardingRules
from ..sharding.mesh import AnyMesh
from .capability import Reason
from .named import named_shardings
from .operation import Padding, PlannedOperation
from .operation_config import OperationConfig
from .placement import Placement
from .policy import Policy
from .problem import AttentionProblem
from .repeated import repeated_lines, repeated_work
from .route import Route
from .text import bytes_text, spec_text
from .tuning import Tuning

__all__ = ["WHY", "Kind", "Plan", "Rejected", "config_lines", "dropped_lines", "explain", "tensor_rows"]

Kind = Literal["platform", "native", "routed", "fallback", "refused"]
WHY = {
    "platform": "the platform's own implementation",
    "native": "dispatch: nothing better is written for this platform",
    "routed": "dispatch: the platform's own implementation leaves such calls to it",
    "fallback": "FALLBACK: the platform's own implementation refused",
    "refused": "REFUSED: no implementation may run this",
}


class Rejected(NamedTuple):
    """An implementation that was tried and every reason against it."""

    implementation: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What will run, with which config, where every tensor lives, and why nothing else runs.

    `kind` is 'platform' (the platform's own method), 'native' (there is nothing better here), 'routed' (the platform's own
    method leaves such calls to forward_native), 'fallback' (it refused) or 'refused' (`implementation` is then None). `mesh` is
    the one it was made for, where an operation made it; it is no part of what is compared, pickled or written.
    """

    operation: type[PlannedOperation]
    problem: AttentionProblem
    policy: Policy
    kind: Kind
    implementation: str | None
    method: str | None
    config: OperationConfig
    placement: Placement
    rejected: tuple[Rejected, ...]
    padding: Padding | None
    route: Route | None
    tuning: Tuning | None
    notes: tuple[str, ...]
    mesh: AnyMesh | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.problem, self.policy))

    def _key(self) -> tuple[object, ...]:
        # All else follows from these.
        return self.operation, self.problem, self.policy, self.tuning

    def __repr__(self) -> str:
        return f"Plan({self.implementation or 'refused'}: {self.problem.describe()})"

    @property
    def shardings(self) -> AttnShardingRules:
        """The ten declared specs."""
        return self.problem.rules

    def named_shardings(self, mesh: AnyMesh | None = None) -> Mapping[str, NamedSharding]:
        """Where every array of the call is put, by its name in the call, and the output: for jax.device_put and jax.jit.

        The fitted specs on `mesh`, by default the plan's own, else that of the context. Heads that are still to be repeated
        are not split. Errors: ShardingError for a plan without a mesh, or for another one.
        """
        return named_shardings(self.problem, self.placement, self.mesh if mesh is None else mesh)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mesh": None}  # devices can't be pickled

    def require(self) -> Plan:
        """Return self, or raise RefusedError with every reason if nothing can run."""
        if self.implementation is None:
            raise RefusedError(self.refusal())
        return self

    def refusal(self) -> str:
        """All reasons, one a line."""
        head = f"{self.problem.describe()}:"
        lines = [f"  {r.implementation}: {reason}" for r in self.rejected for reason in r.reasons]
        return "\n".join((head, *lines))

    def explain(self) -> str:
        """The whole decision as text."""
        return explain(self)

    def config_lines(self) -> list[str]:
        """Every field of the config that runs, and where it comes from."""
        return config_lines(self.config, self.problem.config, {} if self.tuning is None else self.tuning.fields)

    def __str__(self) -> str:
        return self.explain()

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        problem, placement = self.problem, self.placement
        tensors = {}
        for tensor in (*AttnShardingRules._fields, *problem.scales):
            declared, fitted = getattr(problem.rules, tensor, None), placement.fitted.get(tensor)
            tensors[tensor] = {
                "declared": None if declared is None else spec_text(declared),
                "fitted": None if fitted is None else spec_text(fitted.spec),
                "shape": None if fitted is None else list(fitted.shape),
                "device_shape": None if fitted is None else list(fitted.local_shape),
                "device_bytes": None if fitted is None else fitted.local_bytes,
                "dropped": [] if fitted is None else [asdict(d) for d in fitted.dropped],
            }
        return {
            "operation": problem.operation,
            "implementation": self.implementation,
            "kind": self.kind,
            "platform": problem.platform,
            "platform_source": problem.platform_source,
            "device_kind": problem.device_kind,
            "mode": problem.mode,
            "layout": problem.layout,
            "mask": problem.mask.describe(),
            "features": sorted(problem.features),
            "dtypes": {"query": problem.input_dtype, "key": problem.key_dtype, "value": problem.value_dtype},
            "config": self.config.every_field(),
            "mesh": [axis._asdict() for axis in problem.mesh],
            "tensors": tensors,
            "inside": {name: spec_text(spec) for name, spec in placement.run},
            "device_problem": placement.local._asdict(),
            "kv_repeat": placement.kv_repeat,
            "repeated_work": repeated_work(placement.repeated),
            "sequence_parallel": placement.sequence.strategy,
            "ring_order": ("zigzag" if placement.sequence.zigzag else "contiguous")
            if placement.sequence.ring_axes
            else None,
            "changes": list(placement.changes),
            "padding": None if self.padding is None else self.padding._asdict(),
            "route": None if self.route is None else self.route.to_dict(),
            "tuning": None if self.tuning is None else self.tuning.to_dict(),
            "rejected": [
                {"implementation": r.implementation, "reasons": [reason._asdict() for reason in r.reasons]}
                for r in self.rejected
            ],
            "notes": list(self.notes),
        }


def tensor_rows(plan: Plan) -> list[tuple[str, str, str, str, str, str]]:
    """Rows (tensor, declared spec, fitted spec, shape, per-device shape, per-device bytes) of the ten tensors and of scales."""
    rows = []
    for tensor in AttnShardingRules._fields:
        declared, fitted = getattr(plan.problem.rules, tensor), plan.placement.fitted.get(tensor)
        if declared is None:
            rows.append((tensor, "none", "", "", "", ""))
        elif fitted is None:
            rows.append((tensor, spec_text(declared), "not in this call", "", "", ""))
        else:
            rows.append(
                (
                    tensor,
                    spec_text(declared),
                    spec_text(fitted.spec),
                    _shape(fitted.shape),
                    _shape(fitted.local_shape),
                    bytes_text(fitted.local_bytes),
                )
            )
    for name in plan.problem.scales:
        fitted = plan.placement.fitted[name]
        shapes = _shape(fitted.shape), _shape(fitted.local_shape), bytes_text(fitted.local_bytes)
        rows.append((name, f"as {name.removesuffix('_scale')}", spec_text(fitted.spec), *shapes))
    return rows


def config_lines(
    config: OperationConfig, declared: OperationConfig, tuned: Mapping[str, object] = MappingProxyType({})
) -> list[str]:
    """`block_q=512 (declared)` and so on, every field of a resolved config: what is declared first, then what is tuned."""

    def origin(name: str) -> str:
        return "declared" if declared.is_set(name) else "tuned" if name in tuned else "default"

    fields = [name for name in type(config).model_fields if name not in ("operation", "schema_version")]
    return [
        f"{name}={getattr(config, name)} ({origin(name)})"
        for name in sorted(fields, key=lambda name: (not declared.is_set(name), name not in tuned))
    ]


def dropped_lines(plan: Plan, *, brief: bool = False) -> list[str]:
    """One line per dropped mesh axis, dimension and reason, naming the tensors; harmless ones come last.

    `brief` leaves out axes that split nothing anyway: a standard one that the mesh doesn't have, one of size 1, a Manual one.
    """
    if not plan.problem.mesh:
        return []  # without a mesh there is nothing that could be split
    could = {axis.name for axis in plan.problem.mesh if axis.size > 1 and axis.kind != "manual"}
    groups: dict[tuple[bool, str, str, str, str], list[str]] = {}
    for drop in plan.placement.fitted.dropped:
        if brief and drop.harmless and drop.axis not in could:
            continue
        key = (drop.harmless, drop.axis, drop.dim, drop.reason, "" if drop.harmless else f". {drop.hint}")
        groups.setdefault(key, []).append(drop.tensor)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [
        f"axis {axis!r} of {dim} in {', '.join(tensors)}: {reason}{hint}."
        for (_, axis, dim, reason, hint), tensors in ordered
    ]


def explain(plan: Plan) -> str:
    """Return the whole decision as plain text."""
    problem, placement = plan.problem, plan.placement
    lines = [
        problem.describe(),
        f"runs      {plan.implementation or 'nothing'} ({WHY[plan.kind]})",
        f"platform  {problem.platform}, from {problem.platform_source}",
        f"mask      {problem.mask.describe()}",
        f"scale     {problem.softmax_scale:.6g}, softmax in {problem.softmax_dtype}",
    ]
    if problem.logits_soft_cap is not None:
        lines.append(f"soft cap  {problem.logits_soft_cap:g}")
    reads = plan.method is not None and plan.operation.reads_config(plan.method)
    if reads and (fields := plan.config_lines()):
        lines.append("config    " + ", ".join(fields))
    if plan.tuning is not None:
        lines.append(f"tuning    {plan.tuning.source}: {plan.tuning.why}")
    if plan.route is not None:
        lines.append(f"route     {plan.route.describe()}")
    if plan.padding is not None:
        pad = plan.padding
        lines.append(
            f"padding   per device q +{pad.q_len}, kv +{pad.kv_len}: {pad.waste:.1%} of the work is on padding"
        )
    for rejected in plan.rejected:
        lines.append(f"not       {rejected.implementation}:")
        lines.extend(f"            {reason}" for reason in rejected.reasons)
    lines.append("tensors   declared -> fitted, shape -> per device, bytes per device")
    for tensor, declared, fitted, shape, local, size in tensor_rows(plan):
        where = declared if declared == fitted or not fitted else f"{declared} -> {fitted}"
        lines.append(f"  {tensor:<15} {where}" + (f"  {shape} -> {local}  {size}" if shape else ""))
    lines.extend(f"  dropped: {text}" for text in dropped_lines(plan))
    lines.extend(f"repeated  {text}" for text in repeated_lines(placement.repeated))
    lines.extend(f"inside    {change}" for change in placement.changes)
    lines.extend(f"note      {note}" for note in plan.notes)
    return "\n".join(lines)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
