"""Implementation: one algorithm on one kind of device, as an object that planning, checking, tuning and advice ask."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax.numpy as jnp

from .capability import Capability, Reason
from .operation_config import OperationConfig
from .placement import Placement
from .problem import AttentionProblem

__all__ = [
    "PRODUCTS",
    "Implementation",
    "MethodImplementation",
    "Padding",
    "PassSizes",
    "Products",
    "dequantised_copy",
    "outer_axis",
]

C = TypeVar("C", bound=OperationConfig)


class Padding(NamedTuple):
    """Rows that a kernel adds on each device, and their share of its work."""

    q_len: int
    kv_len: int
    waste: float


class PassSizes(NamedTuple):
    """A kernel of a pass, and the sizes that it runs with.

    products: what it makes, 'forward', 'backward' (all gradients at once), 'dkv' or 'dq'. kernel: its name in a compiled program,
    if its schedule can be read there. compute_q, compute_kv: the parts of a tile that it can leave out; None if it can't.
    pipelined: products run ahead of exponentials. loading: warps of a block of threads on a GPU that don't
    compute. programs: how many programs those have that do, where each may go through its tiles more than once; else 0.
    part: rows and keys of a tile of which a warp decides at once whether it computes them; 0 if it doesn't. asks: whether it asks
    of each tile whether its mask hides something, where tiles with a mask are few. heads: query heads that share a tile.
    """

    products: str
    block_q: int
    block_kv: int
    kernel: str | None = None
    compute_q: int | None = None
    compute_kv: int | None = None
    pipelined: bool = False
    loading: int = 0
    programs: int = 0
    part: tuple[int, int] = (0, 0)
    asks: bool = False
    heads: int = 1

    @property
    def head_dims(self) -> int:
        """How many of a tile's products have the head dim among their sizes."""
        products = PRODUCTS[self.products]
        return products.sum_head + products.rows_head

    @property
    def value_dims(self) -> int:
        """How many have the value dim."""
        products = PRODUCTS[self.products]
        return products.sum_value + products.rows_value

    @property
    def outer(self) -> str:
        """The axis, 'q' or 'kv', that the kernel goes along last."""
        return outer_axis(self.products)


class Products(NamedTuple):
    """How many of a tile's products sum over the head dim, sum over the value dim, and have either as their rows."""

    sum_head: int
    sum_value: int
    rows_head: int
    rows_value: int


PRODUCTS = {
    "forward": Products(1, 0, 0, 1),
    "backward": Products(1, 1, 2, 1),
    "dkv": Products(1, 1, 1, 1),
    "dq": Products(1, 1, 1, 0),
}


def outer_axis(products: str) -> str:
    """The axis that a kernel goes along last: that of the sums that it holds meanwhile, queries' if it makes several."""
    return "kv" if products == "dkv" else "q"


def dequantised_copy(problem: AttentionProblem, placement: Placement) -> dict[str, Any]:
    """The values of a note on a dequantised copy of keys and values: their names, the dtype, its bytes and those given."""
    local, dims = placement.local, {"key": problem.head_dim, "value": problem.token_dim - problem.head_dim}
    stored_bytes = local.batch * local.kv_heads * local.kv_len * sum(dims[name] for name in problem.quantised)
    size = stored_bytes * jnp.dtype(problem.runtime_dtype).itemsize
    return {
        "names": " and ".join(problem.quantised),
        "dtype": problem.runtime_dtype,
        "size": size,
        "given": stored_bytes,
    }


@functools.cache
def _without_fields(config: Any) -> OperationConfig:
    """A config of a class with nothing declared."""
    made: OperationConfig = config()
    return made


