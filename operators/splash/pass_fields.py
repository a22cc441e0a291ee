"""Which fields of a SplashConfig are the sizes of which pass."""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__ = ["DKV", "DQ", "FORWARD", "FUSED", "INSIDE", "SIZED", "PassFields"]


class PassFields(NamedTuple):
    """What a pass makes, as in planning's PassSizes, and the fields that are its sizes.

    queries, keys: fields, the largest block first: what a step holds, the part of it that one product takes, a part of that.
    switches: what else a search chooses, `pipeline_depth`, the number of products issued ahead, among them. sums: the keys whose
    gradients are held at a time.
    """

    products: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    switches: tuple[str, ...] = ()
    pipeline_depth: str | None = None
    sums: str | None = None

    @property
    def blocks(self) -> tuple[str, str]:
        """The fields of what a step holds."""
        return self.queries[0], self.keys[0]

    @property
    def sizes(self) -> tuple[str, ...]:
        """All fields that a search chooses: not the sums."""
        return *self.queries, *self.keys, *self.switches


FORWARD = PassFields(
    "forward",
    ("block_q", "block_q_compute"),
    ("block_kv", "block_kv_compute", "block_kv_compute_in"),
    ("transposed_tiles", "products_ahead", "sum_by_product", "heads_per_tile"),
    "products_ahead",
)
FUSED = PassFields(
    "backward",
    ("block_q_dkv", "block_q_dkv_compute"),
    ("block_kv_dkv", "block_kv_dkv_compute"),
    ("products_ahead_dkv",),
    "products_ahead_dkv",
    sums="block_kv_dkv_sums",
)
DKV = FUSED._replace(products="dkv", sums=None)
DQ = PassFields("dq", ("block_q_dq",), ("block_kv_dq", "block_kv_dq_compute"))
# The passes that have fields of their own.
SIZED = FORWARD, FUSED, DQ
# (a size, the one that is a multiple of it)
INSIDE = (
    *(
        (inner, outer)
        for pass_fields in SIZED
        for chain in (pass_fields.queries, pass_fields.keys)
        for outer, inner in itertools.pairwise(chain)
    ),
    *((pass_fields.keys[0], pass_fields.sums) for pass_fields in SIZED if pass_fields.sums is not None),
)
