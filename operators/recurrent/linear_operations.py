"""Linear attention: operations with query, key and value whose past is a state [heads, head_dim, value_dim]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np

from ...call_arguments import CallArray
from ...planning.recurrent.operands import (
    CHANNEL_DECAY,
    DELTA_CHANNEL,
    DELTA_HEAD,
    HEAD_DECAY,
    RESULTS_OF_HEADS,
)
from ...planning.tables.table_plan import TablePlan
from ...sharding import Operand
from ..call.same_arguments import explained, planned
from .arithmetic import delta_rule, linear
from .config import (
    GatedDeltaRuleConfig,
    GdrConfig,
    GlaConfig,
    KdaConfig,
    KernelDeltaAttentionConfig,
    LightningConfig,
    RetentionConfig,
    SimpleGlaConfig,
)
from .implementations import RecurrentOnXla
from .operation import RecurrentOperation
from .output import RecurrentOutput
from .tpu import RecurrentOnTpu

__all__ = [
    "GatedDeltaRule", "Gdr", "Gla", "Kda", "KernelDeltaAttention", "Lightning", "LinearArguments", "Retention", "SimpleGla",
]  # fmt: skip

_TOKENS = frozenset({"initial_state", "segment_ids", "lengths"})
_DELTA = _TOKENS | {"decay", "beta", "A_log", "dt_bias"}


class LinearArguments(TypedDict, total=False):
    """The keywords of a call of linear attention. beta, A_log and dt_bias are the delta rule's."""

    decay: CallArray | None
    beta: CallArray | None
    A_log: CallArray | None
    dt_bias: CallArray | None
    initial_state: CallArray | None
    segment_ids: CallArray | None
    lengths: CallArray | None
    scale: float | None
    normalise_qk: bool | None
    mode: str | None
    layout: str | None


class _Linear(RecurrentOperation):
    """What linear attention has in common."""

    results: ClassVar[tuple[Operand, ...]] = RESULTS_OF_HEADS
    options: ClassVar[Mapping[str, type]] = {"scale": float, "normalise_qk": bool}
    # How many numbers say what tokens do to a state's columns: 'head' for one, 'channel' for head_dim, 'matrix' for its square.
    passes: ClassVar[str] = "head"

    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[LinearArguments]
    ) -> RecurrentOutput:
        """Attend.

        Shapes: query, key [batch, tokens, kv_heads, head_dim], value [batch, tokens, heads, value_dim], decay [batch, tokens,
        heads], and head_dim after it where it differs by channel; beta [batch, tokens, heads]; initial_state [batch, heads,
        head_dim, value_dim]; segment_ids [batch, tokens]; lengths [batch]. Tokens from a row's length on change no state, and
        their output is 0. A new segment id starts from a state of zeros; the initial state is the first one's.

        Errors: InputError, InputTypeError (bad arguments), ConfigError, ShardingError, RefusedError (nothing can run it).
        """
        return self._run({"query": query, "key": key, "value": value}, call)

    plan = planned(__call__, TablePlan)
    explain = explained(plan)

    @classmethod
    def map_numbers(cls, size: Mapping[str, int]) -> tuple[int, int]:
        heads, dim = size["batch"] * size["heads"], size["head_dim"]
        linear = {"head": 1, "channel": dim, "matrix": dim * dim}[cls.passes]
        return heads * linear, heads * dim * size["value_dim"]

    @classmethod
    def token_flops(cls, size: Mapping[str, int], chunk: int) -> float:
        dim, value_dim, delta = size["head_dim"], size["value_dim"], "beta" in cls.operands
        inside = chunk * (dim + value_dim) * (2 if delta else 1)
        return 2.0 * size["heads"] * (inside + dim * value_dim * (3 if delta else 2))


class GatedDeltaRule(_Linear):
    """The gated delta rule: S <- e^decay S, then S <- S + key (beta (value - key^T S))^T; the output is scale query^T S.

    Source: Yang et al., "Gated Delta Networks" (2024).
    """

    name = "gated_delta_rule"
    config = GatedDeltaRuleConfig
    operands = DELTA_HEAD
    passes = "matrix"
    forward_tpu = RecurrentOnTpu(delta_rule, _DELTA)
    forward_native = RecurrentOnXla(delta_rule, _DELTA)


class Kda(_Linear):
    """The delta rule with a log decay for each key channel. Source: Kimi Team, "Kimi Linear" (2025)."""

    name = "kda"
    config = KdaConfig
    operands = DELTA_CHANNEL
    passes = "matrix"
    forward_tpu = RecurrentOnTpu(delta_rule, _DELTA, by_channel=True)
    forward_native = RecurrentOnXla(delta_rule, _DELTA)


class Gla(_Linear):
    """Linear attention with a log decay for each key channel. Source: Yang et al., "Gated Linear Attention" (2023)."""

    name = "gla"
    config = GlaConfig
    operands = CHANNEL_DECAY
    passes = "channel"
    forward_tpu = RecurrentOnTpu(linear, _TOKENS | {"decay"}, by_channel=True)
    forward_native = RecurrentOnXla(linear, _TOKENS | {"decay"})


_BY_HEAD = RecurrentOnXla(linear, _TOKENS | {"decay"})
_BY_HEAD_ON_TPU = RecurrentOnTpu(linear, _TOKENS | {"decay"})


class SimpleGla(_Linear):
    """Linear attention with a log decay for each head and token; without a decay, plain linear attention."""

    name = "simple_gla"
    config = SimpleGlaConfig
    operands = HEAD_DECAY
    forward_tpu = _BY_HEAD_ON_TPU
    forward_native = _BY_HEAD


class _FixedDecay(_Linear):
    """Linear attention whose heads each have one log decay, the family's own unless a call gives others [heads]."""

    operands = HEAD_DECAY
    forward_tpu = _BY_HEAD_ON_TPU
    forward_native = _BY_HEAD

    @classmethod
    def decays(cls, heads: int) -> np.ndarray:
        """The log decay of each head."""
        raise NotImplementedError

    @classmethod
    def _default_decay(cls, arrays: Mapping[str, Any], layout: str) -> np.ndarray | None:
        shape, at = getattr(arrays.get("value"), "shape", ()), layout.index("h")
        return None if "decay" in arrays or len(shape) != len(layout) else cls.decays(shape[at])


class Lightning(_FixedDecay):
    """`simple_gla` with the log decays -2^(-8 (h + 1) / heads), of head h. A model scales them by layer: pass decay [heads].

    Source: Qin et al., "Lightning Attention-2" (2024).
    """

    name = "lightning"
    config = LightningConfig

    @classmethod
    def decays(cls, heads: int) -> np.ndarray:
        return -np.exp2(-8.0 * (np.arange(heads) + 1) / heads).astype(np.float32)


class Retention(_FixedDecay):
    """`simple_gla` with the decays 1 - 2^(-5 - h), of head h. Source: Sun et al., "Retentive Network" (2023)."""

    name = "retention"
    config = RetentionConfig

    @classmethod
    def decays(cls, heads: int) -> np.ndarray:
        return np.log1p(-np.exp2(-5.0 - np.arange(heads))).astype(np.float32)


class Gdr(GatedDeltaRule):
    """`gated_delta_rule` by its short name."""

    name = "gdr"
    config = GdrConfig
    backend_operation = "gated_delta_rule"


class KernelDeltaAttention(Kda):
    """`kda` by its long name."""

    name = "kernel_delta_attention"
    config = KernelDeltaAttentionConfig
    backend_operation = "kda"
