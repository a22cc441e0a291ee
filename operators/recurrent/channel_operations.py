"""Mamba and the causal convolution: operations on channels of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypedDict, Unpack

from ...call_arguments import CallArray
from ...errors import InputError
from ...planning.recurrent.operands import (
    CONVOLUTION,
    MAMBA1,
    MAMBA2,
    RESULTS_OF_CHANNELS,
    RESULTS_OF_CONVOLUTION,
    RESULTS_OF_HEADS,
)
from ...planning.tables.table_plan import TablePlan
from ...sharding import Operand
from ..call.same_arguments import explained, planned
from .arithmetic import convolution, mamba1, mamba2
from .config import CausalConv1dConfig, Mamba1Config, Mamba2Config, MambaConfig, Ssm1Config, Ssm2Config
from .implementations import RecurrentOnXla
from .operation import RecurrentOperation
from .output import RecurrentOutput
from .tpu import RecurrentOnTpu

__all__ = ["CausalConv1d", "ConvolutionArguments", "Mamba", "Mamba1", "Mamba2", "MambaArguments", "Ssm1", "Ssm2"]

_TOKENS = frozenset({"initial_state", "segment_ids", "lengths"})


class MambaArguments(TypedDict, total=False):
    """The keywords of a call of Mamba."""

    D: CallArray | None
    dt_bias: CallArray | None
    initial_state: CallArray | None
    segment_ids: CallArray | None
    lengths: CallArray | None
    mode: str | None
    layout: str | None


class _Mamba(RecurrentOperation):
    """What both generations of Mamba have in common."""

    def __call__(
        self, x: CallArray, dt: CallArray, A: CallArray, B: CallArray, C: CallArray, **call: Unpack[MambaArguments]
    ) -> RecurrentOutput:
        """Run the state-space model.

        Shapes of mamba2: x [batch, tokens, heads, value_dim], dt [batch, tokens, heads], A [heads], B, C [batch, tokens, groups,
        state], D and dt_bias [heads], initial_state [batch, heads, state, value_dim]. Of mamba1: x, dt [batch, tokens, channels],
        A [channels, state], B, C [batch, tokens, state], D and dt_bias [channels], initial_state [batch, channels, state].
        A is negative. segment_ids and lengths: see linear attention.

        Errors: InputError, InputTypeError (bad arguments), ConfigError, ShardingError, RefusedError (nothing can run it).
        """
        return self._run({"x": x, "dt": dt, "A": A, "B": B, "C": C}, call)

    plan = planned(__call__, TablePlan)
    explain = explained(plan)


class Mamba2(_Mamba):
    """Mamba-2: S <- e^(dt A) S + B (dt x)^T, and the output is C^T S + D x. Source: Dao and Gu, "Transformers are SSMs"
    (2024)."""

    name = "mamba2"
    config = Mamba2Config
    operands = MAMBA2
    results: ClassVar[tuple[Operand, ...]] = RESULTS_OF_HEADS
    forward_tpu = RecurrentOnTpu(mamba2, _TOKENS | {"D", "dt_bias"})
    forward_native = RecurrentOnXla(mamba2, _TOKENS | {"D", "dt_bias"})

    @classmethod
    def map_numbers(cls, size: Mapping[str, int]) -> tuple[int, int]:
        heads = size["batch"] * size["heads"]
        return heads, heads * size["head_dim"] * size["value_dim"]

    @classmethod
    def token_flops(cls, size: Mapping[str, int], chunk: int) -> float:
        dim, value_dim = size["head_dim"], size["value_dim"]
        return 2.0 * size["heads"] * (chunk * (dim + value_dim) + 2 * dim * value_dim)


class Mamba1(_Mamba):
    """Mamba-1: h <- e^(dt A) h + dt x B, and the output is h . C + D x. Source: Gu and Dao, "Mamba" (2023)."""

    name = "mamba1"
    config = Mamba1Config
    operands = MAMBA1
    results: ClassVar[tuple[Operand, ...]] = RESULTS_OF_CHANNELS
    forward_native = RecurrentOnXla(mamba1, _TOKENS | {"D", "dt_bias"})

    @classmethod
    def map_numbers(cls, size: Mapping[str, int]) -> tuple[int, int]:
        numbers = size["batch"] * size["channels"] * size["state_dim"]
        return numbers, numbers

    @classmethod
    def token_flops(cls, size: Mapping[str, int], chunk: int) -> float:
        return 6.0 * size["channels"] * size["state_dim"]


class Ssm2(Mamba2):
    """`mamba2` by the name of its kind, a state-space model."""

    name = "ssm2"
    config = Ssm2Config
    backend_operation = "mamba2"


class Ssm1(Mamba1):
    """`mamba1` by the name of its kind, a state-space model."""

    name = "ssm1"
    config = Ssm1Config
    backend_operation = "mamba1"


class Mamba(Mamba1):
    """`mamba1` by the name of its paper."""

    name = "mamba"
    config = MambaConfig
    backend_operation = "mamba1"


class ConvolutionArguments(TypedDict, total=False):
    """The keywords of a call of the convolution."""

    bias: CallArray | None
    initial_state: CallArray | None
    segment_ids: CallArray | None
    lengths: CallArray | None
    activation: str | None
    mode: str | None
    layout: str | None


class CausalConv1d(RecurrentOperation):
    """A causal convolution along the tokens, each channel by itself; its state is the last width - 1 tokens."""

    name = "causal_conv1d"
    config = CausalConv1dConfig
    operands = CONVOLUTION
    results: ClassVar[tuple[Operand, ...]] = RESULTS_OF_CONVOLUTION
    options: ClassVar[Mapping[str, type]] = {"activation": str}
    values: ClassVar[Mapping[str, tuple[str, ...]]] = {"activation": ("silu",)}
    forward_native = RecurrentOnXla(convolution, _TOKENS | {"bias"})

    def __call__(self, x: CallArray, weight: CallArray, **call: Unpack[ConvolutionArguments]) -> RecurrentOutput:
        """Convolve.

        Shapes: x [batch, tokens, channels], weight [width, channels], whose last row is of the token itself, bias [channels],
        initial_state [batch, width - 1, channels], the tokens before the first. segment_ids and lengths: see linear attention.

        Errors: InputError, InputTypeError (bad arguments), ConfigError, ShardingError, RefusedError (nothing can run it).
        """
        return self._run({"x": x, "weight": weight}, call)

    plan = planned(__call__, TablePlan)
    explain = explained(plan)

    @classmethod
    def map_numbers(cls, size: Mapping[str, int]) -> tuple[int, int]:
        return 0, 0

    @classmethod
    def token_flops(cls, size: Mapping[str, int], chunk: int) -> float:
        return 2.0 * size["channels"] * size["width"]

    def _check(self, arrays: Mapping[str, Any], sizes: Mapping[str, int], config: Any) -> None:
        super()._check(arrays, sizes, config)
        if sizes["width"] < 2:
            raise InputError(f"weight has width {sizes['width']}; wanted at least 2 tokens.")
