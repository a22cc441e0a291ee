"""What an implementation can do, as data: the features that it consumes, and rules about the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ..sharding import ATTENTION
from .operation_config import OperationConfig
from .placement import Placement
from .problem import AttentionProblem, Problem
from .route import Route

__all__ = [
    "ALL_FEATURES", "FEATURES", "STATIC_MASKS", "STEP_FEATURES", "Capability", "Reason", "Rule", "Tolerance", "declares",
    "implementation",
]  # fmt: skip

# All features that a call or a step can request. A requested feature that an implementation doesn't consume is refused.
FEATURES: Mapping[str, str] = {
    "causal": "causal mask",
    "sliding_window": "sliding window",
    "chunked": "chunked mask",
    "prefix": "prefix mask",
    "mask_function": "registered mask function",
    "blocks": "a layout of blocks",
    "segment_ids": "segment ids (packed sequences)",
    "kv_lengths": "a kv length per batch row",
    "positions": "positions given as arrays",
    "dense_mask": "a boolean mask array",
    "chosen_blocks": "blocks chosen at run time",
    "dynamic_or": "an array mask under `|` or `~`",
    "dynamic_query_offset": "a query offset known only at run time",
    "bias": "additive bias",
    "logits_soft_cap": "soft cap on the logits",
    "score": "a score function",
    "sinks": "attention sinks (softmax_aux)",
    "dropout": "dropout on the attention weights",
    "selected": "keys that are selected for each query",
    "draft_tree": "a tree of draft tokens in a step over pages",
    "spans": "spans of tokens that see one another in a step over pages",
    "prefix_lengths": "prefixes whose tokens see one another in a step over pages",
    "return_weights": "the attention weights as an output",
    "return_lse": "the log-sum-exp as an output",
    "gqa": "fewer kv heads than query heads",
    "value_dim": "a value head dim other than the query's",
    "latent_values": "values that are the first numbers of their keys, in pages of latents",
    "rope_dtype": "rotary keys that aren't quantised, beside quantised latents",
    "quantized_kv": "int8 or fp8 keys and values, with scales",
}
# Those that only steps over pages can request; and all that calls can.
STEP_FEATURES = frozenset({"selected", "draft_tree", "spans", "prefix_lengths", "latent_values", "rope_dtype"})
ALL_FEATURES = frozenset(FEATURES) - STEP_FEATURES
STATIC_MASKS = frozenset({"causal", "sliding_window", "chunked", "prefix", "mask_function"})


class Reason(NamedTuple):
    """Why an implementation can't run a problem: a stable code, the field, the message with the values, and the hint."""

    code: str
    field: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]. {self.hint}"


@dataclass(frozen=True)
class Rule:
    """A condition that a problem must meet. `message` and `hint` are formatted with p=problem and c=config; a message may also
    be a function of the two. The problem is of the class that the operation plans, the config of the class that the
    implementation reads.

    `test` is pure and returns True if the problem meets the condition. `routes`: if it fails, another method is better for
    such a problem, so using that one is dispatch, not a fallback.
    """

    code: str
    field: str
    test: Callable[[Any, Any], bool]
    message: str | Callable[[Any, Any], str]
    hint: str
    routes: bool = False

    def check(self, problem: Problem, config: OperationConfig) -> Reason | None:
        """Return the reason if this problem breaks the rule, else None."""
        if self.test(problem, config):
            return None
        written = self.message
        message = written.format(p=problem, c=config) if isinstance(written, str) else written(problem, config)
        return Reason(self.code, self.field, message, self.hint.format(p=problem, c=config))


class Tolerance(NamedTuple):
    """Published error against the float64 reference, per row and relative to the row's size (verify/closeness.py)."""

    forward: float
    backward: float | None  # None: there is no gradient