class Implementation(Generic[C]):
    """Stateless: one object serves every operation that runs it, as the value of `forward_tpu`, `forward_cuda`, ...

    operation: the name of the operation under which it is listed. config: the class of the configs that it reads, None if it
    reads none. exact_products: whether float32 products keep full precision. devices: the only devices of its platform that it
    was written for, in words; None: all. memory_field: the config's field that limits the VMEM that it may take, if there is one.
    static_clock: of a recurrence or a step over pages, whether the schedules of its kernels can be read from the compiler.
    """

    operation: ClassVar[str | None] = None
    config: ClassVar[type[OperationConfig] | None] = None
    capability: Capability
    exact_products: ClassVar[bool] = False
    devices: ClassVar[str | None] = None
    memory_field: ClassVar[str | None] = None
    static_clock: ClassVar[bool] = False

    def __call__(self, call: Any) -> Any:
        """Run one device's part of a call: a LocalCall, and a LocalOutput is returned."""
        raise NotImplementedError

    def serves(self, problem: Any) -> bool:
        """Whether it was written for the problem's device. If not, a plan doesn't consider it. Default: yes."""
        return True

    def variant(self, config: OperationConfig) -> Implementation[Any]:
        """The implementation that a config chooses, if it has a choice. Default: this one."""
        return self

    def reads(self, config: OperationConfig) -> bool:
        """Whether it reads a config of this class."""
        return self.config is not None and isinstance(config, self.config)

    def declared(self, config: OperationConfig) -> C:
        """What a config declares for this implementation: itself, or a config without fields if it is another one's.

        Its rules get this, so they read fields without asking whose config it is.
        """
        own = config if self.config is None or self.reads(config) else _without_fields(self.config)
        return own  # type: ignore[return-value]

    def read(self, config: OperationConfig) -> C:
        """The config, whose class is this implementation's. Errors: TypeError for another class."""
        if not self.reads(config):
            raise TypeError(f"{type(self).__name__} got a {type(config).__name__}; wanted a {self.config}.")
        return config  # type: ignore[return-value]

    def interpreted(self, config: OperationConfig) -> bool:
        """Whether the config asks for the kernel to be interpreted, on any platform."""
        return self.reads(config) and "interpret" in type(config).model_fields and bool(self.read(config).interpret)  # type: ignore[attr-defined]

    def reasons(self, problem: Any) -> tuple[Reason, ...]:
        """Reasons against a problem besides features and rules. Default: none."""
        return ()

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """The problem's config with every default filled in for these local shapes.

        Errors: ConfigError if there is none; the plan then has it as a reason against the implementation.
        """
        return problem.config

    def tuned_fields(self, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The config's fields that a search may choose for this problem. Default: none."""
        return ()

    def candidates(self, problem: AttentionProblem, placement: Placement) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """What a search tries: 'forward' and 'backward' -> fields to set, most promising first. The first is the heuristic's.

        The two are measured separately, so no field is in both.
        """
        return {}

    def shipped_choice(self, problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
        """(source, fields) of a choice that is shipped with the package, or None."""
        return None

    def passes(self, config: OperationConfig, backward: bool) -> tuple[PassSizes, ...]:
        """The kernels of the forward pass, or of the backward pass without it, by a resolved config.

        Default: tiles of 128 x 128, and the five products that a backward pass takes at least.
        """
        return (PassSizes("backward" if backward else "forward", 128, 128),)

    def memory(
        self, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Mapping[str, Mapping[str, int]]:
        """The kernel's name in the compiled program -> bytes of fast memory, by what they hold; {} if they aren't counted."""
        return {}

    def check_vma(self, config: OperationConfig) -> bool:
        """Whether it can be traced under shard_map's replication check with this config."""
        return self.capability.check_vma

    def works_on_parts(self, config: OperationConfig, strategy: str) -> bool:
        """Whether it can work on a part of the keys with this config. Default: False.

        strategy: 'split_kv', with one part, or 'ring', with one part after the other (LocalCall.ring).
        """
        return False

    def padding(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> Padding | None:
        """Its padding on each device, or None."""
        return None

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """Notes for the plan. Default: none."""
        return ()


class MethodImplementation(Implementation[OperationConfig]):
    """A plain method of an operation that declares what it can do with @implementation. config: the class that it reads."""

    def __init__(self, capability: Capability, config: type[OperationConfig] | None) -> None:
        self.capability = capability
        self._config = config

    def reads(self, config: OperationConfig) -> bool:
        return self._config is not None and isinstance(config, self._config)

    def declared(self, config: OperationConfig) -> OperationConfig:
        """The config as it is: a method's rules are written for whatever config is declared."""
        return config

    def interpreted(self, config: OperationConfig) -> bool:
        """No: what `interpret` means in a config of one's own isn't known here."""
        return False
