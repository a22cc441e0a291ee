"""Bucket rules of a RelativeBias: which row of its table a distance has."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ScoreError, is_whole, shown
from .functions import Named, checked_function

__all__ = ["T5", "BucketRule", "Buckets", "Clip"]


class BucketRule:
    """Which row of a table a distance (key - query) has; `count` rows."""

    kind: ClassVar[str]

    @property
    def count(self) -> int:
        raise NotImplementedError

    @property
    def reach(self) -> tuple[int, int] | None:
        """The farthest distances before and after the query from which on the row is the same; None if that isn't known."""
        return None

    def index(self, distance: Any, xp: Any) -> Any:
        """int32 in [0, count) for integer distances."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = dataclasses.fields(cast(Any, self))
        return {"kind": self.kind} | {field.name: getattr(self, field.name) for field in fields}

    def describe(self) -> str:
        """Such as `t5(buckets=32, max_distance=128, bidirectional=True)`."""
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.to_dict().items() if k != 'kind')})"


def _whole(value: Any, what: str, least: int) -> None:
    if not is_whole(value, least, 2**30):
        raise ScoreError(f"{what}={shown(value)}; wanted an int of at least {least}")


@dataclass(frozen=True)
class T5(BucketRule):
    """T5's buckets: exact for near keys, then logarithmic up to max_distance.

    bidirectional: half of them for later keys, as in an encoder; otherwise later keys share the bucket of distance 0.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning" (2020).
    """

    kind: ClassVar[str] = "t5"
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        _whole(self.buckets, "T5 buckets", 4 if self.bidirectional else 2)
        _whole(self.max_distance, "T5 max_distance", self.buckets // (4 if self.bidirectional else 2) + 1)
        if not isinstance(self.bidirectional, bool):
            raise ScoreError(f"T5 bidirectional={shown(self.bidirectional)}; wanted True or False")

    @property
    def count(self) -> int:
        return self.buckets

    @functools.cached_property
    def _starts(self) -> tuple[int, ...]:
        """The distances from which each logarithmic bucket after the first is used: from them on, no logarithm is needed.

        They are found with the formula of the models, in float32 like theirs, because its rounding decides between buckets.
        """
        side = self.buckets // 2 if self.bidirectional else self.buckets
        exact = side // 2
        away = np.arange(exact, self.max_distance + 1, dtype=np.int32)
        ratio = np.log(away.astype(np.float32) / np.float32(exact)) / np.float32(math.log(self.max_distance / exact))
        index = np.minimum(exact + (ratio * np.float32(side - exact)).astype(np.int32), side - 1)
        return tuple(int(away[np.argmax(index >= n)]) for n in range(exact + 1, side) if (index >= n).any())

    @property
    def reach(self) -> tuple[int, int]:
        exact = self.buckets // (4 if self.bidirectional else 2)
        farthest = max((exact, *self._starts))
        return farthest, farthest if self.bidirectional else 0

    def index(self, distance: Any, xp: Any) -> Any:
        side = self.buckets // 2 if self.bidirectional else self.buckets
        exact = side // 2
        away = abs(distance) if self.bidirectional else xp.maximum(-distance, 0)
        bucket = xp.minimum(away, exact)
        for start in self._starts:
            bucket = bucket + (away >= start).astype(bucket.dtype)
        return bucket + side * (distance > 0).astype(bucket.dtype) if self.bidirectional else bucket


@dataclass(frozen=True)
class Clip(BucketRule):
    """A bucket for each distance from -left to right; farther keys share the last ones. left + right + 1 rows.

    Source: Shaw et al., "Self-Attention with Relative Position Representations" (2018).
    """

    kind: ClassVar[str] = "clip"
    left: int
    right: int = 0

    def __post_init__(self) -> None:
        _whole(self.left, "Clip left", 0)
        _whole(self.right, "Clip right", 0)

    @property
    def count(self) -> int:
        return self.left + self.right + 1

    @property
    def reach(self) -> tuple[int, int]:
        return self.left, self.right

    def index(self, distance: Any, xp: Any) -> Any:
        return xp.clip(distance, -self.left, self.right) + self.left


@dataclass(frozen=True)
class Buckets(Named, BucketRule):
    """The registered function `name`: fn(distance) -> int in [0, count), elementwise. Other numbers are cut to that range."""

    kind: ClassVar[str] = "buckets"
    rows: int

    def __post_init__(self) -> None:
        self._hold()
        _whole(self.rows, "Buckets rows", 1)
        checked_function(self.name, self.function, (np.int32,), np.integer, "fn(distance) -> int")

    @property
    def count(self) -> int:
        return self.rows

    def index(self, distance: Any, xp: Any) -> Any:
        if xp is np:
            with jax.ensure_compile_time_eval():
                return np.clip(np.asarray(self.function(jnp.asarray(distance, jnp.int32))), 0, self.rows - 1)
        return jnp.clip(self.function(distance), 0, self.rows - 1)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "rows": self.rows}