@dataclass(frozen=True)
class Capability:
    """The declared abilities of one implementation (a forward method of an operation)."""

    consumes: frozenset[str]
    rules: tuple[Rule, ...] = ()
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    # Whether it can be traced under shard_map's check of replication, as some Pallas kernels can't.
    check_vma: bool = True
    # Whether quantised keys and values are dequantised to the run-time dtype before it starts.
    dequantises: bool = False
    # Chooses a route, if the implementation has several.
    route: Callable[[AttentionProblem, Placement, Any], Route] | None = None
    # Whether it writes keys and values into a cache's pages while it attends.
    writes_pages: bool = False
    # Which sizes may be symbolic dimensions of jax.export: 'batch', 'length'.
    symbolic: frozenset[str] = frozenset()
    # The operation's own operands that it takes.
    operands: frozenset[str] = frozenset()

    def reasons(self, problem: AttentionProblem, config: OperationConfig) -> tuple[Reason, ...]:
        """Return every reason against this problem; () if it can run."""
        missing = [
            Reason(f"feature.{name}", name, f"does not support {FEATURES[name]}", _hint(name))
            for name in sorted(problem.features - self.consumes)
        ]
        missing += [
            Reason(f"operand.{x.name}", x.name, f"does not take {x.name}", f"Leave {x.name} out.")
            for x in problem.operands
            if not x.operand.feature and x.name not in ATTENTION and x.name not in self.operands
        ]
        unknown = [_symbolic(name, problem) for name in sorted(problem.symbolic - self.symbolic)]
        if problem.symbolic and any(axis.splits for axis in problem.mesh):
            unknown.append(_over_devices(problem))
        # A rule about a size that this implementation doesn't take can't be tested.
        failing = () if unknown else (rule.check(problem, config) for rule in self.rules)
        return (*missing, *unknown, *(reason for reason in failing if reason is not None))

    def leaves(self, problem: AttentionProblem, config: OperationConfig) -> bool:
        """Whether this implementation leaves such problems to another one, regardless of other reasons."""
        if problem.symbolic - self.symbolic:
            return False
        return any(rule.routes and rule.check(problem, config) is not None for rule in self.rules)


def declares(
    consumes: Iterable[str],
    *,
    rules: Iterable[Rule] = (),
    tolerance: Mapping[str, Tolerance | tuple[float, float | None]],
    check_vma: bool = True,
    dequantises: bool = False,
    route: Callable[[AttentionProblem, Placement, Any], Route] | None = None,
    writes_pages: bool = False,
    symbolic: Iterable[str] = (),
    operands: Iterable[str] = (),
) -> Capability:
    """What an implementation can do; see Capability. Errors: ValueError for an unknown feature."""
    features = frozenset(consumes)
    if unknown := sorted(features - FEATURES.keys()):
        raise ValueError(f"unknown features {unknown}; wanted some of {sorted(FEATURES)}.")
    published = {dtype: Tolerance(*value) for dtype, value in tolerance.items()}
    return Capability(
        features,
        tuple(rules),
        published,
        check_vma,
        dequantises,
        route,
        writes_pages,
        frozenset(symbolic),
        frozenset(operands),
    )


F = TypeVar("F", bound=Callable)


def implementation(consumes: Iterable[str], **declared: Any) -> Callable[[F], F]:
    """Declare what a forward method can do, with the arguments of `declares`. Errors: ValueError for an unknown feature."""
    of_method = declares(consumes, **declared)

    def declare(method: F) -> F:
        method.capability = of_method  # type: ignore[attr-defined]
        return method

    return declare


def _symbolic(name: str, problem: AttentionProblem) -> Reason:
    sizes = f"batch {problem.batch}" if name == "batch" else f"q_len {problem.q_len}, kv_len {problem.kv_len}"
    return Reason(
        f"symbolic.{name}",
        "batch" if name == "batch" else "q_len",
        f"takes no symbolic {name}: {sizes}",
        "Export the function with numbers, or use 'vanilla'.",
    )


def _over_devices(problem: AttentionProblem) -> Reason:
    return Reason(
        "symbolic.mesh",
        "mesh",
        f"takes no symbolic {' or '.join(sorted(problem.symbolic))} on a mesh of several devices: jax exports a shard_map with "
        "symbolic sizes, but can't run it",
        "Export the function with numbers, or without a mesh.",
    )


def _hint(feature: str) -> str:
    return {
        "value_dim": "Use 'vanilla'.",
        "return_weights": "Leave return_weights out, or use 'vanilla'.",
        "quantized_kv": "Dequantise key and value before the call, or use 'vanilla'.",
        "dense_mask": "Declare the structure (Causal, SlidingWindow, segment ids, kv_lengths) instead, or use 'vanilla'.",
    }.get(feature, f"Leave {feature} out, or use 'vanilla'.")
