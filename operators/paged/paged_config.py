"""PagedConfig: what can be declared for attention over pages, besides the cache itself."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt, StrictBool

from ...planning import OperationConfig

__all__ = ["PagedConfig"]


class PagedConfig(OperationConfig):
    """update: when a step's own keys and values are written: 'before' the attention, 'fused' with it, 'none' for pages
    that have them already.

    pages_per_block, queries_per_block: what the kernel processes at once; if unset or None, it chooses.
    interpret: run the TPU kernel in Pallas' interpreter, on any platform. vmem_limit_bytes: of the TPU kernel; if unset or None,
    what it counts.
    """

    feeds: ClassVar = {}

    operation: Literal["paged"] = "paged"
    update: Literal["before", "fused", "none"] = "before"
    pages_per_block: PositiveInt | None = None
    queries_per_block: PositiveInt | None = None
    interpret: StrictBool = False
    vmem_limit_bytes: PositiveInt | None = None
