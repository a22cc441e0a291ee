"""Counts what splash's kernels prefetch into scalar memory: the tile schedules, and numbers that every step reads."""

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
    from .kernel.schedule import StaticMask

__all__ = ["ScalarMemory"]


class ScalarMemory:
    """The count for one problem; the tiles of blocks shared by several passes and configs are found once."""

    def __init__(self, problem: AttentionProblem, placement: Placement) -> None:
        from .kernel.schedule import StaticMask  # imports Pallas, so only where the kernel is planned

        local, split = placement.local, placement.sequence
        # As in execute.py: a start is traced if its length is split or travels around a ring.
        q_start = None if placement.q_axes else 0
        k_start = None if split.ring_axes or split.strategy == "split_kv" else 0
        offset = None if problem.dynamic_query_offset else problem.query_offset or 0
        self.static_mask: StaticMask = StaticMask(problem.mask, local.q_len, local.kv_len, q_start, k_start, offset)
        by_row = problem.dynamic_query_offset or any(leaf.shape[0] > 1 for leaf in problem.leaves)
        self.rows = local.batch if by_row else 1
        self.heads = local.q_heads, local.kv_heads
        self.of_blocks = any(atom.kind == "blocks" for atom in problem.mask.leaves())
        self.heads_differ = any(getattr(atom, "heads", 1) > 1 for atom in problem.mask.leaves())
        self.heads_differ |= any("q_blocks" in leaf.dims and leaf.shape[1] > 1 for leaf in problem.leaves)
        self.numbers = {
            "places": (q_start is None) + (k_start is None),
            "query offsets": local.batch * problem.dynamic_query_offset,
            "lengths": local.batch * sum(leaf.dims == ("batch",) for leaf in problem.leaves),
            "finite tensors": int(any({"q", "kv"} <= set(leaf.dims) for leaf in problem.leaves)),
            "dropout": 4 * (problem.dropout_prob > 0),
            "sinks": local.q_heads * (problem.operand("softmax_aux") is not None),
            "score": local.batch * local.q_heads * (problem.score is not None),  # at most, for one array
        }
        self._live: dict[tuple[int, int], np.ndarray] = {}

    def check(self, config: SplashConfig) -> None:
        """Errors: ConfigError for blocks whose numbers don't fit in a visit's word, or words that don't fit in scalar memory."""
        for pass_fields in _passes(config):
            self._check_blocks(config, pass_fields)
        for pass_fields in _passes(config):
            self._check_words(config, pass_fields)

    def words(self, config: SplashConfig) -> dict[str, int]:
        """The name of each kernel of a resolved config -> words of scalar memory, as far as its mask's lists are known."""
        words_by_kernel = {}
        for pass_fields in _passes(config):
            entries = self._lists(config) * self._entries(
                *_blocks(config, pass_fields), outer_axis(pass_fields.products), self._keys(config, pass_fields)
            )
            words_by_kernel[f"attnops_splash_{pass_fields.products}"] = entries + sum(
                self._numbers(pass_fields).values()
            )
        return words_by_kernel

    def _keys(self, config: SplashConfig, pass_fields: PassFields) -> int:
        """The keys that a pass takes at a time."""
        sums: int | None = None if pass_fields.sums is None else getattr(config, pass_fields.sums)
        return sums or self.static_mask.kv_len

    def _check_blocks(self, config: SplashConfig, pass_fields: PassFields) -> None:
        from .kernel.schedule import MAX_KV_BLOCKS, MAX_Q_BLOCKS

        lengths = (self.static_mask.q_len, MAX_Q_BLOCKS), (self.static_mask.kv_len, MAX_KV_BLOCKS)
        for name, block, (length, max_count) in zip(
            pass_fields.blocks, _blocks(config, pass_fields), lengths, strict=True
        ):
            count = math.ceil(length / block)
            if count > max_count:
                raise ConfigError(
                    f"SplashConfig: {name}={block} cuts {length} rows into {count} blocks; wanted at most {max_count}: "
                    f"{name}={math.ceil(length / max_count / LANES) * LANES} or more."
                )

    def _check_words(self, config: SplashConfig, pass_fields: PassFields) -> None:
        from .kernel.schedule import MAX_WORDS, min_steps

        (block_q, block_kv), keys = _blocks(config, pass_fields), self._keys(config, pass_fields)
        numbers = {name: count for name, count in self._numbers(pass_fields).items() if count}
        room = MAX_WORDS - sum(numbers.values())
        tiles = math.ceil(self.static_mask.q_len / block_q) * math.ceil(keys / block_kv)
        lists = self._lists(config)
        if lists * tiles <= room:
            return
        # If the tiles of some rows are already too many, the others aren't counted. Tiles of a layout are quickly counted.
        samples = keys >= self.static_mask.kv_len and not self.of_blocks
        at_least = min_steps(self.static_mask, block_q, block_kv) if samples else 0
        exact = lists * at_least <= room
        entries = lists * (
            self._entries(block_q, block_kv, outer_axis(pass_fields.products), keys) if exact else at_least
        )
        if entries <= room:
            return
        beside = "".join(f", beside {count} words of {name}" for name, count in numbers.items())
        rows = f" for {self.rows} batch rows" if self.rows > 1 else ""
        rows += f" and {lists // self.rows} tiles of heads that see blocks of their own" if lists > self.rows else ""
        raise ConfigError(
            f"SplashConfig: {pass_fields.queries[0]}={block_q}, {pass_fields.keys[0]}={block_kv} make {entries} visits{rows}"
            f"{'' if exact else ' or more'}, whose list scalar memory can't hold{beside}; wanted at most {max(room, 0)}: larger "
            f"blocks{', or fewer batch rows a device,' if self.rows > 1 or room < 0 else ''} make fewer."
        )

    def _lists(self, config: SplashConfig) -> int:
        """The number of lists: one for each batch row, and for each tile of kv heads, if they differ."""
        q_heads, kv_heads = self.heads
        kv_tile = max(1, (config.heads_per_tile or 1) * kv_heads // q_heads)
        return self.rows * (kv_heads // kv_tile if self.heads_differ else 1)

    def _numbers(self, pass_fields: PassFields) -> dict[str, int]:
        """Everything except the list: only the forward pass reads sinks."""
        return {
            name: 0 if name == "sinks" and pass_fields is not FORWARD else count for name, count in self.numbers.items()
        }

    def _entries(self, block_q: int, block_kv: int, slow: str, keys: int) -> int:
        """The longest list of a batch row, for all keys or for a part of them."""
        from .kernel.schedule import live_tiles, max_steps

        if (block_q, block_kv) not in self._live:
            self._live[block_q, block_kv] = live_tiles(self.static_mask, block_q, block_kv)
        visible, blocks = self._live[block_q, block_kv], math.ceil(keys / block_kv)
        parts = range(0, visible.shape[1], blocks)
        return max(max_steps(visible, slow, slice(first, first + blocks)) for first in parts)


def _passes(config: SplashConfig) -> tuple[PassFields, ...]:
    return *passes_of(config, False), *passes_of(config, True)


def _blocks(config: SplashConfig, pass_fields: PassFields) -> tuple[int, int]:
    blocks = pass_blocks(config, pass_fields)
    return blocks.block_q, blocks.block_kv
