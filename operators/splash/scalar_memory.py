"""Counts what splash's kernels prefetch into scalar memory: the lists of visits, and numbers that every step reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ...planning.implementations import outer_axis
from .pass_fields import FORWARD, PassFields
from .passes import pass_blocks, passes_of
from .splash_config import LANES, SplashConfig

if TYPE_CHECKING:
    from .kernel.schedule import Known

__all__ = ["ScalarMemory"]


class ScalarMemory:
    """The count for one problem; the tiles of blocks shared by several passes and configs are found once."""

    def __init__(self, problem: AttentionProblem, placement: Placement) -> None:
        from .kernel.schedule import Known  # imports Pallas, so only where the kernel is planned

        local, split = placement.local, placement.sequence
        # As in execute.py: a start is traced if its length is split or travels around a ring.
        q_start = None if placement.q_axes else 0
        k_start = None if split.ring_axes or split.strategy == "split_kv" else 0
        offset = None if problem.dynamic_query_offset else problem.query_offset or 0
        self.known: Known = Known(problem.mask, local.q_len, local.kv_len, q_start, k_start, offset)
        by_row = problem.dynamic_query_offset or any(leaf.shape[0] > 1 for leaf in problem.leaves)
        self.rows = local.batch if by_row else 1
        self.heads = local.q_heads, local.kv_heads
        self.of_blocks = any(atom.kind == "blocks" for atom in problem.mask.leaves())
        self.heads_apart = any(getattr(atom, "heads", 1) > 1 for atom in problem.mask.leaves())
        self.heads_apart |= any("q_blocks" in leaf.dims and leaf.shape[1] > 1 for leaf in problem.leaves)
        self.numbers = {
            "places": (q_start is None) + (k_start is None),
            "query offsets": local.batch * problem.dynamic_query_offset,
            "lengths": local.batch * sum(leaf.dims == ("batch",) for leaf in problem.leaves),
            "finite tensors": int(any({"q", "kv"} <= set(leaf.dims) for leaf in problem.leaves)),
            "dropout": 4 * (problem.dropout_prob > 0),
            "sinks": local.q_heads * (problem.operand("softmax_aux") is not None),
        }
        self._live: dict[tuple[int, int], np.ndarray] = {}

    def check(self, config: SplashConfig) -> None:
        """Errors: ConfigError for blocks whose numbers don't fit in a visit's word, or words that don't fit in scalar memory."""
        for one in _passes(config):
            self._check_blocks(config, one)
        for one in _passes(config):
            self._check_words(config, one)

    def words(self, config: SplashConfig) -> dict[str, int]:
        """The name of each kernel of a resolved config -> words of scalar memory, as far as its mask's lists are known."""
        found = {}
        for one in _passes(config):
            visits = self._lists(config) * self._visits(
                *_blocks(config, one), outer_axis(one.products), self._keys(config, one)
            )
            found[f"attnops_splash_{one.products}"] = visits + sum(self._numbers(one).values())
        return found

    def _keys(self, config: SplashConfig, one: PassFields) -> int:
        """The keys that a pass takes at a time."""
        sums: int | None = None if one.sums is None else getattr(config, one.sums)
        return sums or self.known.kv_len

    def _check_blocks(self, config: SplashConfig, one: PassFields) -> None:
        from .kernel.schedule import MOST_KV_BLOCKS, MOST_Q_BLOCKS

        lengths = (self.known.q_len, MOST_Q_BLOCKS), (self.known.kv_len, MOST_KV_BLOCKS)
        for name, block, (length, most) in zip(one.blocks, _blocks(config, one), lengths, strict=True):
            count = math.ceil(length / block)
            if count > most:
                raise ConfigError(
                    f"SplashConfig: {name}={block} cuts {length} rows into {count} blocks; wanted at most {most}: "
                    f"{name}={math.ceil(length / most / LANES) * LANES} or more."
                )

    def _check_words(self, config: SplashConfig, one: PassFields) -> None:
        from .kernel.schedule import MOST_WORDS, fewest_steps

        (block_q, block_kv), keys = _blocks(config, one), self._keys(config, one)
        numbers = {name: count for name, count in self._numbers(one).items() if count}
        room = MOST_WORDS - sum(numbers.values())
        tiles = math.ceil(self.known.q_len / block_q) * math.ceil(keys / block_kv)
        lists = self._lists(config)
        if lists * tiles <= room:
            return
        # If the tiles of some rows are already too many, the others aren't counted. Tiles of a layout are quickly counted.
        samples = keys >= self.known.kv_len and not self.of_blocks
        at_least = fewest_steps(self.known, block_q, block_kv) if samples else 0
        exact = lists * at_least <= room
        visits = lists * (self._visits(block_q, block_kv, outer_axis(one.products), keys) if exact else at_least)
        if visits <= room:
            return
        beside = "".join(f", beside {count} words of {name}" for name, count in numbers.items())
        rows = f" for {self.rows} batch rows" if self.rows > 1 else ""
        rows += f" and {lists // self.rows} tiles of heads that see blocks of their own" if lists > self.rows else ""
        raise ConfigError(
            f"SplashConfig: {one.queries[0]}={block_q}, {one.keys[0]}={block_kv} make {visits} visits{rows}"
            f"{'' if exact else ' or more'}, whose list scalar memory can't hold{beside}; wanted at most {max(room, 0)}: larger "
            f"blocks{', or fewer batch rows a device,' if self.rows > 1 or room < 0 else ''} make fewer."
        )

    def _lists(self, config: SplashConfig) -> int:
        """The number of lists: one for each batch row, and for each tile of kv heads, if they differ."""
        q_heads, kv_heads = self.heads
        kv_tile = max(1, (config.heads_per_tile or 1) * kv_heads // q_heads)
        return self.rows * (kv_heads // kv_tile if self.heads_apart else 1)

    def _numbers(self, one: PassFields) -> dict[str, int]:
        """Everything except the list: only the forward pass reads sinks."""
        return {name: 0 if name == "sinks" and one is not FORWARD else count for name, count in self.numbers.items()}

    def _visits(self, block_q: int, block_kv: int, slow: str, keys: int) -> int:
        """The longest list of a batch row, for all keys or for a part of them."""
        from .kernel.schedule import live_tiles, most_steps

        if (block_q, block_kv) not in self._live:
            self._live[block_q, block_kv] = live_tiles(self.known, block_q, block_kv)
        live, blocks = self._live[block_q, block_kv], math.ceil(keys / block_kv)
        parts = range(0, live.shape[1], blocks)
        return max(most_steps(live, slow, slice(first, first + blocks)) for first in parts)


def _passes(config: SplashConfig) -> tuple[PassFields, ...]:
    return *passes_of(config, False), *passes_of(config, True)


def _blocks(config: SplashConfig, one: PassFields) -> tuple[int, int]:
    blocks = pass_blocks(config, one)
    return blocks.block_q, blocks.block_kv
