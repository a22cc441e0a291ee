"""The scores without a table: SoftCap, ALiBi, Temperature, PositionTemperature, Forgetting, Distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .functions import Named, checked_function
from .node import Capture, Captured, Score, capture_array, finite
from .places import Places
from .steps import Add, Cap, Diagonal, Function, Linear, Lowering, Multiply

__all__ = ["ALiBi", "Distance", "Forgetting", "PositionTemperature", "SoftCap", "Temperature", "paper_slopes"]


@dataclass(frozen=True, eq=False)
class SoftCap(Score):
    """cap * tanh(logit / cap). Source: Gemma Team, "Gemma 2" (2024)."""

    kind: ClassVar[str] = "soft_cap"
    needs_positions: ClassVar[bool] = False
    cap: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "cap", finite(self.cap, "SoftCap cap", positive=True))

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        return self.cap * xp.tanh(logits / self.cap)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Cap.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        lowering.add(Cap(cap=self.cap))


def paper_slopes(heads: int) -> np.ndarray:
    """The slopes of the ALiBi paper, float32 [heads].

    2 ** (-8 (h + 1) / heads) for a power of two; else those of the next smaller one, then every other one of the next larger.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (n + 1) / power) for n in range(power)]
    slopes += [2.0 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
    return np.asarray(slopes, np.float32)


@dataclass(frozen=True, eq=False)
class ALiBi(Score):
    """logit - slope * |query - key|. Source: Press et al., "Train Short, Test Long" (2022).

    slopes: an array [heads] or numbers; None: those of the paper, by the number of query heads.
    """

    kind: ClassVar[str] = "alibi"
    captured: ClassVar[tuple[str, ...]] = ("slopes",)
    slopes: Captured = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", capture_array(self.slopes, "ALiBi slopes", (1,), "[heads]"))

    def captures(self) -> tuple[Capture, ...]:
        return (Capture("slopes", ("heads",), broadcasts=False),)

    def without_values(self) -> Score:
        return self if self.slopes is None else super().without_values()

    def with_heads(self, heads: int) -> Score:
        return self._changed(slopes=paper_slopes(heads)) if self.slopes is None else self

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        return logits - arrays[0][None, :, None, None] * abs(at.distance)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Linear.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        lowering.add(Linear((lowering.array(arrays[0][None, :, None, None]),)))


@dataclass(frozen=True, eq=False)
class Temperature(Score):
    """logit * value, for each head or each row. value: [heads], [heads, q] or [batch, heads, q]; with two or three dimensions a
    size of 1 counts for all."""

    kind: ClassVar[str] = "temperature"
    captured: ClassVar[tuple[str, ...]] = ("temperature",)
    needs_positions: ClassVar[bool] = False
    temperature: Captured = None

    def __post_init__(self) -> None:
        value = capture_array(self.temperature, "Temperature", (1, 2, 3), "[heads], [heads, q] or [batch, heads, q]")
        object.__setattr__(self, "temperature", value)

    def captures(self) -> tuple[Capture, ...]:
        return (Capture("temperature", ("heads",), (("heads", "q_len"), ("batch", "heads", "q_len"))),)

    @staticmethod
    def _spread(x: Any) -> Any:
        if x.ndim == 1:
            return x[None, :, None, None]
        return x[..., None] if x.ndim == 3 else x[None, ..., None]

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        return logits * self._spread(arrays[0])

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Multiply.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        lowering.add(Multiply((lowering.array(self._spread(arrays[0])),)))


@dataclass(frozen=True, eq=False)
class PositionTemperature(Score):
    """logit * (1 + scale * log(1 + floor((position + 1) / floor))), by the query's position. Source: Llama 4's
    attn_temperature_tuning."""

    kind: ClassVar[str] = "position_temperature"
    by_query_alone: ClassVar[bool] = True
    floor: float = 8192.0
    scale: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor", finite(self.floor, "PositionTemperature floor", positive=True))
        object.__setattr__(self, "scale", finite(self.scale, "PositionTemperature scale"))

    def _of(self, positions: Any, xp: Any, dtype: Any) -> Any:
        return 1 + self.scale * xp.log1p(xp.floor((positions.astype(dtype) + 1) / self.floor))

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        return logits * self._of(at.q, xp, logits.dtype)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Multiply.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        if not lowering.rows:
            lowering.add(Function(function=_ByPosition(self)))
            return
        positions = lowering.row_positions()[:, None, :, None]
        lowering.add(Multiply((lowering.array(self._of(positions, jnp, lowering.dtype)),)))


@dataclass(frozen=True, eq=False)
class Forgetting(Score):
    """logit plus the sum of log_gate over the keys after this one, up to the query's own position.

    log_gate: [batch, heads, kv], the logarithm of each key's forget gate. Source: Lin et al., "Forgetting Transformer" (2025).
    """

    kind: ClassVar[str] = "forgetting"
    captured: ClassVar[tuple[str, ...]] = ("log_gate",)
    log_gate: Captured = None

    def __post_init__(self) -> None:
        value = capture_array(self.log_gate, "Forgetting log_gate", (3,), "[batch, heads, kv]")
        object.__setattr__(self, "log_gate", value)

    def captures(self) -> tuple[Capture, ...]:
        # Sums over all keys: a device has them all, also where its own keys are a part.
        return (Capture("log_gate", ("batch", "heads", "all_keys")),)

    @staticmethod
    def _of_rows(sums: Any, positions: Any, xp: Any) -> Any:
        """The sums up to each query, [batch, heads, q]; positions [batch | 1, q], those of keys at the ends for others."""
        positions = xp.clip(positions, 0, sums.shape[-1] - 1)
        shape = (*sums.shape[:2], positions.shape[-1])
        return xp.take_along_axis(sums, xp.broadcast_to(positions[:, None], shape), -1)

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        sums = xp.cumsum(xp.broadcast_to(arrays[0], (*arrays[0].shape[:2], logits.shape[-1])), -1)
        sums = xp.broadcast_to(sums, (*logits.shape[:2], sums.shape[-1]))
        positions = xp.broadcast_to(at.q, (logits.shape[0], 1, logits.shape[2], 1))[:, 0, :, 0]
        keys = sums[:, :, None, :]
        return logits + (self._of_rows(sums, positions, xp)[..., None] - keys)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Add.name})

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        gate = arrays[0].astype(lowering.dtype)
        sums = jnp.cumsum(jnp.broadcast_to(gate, (*gate.shape[:2], lowering.kv_len)), -1)
        if isinstance(lowering.offset, int) and isinstance(lowering.first_row, int) and lowering.positions is None:
            first = lowering.first_row + lowering.offset
            inside = first >= 0 and first + lowering.rows <= lowering.kv_len
            rows = lax.slice_in_dim(sums, first, first + lowering.rows, axis=2) if inside else None
        else:
            rows = None
        if rows is None:
            positions = lowering.row_positions()
            batch = max(sums.shape[0], positions.shape[0])
            rows = self._of_rows(jnp.broadcast_to(sums, (batch, *sums.shape[1:])), positions, jnp)
        keys = sums
        if lowering.keys != lowering.kv_len:
            keys = lax.dynamic_slice_in_dim(sums, lowering.first_key, lowering.keys, axis=2)
        lowering.add(Add((lowering.array(rows[..., None]), lowering.array(keys[:, :, None]))))


