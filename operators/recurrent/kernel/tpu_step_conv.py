"""The convolution before the last tokens of each row on TPUs: a token of all heads and its window, which moves on in VMEM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .convolution import activated
from .tpu_call import part_of
from .tpu_step_moves import FRESH, KEEPS, STARTS, UNKNOWN, WRITES

__all__ = ["Convolved", "scratch_of"]


class Convolved(NamedTuple):
    """One convolution, as refs. weight [width, heads, dim]; bias [heads, dim] or None; token [1, heads, dim]; window, after [1,
    width - 1, heads, dim]: of the slots that a row reads and writes; moving [width - 1, heads, dim]: the window between tokens of
    a row, None for rows of one token; kept [tokens, blocks, heads of a block, dim]: the tokens convolved, None if a step of the
    grid has all heads."""

    weight: Any
    bias: Any
    token: Any
    window: Any
    after: Any
    moving: Any
    kept: Any

    @classmethod
    def of(
        cls,
        given: tuple[Any, Any],
        token: Any,
        window: Any,
        after: Any,
        scratch: Iterator[Any],
        *,
        tokens: int,
        blocks: int,
    ) -> Convolved:
        """With its part of the scratch memory, in the order of `scratch_of`."""
        moving = next(scratch) if tokens > 1 else None
        return cls(*given, token, window, after, moving, next(scratch) if blocks > 1 else None)

    def start(self, block: Any, does: Any) -> None:
        """The window before a row's first token; and for a batch that writes nothing, a slot as it was."""
        if self.moving is not None:

            @pl.when((does & STARTS != 0) & (block == 0))
            def started() -> None:
                for m in range(len(self.moving)):
                    self.moving[m] = self._stored(m, does)

        @pl.when((does & KEEPS != 0) & (block == 0))
        def kept() -> None:
            self.after[...] = self.window[...]

    def of_block(self, block: Any, n: Any, share: int, does: Any, activation: str | None) -> Any:
        """Token n of a row, convolved [heads of a block, dim]. All heads are, with the first block, before others read theirs."""
        if self.kept is None:
            return self._next(does, activation)
        blocks, heads = self.kept.shape[1:3]

        @pl.when(block == 0)
        def _() -> None:
            every = self._next(does, activation)
            for part in range(blocks):
                self.kept[n, part] = every[part * heads : (part + 1) * heads]

        return self.kept[n, part_of(block, share)]

    def _stored(self, m: int, does: Any) -> Any:
        """Token m of the window before a row's first token, in float32."""
        none = jnp.where(does & UNKNOWN != 0, np.float32(np.nan), np.float32(0))
        stored = self.window[0, m].astype(jnp.float32)
        return jnp.where(does & FRESH != 0, jnp.full(stored.shape, none), stored)

    def _next(self, does: Any, activation: str | None) -> Any:
        """The token of all heads, convolved. The window moves on, and is written if the token writes."""
        history, x = self.window.shape[1], self.token[0].astype(jnp.float32)
        before = [self._stored(m, does) if self.moving is None else self.moving[m] for m in range(history)]
        total = self.weight[history].astype(jnp.float32) * x
        if self.bias is not None:
            total = total + self.bias[...].astype(jnp.float32)
        for m in range(history):
            total = total + self.weight[m].astype(jnp.float32) * before[m]
        moved = [*before[1:], x]
        if self.moving is not None:
            for m in range(history):
                self.moving[m] = moved[m]

        @pl.when(does & WRITES != 0)
        def _() -> None:
            for m in range(history):
                self.after[0, m] = moved[m].astype(self.after.dtype)

        return activated(total, activation)


def scratch_of(weight: Any, heads: int, *, tokens: int, blocks: int) -> list[Any]:
    """The scratch memory of a convolution. heads: of a block."""
    width, every, dim = weight.shape
    found = [pltpu.VMEM((width - 1, every, dim), jnp.float32)] if tokens > 1 else []
    return found + ([pltpu.VMEM((tokens, every // heads, heads, dim), jnp.float32)] if blocks > 1 else [])
