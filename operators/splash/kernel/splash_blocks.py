"""The sizes and switches of splash's kernels, resolved: each pass's blocks, and what all passes share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ExternalBlocks", "PassBlocks", "SplashBlocks"]


class PassBlocks(NamedTuple):
    """A pass's tile in rows, the queries and keys of one product, and how many products run ahead of their exponentials."""

    block_q: int
    block_kv: int
    compute_q: int
    compute_kv: int
    pipeline_depth: int = 0

    @property
    def subtile(self) -> tuple[int, int]:
        """The queries and keys of one product."""
        return self.compute_q, self.compute_kv


@dataclass(frozen=True)
class ExternalBlocks:
    """What jax's and tokamax's kernels read; jax's not use_base2_exp, fuse_reciprocal and use_experimental_scheduler.

    dkv: of the gradients of key and value; with dq None, of all three.
    """

    forward: PassBlocks
    dkv: PassBlocks
    dq: PassBlocks | None
    q_layout: str
    k_layout: str
    v_layout: str
    use_base2_exp: bool
    fuse_reciprocal: bool
    use_experimental_scheduler: bool

    @property
    def layouts(self) -> tuple[str, str, str]:
        """Of query, key and value."""
        return self.q_layout, self.k_layout, self.v_layout

    @property
    def common(self) -> tuple[int, int]:
        """Queries and keys whose multiples the lengths must be: common multiples of every block in use."""
        used = [blocks for blocks in (self.forward, self.dkv, self.dq) if blocks is not None]
        return math.lcm(*(blocks.block_q for blocks in used)), math.lcm(*(blocks.block_kv for blocks in used))

    def padded(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """The lengths that the kernels require."""
        q_block, kv_block = self.common
        return -(-q_len // q_block) * q_block, -(-kv_len // kv_block) * kv_block

    def keywords(self) -> dict[str, int]:
        """The blocks that both kernels have, by the names that both give them."""
        return {
            "block_q": self.forward.block_q,
            "block_kv": self.forward.block_kv,
            "block_kv_compute": self.forward.compute_kv,
            "block_q_dkv": self.dkv.block_q,
            "block_kv_dkv": self.dkv.block_kv,
            "block_kv_dkv_compute": self.dkv.compute_kv,
        }


@dataclass(frozen=True)
class SplashBlocks(ExternalBlocks):
    """What attnops' own kernels read; the fields that aren't a pass's blocks are called as in SplashConfig."""

    block_kv_compute_in: int
    block_kv_dkv_sums: int | None
    transposed_tiles: bool
    heads_per_tile: int
    sum_by_product: bool
    stationary_weights: bool
    vmem_limit_bytes: int | None