@dataclass(frozen=True, eq=False)
class Distance(Named, Score):
    """logit plus a registered function of the distance key - query, negative for earlier keys: fn(distance) -> float.

    Errors: ScoreError for a name that isn't registered and for functions that aren't elementwise.
    """

    kind: ClassVar[str] = "distance"

    def __post_init__(self) -> None:
        self._hold()
        checked_function(self.name, self.function, (np.int32,), "float", "fn(distance) -> float")

    def apply(self, logits: Any, at: Places, arrays: Sequence[Any], xp: Any) -> Any:
        if xp is np:
            with jax.enable_x64(True), jax.ensure_compile_time_eval():
                distance = np.broadcast_to(
                    np.asarray(at.distance, np.int32), np.broadcast_shapes(*map(np.shape, (at.q, at.kv)))
                )
                return logits + np.asarray(self.function(jnp.asarray(distance)), logits.dtype)
        return logits + self.function(at.distance)

    def step_names(self, contiguous: bool) -> frozenset[str]:
        return frozenset({Diagonal.name if contiguous else Function.name})

    def operations(self, contiguous: bool) -> frozenset[str]:
        return frozenset() if contiguous else self.primitives((np.int32,))

    def lower(self, arrays: Sequence[jax.Array], lowering: Lowering) -> None:
        if lowering.contiguous:
            values = jnp.broadcast_to(self.function(lowering.distances()), lowering.distances().shape)
            lowering.add(Diagonal((lowering.array(values[:, None], "diagonal"),), rows=lowering.q_len))
            return
        lowering.add(Function(function=_OfDistance(self.function)))


@dataclass(frozen=True)
class _ByPosition:
    score: PositionTemperature

    def __call__(self, x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
        # As `_of`, with operations that kernels in Mosaic GPU have: positions are from 0 on, so that a floor is a cut.
        steps = ((q.astype(x.dtype) + 1) / self.score.floor).astype(np.int32).astype(x.dtype)
        return x * (1 + self.score.scale * jnp.log(1 + steps))


@dataclass(frozen=True)
class _OfDistance:
    function: Any

    def __call__(self, x: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return x + self.function(kv - q).astype(x.dtype)
