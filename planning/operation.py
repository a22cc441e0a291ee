"""PlannedOperation: what planning needs from an operation class. operators/base.py adds how a call runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from ..errors import ConfigError, shown
from .capability import Capability
from .operation_config import OperationConfig
from .placement import Placement
from .problem import AttentionProblem
from .text import bytes_text

__all__ = ["METHODS", "Padding", "PlannedOperation", "dequantised_copy"]

# A platform's own methods, best first; forward_native is the last choice on all of them.
METHODS: dict[str, tuple[str, ...]] = {
    "tpu": ("forward_tpu",),
    "cuda": ("forward_cuda", "forward_gpu"),
    "rocm": ("forward_rocm", "forward_gpu"),
    "gpu": ("forward_gpu",),
    "cpu": ("forward_cpu",),
}
_ALL = (*dict.fromkeys(m for own in METHODS.values() for m in own), "forward_native")


class Padding(NamedTuple):
    """Rows that a kernel adds on each device, and their share of its work."""

    q_len: int
    kv_len: int
    waste: float


def dequantised_copy(problem: AttentionProblem, placement: Placement) -> str:
    """`a dequantised copy of key and value (bfloat16, 12.0 MiB per device, in addition to 6.0 MiB as given)`."""
    local, dims = placement.local, {"key": problem.head_dim, "value": problem.value_dim}
    given = local.batch * local.kv_heads * local.kv_len * sum(dims[name] for name in problem.quantised)
    copied = given * jnp.dtype(problem.runtime_dtype).itemsize
    return (
        f"a dequantised copy of {' and '.join(problem.quantised)} ({problem.runtime_dtype}, {bytes_text(copied)} per device, "
        f"in addition to {bytes_text(given)} as given)"
    )


class PlannedOperation:
    """A name, a config class, and forward methods that declare what they can do."""

    name: ClassVar[str]
    config: ClassVar[type[OperationConfig]]
    # The operation's only strategy for a split sequence; None: as the policy says.
    sequence_parallel: ClassVar[str | None] = None
    # The operation whose kernel this one runs, if any: its config applies here too.
    kernel_config: ClassVar[str | None] = None
    # Platforms on which it runs the kernels of another operation, and uses that operation's config instead of its own.
    kernels_on: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def implements(cls, method: str) -> bool:
        """Whether the class implements a forward method."""
        return getattr(cls, method, None) is not None

    @classmethod
    def declared_methods(cls) -> tuple[str, ...]:
        """The forward methods that the class implements. Errors: ConfigError for one without @implementation."""
        written = tuple(m for m in _ALL if cls.implements(m))
        if "forward_native" not in written:
            raise ConfigError(f"operation {shown(cls.name)} has no forward_native, which is required.")
        for method in written:
            cls.capability(method)
        return written

    @classmethod
    def running_methods(cls) -> dict[str, str]:
        """For each platform, the first method that can run there. A method without a published tolerance only refuses."""
        written = [m for m in cls.declared_methods() if cls.capability(m).tolerance]
        return {platform: next((m for m in own if m in written), "forward_native") for platform, own in METHODS.items()}

    @classmethod
    def capability(cls, method: str) -> Capability:
        """The declared capability of a forward method. Errors: ConfigError if it declares nothing."""
        found = getattr(getattr(cls, method, None), "capability", None)
        if not isinstance(found, Capability):
            raise ConfigError(f"{cls.name}.{method} declares nothing; decorate it with @implementation(...).")
        return found

    @classmethod
    def kernel_platform(cls, problem: AttentionProblem) -> str:
        """The platform whose methods are tried. An operation with an interpreter may override this."""
        return problem.platform

    @classmethod
    def resolve_config(cls, method: str, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Return the config with every default filled in for this method and these local shapes.

        Errors: ConfigError if there is none; the plan then has it as a reason against the method.
        """
        del method, placement
        return problem.config

    @classmethod
    def tuned_fields(cls, method: str, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The config's fields that a search may choose for this problem. Default: none."""
        del method, problem, placement
        return ()

    @classmethod
    def candidates(
        cls, method: str, problem: AttentionProblem, placement: Placement
    ) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """What a search tries: 'forward' and 'backward' -> fields to set, most promising first. The first is the heuristic's.

        The two are measured separately, so no field is in both.
        """
        del method, problem, placement
        return {}

    @classmethod
    def table_choice(
        cls, method: str, problem: AttentionProblem, placement: Placement
    ) -> tuple[str, Mapping[str, Any]] | None:
        """(source, fields) of a choice that is shipped with the operation, or None."""
        del method, problem, placement
        return None

    @classmethod
    def memory(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Mapping[str, Mapping[str, int]]:
        """The kernel's name in the compiled program -> bytes of fast memory, by what they hold; {} if they aren't counted."""
        del method, problem, placement, config
        return {}

    @classmethod
    def check_vma(cls, method: str, config: OperationConfig) -> bool:
        """Whether a method with this config can be traced under shard_map's replication check."""
        del config
        return cls.capability(method).check_vma

    @classmethod
    def works_on_parts(cls, method: str, config: OperationConfig, strategy: str) -> bool:
        """Whether a method with this config can work on a part of the keys. Default: False.

        strategy: 'split_kv', with one part, or 'ring', with one part after the other (LocalCall.ring).
        """
        del method, config, strategy
        return False

    @classmethod
    def padding(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Padding | None:
        """The method's padding on each device, or None."""
        del method, problem, placement, config
        return None

    @classmethod
    def remarks(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> tuple[str, ...]:
        """Notes for the plan: config fields that this method doesn't read, or a dequantised copy."""
        notes = []
        given = sorted(config.model_fields_set - {"operation", "schema_version"})
        if given and not cls.reads_config(method):
            notes.append(f"{method} doesn't read the config's {', '.join(given)}")
        if problem.quantised and cls.capability(method).dequantises:
            notes.append(f"{method} works on {dequantised_copy(problem, placement)}")
        return tuple(notes)

    @classmethod
    def reads_config(cls, method: str) -> bool:
        """Whether a method reads the config. By default the platforms' methods do, and forward_native if there are no others."""
        return method != "forward_native" or cls.declared_methods() == ("forward_native",)
