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
from .tpu_step_moves import FRESH, STARTS, UNKNOWN, WRITES

__all__ = ["Convolved", "of_block", "scratch_of", "started"]


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

    def stored(self, m: int, does: Any) -> Any:
        """Token m of the window before a row's first token [heads, dim], in float32."""
        none = jnp.where(does & UNKNOWN != 0, np.float32(np.nan), np.float32(0))
        read = self.window[0, m].astype(jnp.float32)
        return jnp.where(does & FRESH != 0, jnp.full(read.shape, none), read)

    def moved(self, does: Any) -> list[Any]:
        """The tokens of the window and the one after them."""
        before = [self.stored(m, does) if self.moving is None else self.moving[m] for m in range(self.window.shape[1])]
        return [*before, self.token[0].astype(jnp.float32)]

    def sum_of(self, tokens: list[Any]) -> Any:
        """The token after these convolved, in float32."""
        total = self.weight[len(tokens) - 1].astype(jnp.float32) * tokens[-1]
        if self.bias is not None:
            total = total + self.bias[...].astype(jnp.float32)
        for m, x in enumerate(tokens[:-1]):
            total = total + self.weight[m].astype(jnp.float32) * x
        return total


Convolutions = dict[str, Convolved]


def started(convolutions: Convolutions, block: Any, does: Any) -> None:
    """The windows before a row's first token, of rows of several."""
    if not convolutions:
        return

    @pl.when((does & STARTS != 0) & (block == 0))
    def _() -> None:
        for one in convolutions.values():
            for m in range(len(one.moving)):
                one.moving[m] = one.stored(m, does)


def of_block(
    convolutions: Convolutions, shares: dict[str, int], block: Any, n: Any, does: Any, activation: str | None
) -> dict[str, Any]:
    """Token n of a row, convolved [heads of a block, dim]. All heads are, with the first block, before others read theirs.
    shares: how many blocks have the same heads."""
    if not convolutions:
        return {}
    if all(one.kept is None for one in convolutions.values()):
        return _all_heads(convolutions, does, activation)

    @pl.when(block == 0)
    def _() -> None:
        for name, every in _all_heads(convolutions, does, activation).items():
            kept = convolutions[name].kept
            parts, heads = kept.shape[1:3]
            for part in range(parts):
                kept[n, part] = every[part * heads : (part + 1) * heads]

    return {name: one.kept[n, part_of(block, shares[name])] for name, one in convolutions.items()}


def _all_heads(convolutions: Convolutions, does: Any, activation: str | None) -> dict[str, Any]:
    """The token of all heads, convolved. The windows move on, and are written if the token writes."""
    moved = {name: one.moved(does) for name, one in convolutions.items()}
    found = {name: activated(one.sum_of(moved[name]), activation) for name, one in convolutions.items()}
    for name, one in convolutions.items():
        if one.moving is not None:
            for m, x in enumerate(moved[name][1:]):
                one.moving[m] = x

    @pl.when(does & WRITES != 0)
    def _() -> None:
        for name, one in convolutions.items():
            for m, x in enumerate(moved[name][1:]):
                one.after[0, m] = x.astype(one.after.dtype)

    return found


def scratch_of(weight: Any, heads: int, *, tokens: int, blocks: int) -> list[Any]:
    """The scratch memory of a convolution. heads: of a block."""
    width, every, dim = weight.shape
    found = [pltpu.VMEM((width - 1, every, dim), jnp.float32)] if tokens > 1 else []
    return found + ([pltpu.VMEM((tokens, every // heads, heads, dim), jnp.float32)] if blocks > 1 else [])
