"""PlannedOperation: what planning needs from an operation class. operators/call/base.py adds how a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from ..call_arguments import CALL_OPTIONS
from ..errors import ConfigError, shown
from ..sharding import ATTENTION, OperandTable
from .capability import Capability
from .implementations import Implementation, MethodImplementation
from .operation_config import OperationConfig
from .planner import Planner
from .problem import Problem

__all__ = ["METHODS", "PLATFORM_METHODS", "PlannedOperation"]

# A platform's own methods, best first; forward_native is the last choice on all of them.
METHODS: dict[str, tuple[str, ...]] = {
    "tpu": ("forward_tpu",),
    "cuda": ("forward_blackwell", "forward_hopper", "forward_cuda", "forward_gpu"),
    "rocm": ("forward_rocm", "forward_gpu"),
    "gpu": ("forward_gpu",),
    "cpu": ("forward_cpu",),
}
_OPTIONS = ("mask", *CALL_OPTIONS)
PLATFORM_METHODS = tuple(dict.fromkeys(m for methods in METHODS.values() for m in methods))
_ALL = (*PLATFORM_METHODS, "forward_native")


class PlannedOperation:
    """A name, a config class, and for each platform an implementation: an object, or a method that declares what it can do."""

    name: ClassVar[str]
    config: ClassVar[type[OperationConfig]]
    # The arrays of a call. An operation with arrays of its own adds rows: `operands = ATTENTION.extended(Operand(...))`.
    operands: ClassVar[OperandTable] = ATTENTION
    # Where a call's keys are: in arrays of the call, or in a cache's pages.
    keys_in: ClassVar[Literal["arrays", "pages"]] = "arrays"
    # The page layout that other libraries' names for it stand for.
    cache_layout: ClassVar[str | None] = None
    # What a call does: attends to keys, selects them, or carries a state along the tokens.
    family: ClassVar[Literal["attention", "selection", "recurrence"]] = "attention"
    # How `attnops certify` calls it, a convention's name; base classes set it.
    convention: ClassVar[str | None] = None
    # How its calls are planned; base classes set it.
    planner: ClassVar[Planner[Any, Any]]
    # The operation's only strategy for a split sequence; None: as the policy says.
    sequence_parallel: ClassVar[str | None] = None
    # The operation whose kernel this one runs, if any: its config applies here too.
    backend_operation: ClassVar[str | None] = None

    @classmethod
    def implements(cls, method: str) -> bool:
        """Whether the class implements a forward method."""
        return getattr(cls, method, None) is not None

    @classmethod
    def declared_methods(cls) -> tuple[str, ...]:
        """The forward methods that the class implements. Errors: ConfigError for one without @implementation."""
        written = tuple(m for m in _ALL if cls.implements(m))
        if clash := [row.name for row in cls.operands if row.name not in ATTENTION and row.name in _OPTIONS]:
            raise ConfigError(f"operation {shown(cls.name)} has operands {clash}, which are options of every call.")
        if not cls.implements("forward_native"):
            raise ConfigError(f"operation {shown(cls.name)} has no forward_native, which is required.")
        for method in written:
            cls.capability(method)
        return written

    @classmethod
    def running_methods(cls) -> dict[str, str]:
        """For each platform, the first method that can run on all of its devices. A method without a published tolerance only
        refuses."""
        written = [
            m for m in cls.declared_methods() if cls.capability(m).tolerance and cls.implementation(m).devices is None
        ]
        return {
            platform: next((m for m in methods if m in written), "forward_native")
            for platform, methods in METHODS.items()
        }

    @classmethod
    def capability(cls, method: str) -> Capability:
        """The declared capability of a forward method. Errors: ConfigError if it declares nothing."""
        declared = getattr(getattr(cls, method, None), "capability", None)
        if not isinstance(declared, Capability):
            raise ConfigError(f"{cls.name}.{method} declares nothing; decorate it with @implementation(...).")
        return declared

    @classmethod
    def implementation(cls, method: str, config: OperationConfig | None = None) -> Implementation[Any]:
        """The implementation behind a forward method; with a config, the variant that it chooses.

        A plain method reads the operation's config, except a forward_native beside platforms' own methods.
        """
        declared = getattr(cls, method, None)
        if isinstance(declared, Implementation):
            return declared if config is None else declared.variant(config)
        reads = method in PLATFORM_METHODS or not any(map(cls.implements, PLATFORM_METHODS))
        return MethodImplementation(cls.capability(method), cls.config if reads else None)

    @classmethod
    def listed_as(cls, method: str) -> str:
        """`splash.forward_tpu`: the implementation behind a method, by the operation under which it is listed."""
        return f"{cls.implementation(method).operation or cls.name}.{method}"

    def forward(self, method: str, config: OperationConfig) -> Callable[[Any], Any]:
        """What runs a call's method with a config."""
        declared = getattr(self, method)
        return declared.variant(config) if isinstance(declared, Implementation) else declared

    @classmethod
    def kernel_platform(cls, problem: Problem) -> str:
        """The platform whose methods are tried: another one's if the config asks for its kernel to be interpreted."""
        for platform, methods in METHODS.items():
            for method in methods:
                if cls.implements(method) and cls.implementation(method).interpreted(problem.config):
                    return platform
        return problem.platform

    @classmethod
    def config_elsewhere(cls, platform: str) -> type[OperationConfig] | None:
        """The config class of another operation, if the platform's method reads that one's instead of this operation's."""
        for method in METHODS.get(platform, ()):
            if cls.implements(method):
                config_type = getattr(getattr(cls, method), "config", None)
                return (
                    config_type if isinstance(config_type, type) and not issubclass(cls.config, config_type) else None
                )
        return None

    @classmethod
    def remarks(cls, problem: Any) -> tuple[str, ...]:
        """Notes for the plan, whatever runs. Default: none."""
        return ()
