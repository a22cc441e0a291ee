"""plan(problem, policy): the one function that decides what runs, and keeps why."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from ..errors import ConfigError, RefusedError
from ..sharding import AttnShardingRules
from . import tune_cache
from .capability import Reason
from .config import OperationConfig
from .explain import explain, spec_text
from .operation import METHODS
from .placement import Placement
from .policy import Policy
from .problem import AttentionProblem
from .repeated import repeated_work
from .route import Route
from .sequence.choice import placements
from .sequence.notes import sequence_notes
from .sequence.reasons import sequence_reasons
from .tuning import Tuning, choose

__all__ = ["Padding", "Plan", "Rejected", "plan"]

Kind = Literal["platform", "native", "routed", "fallback", "refused"]


class Rejected(NamedTuple):
    """An implementation that was tried and every reason against it."""

    implementation: str
    reasons: tuple[Reason, ...]


class Padding(NamedTuple):
    """Rows that a kernel adds on each device, and the share of its work that they are."""

    q_len: int
    kv_len: int
    waste: float


@dataclass(frozen=True, eq=False)
class Plan:
    """What will run, with which config, where every tensor lives, and why nothing else runs.

    `kind` is 'platform' (the platform's own method), 'native' (there is nothing better here), 'routed' (the platform's own
    method leaves such calls to forward_native), 'fallback' (it refused) or 'refused' (`implementation` is then None).
    """

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.problem, self.policy))

    def _key(self) -> tuple[object, ...]:
        # All else follows from these.
        return self.problem, self.policy, self.tuning

    def __repr__(self) -> str:
        return f"Plan({self.implementation or 'refused'}: {self.problem.describe()})"

    @property
    def shardings(self) -> AttnShardingRules:
        """The ten declared specs."""
        return self.problem.rules

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
            "operation": problem.operation.name,
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


def _unresolved(problem: AttentionProblem, error: ConfigError) -> Reason:
    """Why a config can't be filled in for a problem; the error tells what is wanted."""
    declared = problem.config.model_fields_set - {"operation", "schema_version"}
    fix = "Declare other sizes, or leave them out." if declared else "Split the call over more devices."
    return Reason("config", "operation_configs", str(error).removesuffix("."), fix)


_DEFAULT = Policy()


def plan(problem: AttentionProblem, policy: Policy = _DEFAULT) -> Plan:
    """Decide what runs, from the problem, the policy and the tuned choices that are kept; cached until one is kept.

    Errors: ShardingError, or ConfigError for sizes that aren't kept, where the policy says so. A problem that nothing can run
    gives a plan of kind 'refused'; so does, with fallback='error', a config that can't be resolved for it.
    """
    return _decide(problem, policy, tune_cache.state(problem.device))


@functools.lru_cache(maxsize=4096)
def _decide(problem: AttentionProblem, policy: Policy, kept: object) -> Plan:
    del kept
    operation = problem.operation
    place = placements(problem, policy)
    platform = operation.kernel_platform(problem)
    own = tuple(m for m in METHODS.get(platform, ()) if operation.implements(m))
    placement = place(own[0] if own else "forward_native")
    notes = list(problem.notes)
    if platform != problem.platform:
        notes.append(f"kernel of {platform} run on {problem.platform} by its config (interpreted)")
    rejected: list[Rejected] = []
    routed = bool(own) and all(operation.capability(m).leaves(problem, problem.config) for m in own)
    decided = Plan(problem, policy, "refused", None, None, problem.config, placement, (), None, None, None, ())
    for method in (*own, "forward_native"):
        name = f"{operation.name}.{method}"
        if method == "forward_native" and own and not routed and policy.fallback == "error":
            reason = Reason("policy.fallback", "fallback", "fallback is an error by policy", "Declare fallback='warn'.")
            rejected.append(Rejected(name, (reason,)))
            break
        capability, placement = operation.capability(method), place(method)
        reasons = (
            *capability.reasons(problem, problem.config),
            *sequence_reasons(problem, placement, method, policy.ring_order),
        )
        if reasons:
            rejected.append(Rejected(name, reasons))
            continue
        try:
            config = operation.resolve_config(method, problem, placement)
        except ConfigError as error:
            rejected.append(Rejected(name, (_unresolved(problem, error),)))
            continue
        tuning = choose(operation, method, problem, placement, policy.tuning)
        if tuning is not None and tuning.fields:
            asked = replace(problem, config=problem.config.with_fields(tuning.fields))
            config = operation.resolve_config(method, asked, placement)
        kind: Kind = "platform" if method in own else "routed" if routed else "fallback" if own else "native"
        if kind == "native":
            notes.append(
                f"{operation.name} has no kernel of its own on {problem.platform}: forward_native is its dispatch"
            )
        padding = operation.padding(method, problem, placement, config)
        notes.extend(operation.remarks(method, problem, placement, config))
        notes.extend(sequence_notes(problem, policy, placement))
        if tuning is None and policy.tuning in ("tune", "error"):
            notes.append(f"tuning={policy.tuning!r} has no effect: {name} has no sizes to choose for this call")
        route = None if capability.route is None else capability.route(problem, placement, config)
        decided = replace(
            decided,
            kind=kind,
            implementation=name,
            method=method,
            config=config,
            placement=placement,
            padding=padding,
            route=route,
            tuning=tuning,
        )
        break
    return replace(decided, rejected=tuple(rejected), notes=tuple(notes))
