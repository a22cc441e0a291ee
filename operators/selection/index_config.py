"""What can be declared for an indexer: IndexerConfig over arrays, PagedIndexerConfig over pages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from ...planning import OperationConfig

__all__ = ["DsaIndexerConfig", "GlmMoeDsaIndexerConfig", "IndexerConfig", "PagedIndexerConfig"]


class IndexerConfig(OperationConfig):
    """top_k: how many keys each query selects; a call may give it instead. block_q, block_kv: queries and keys that are worked on
    together; if unset or None, by their sizes. block_kv is a multiple of 32."""

    feeds: ClassVar = {}

    operation: Literal["indexer"] = "indexer"
    top_k: PositiveInt | None = None
    block_q: PositiveInt | None = None
    block_kv: PositiveInt | None = None


class DsaIndexerConfig(IndexerConfig):
    """See IndexerConfig."""

    operation: Literal["dsa_indexer"] = "dsa_indexer"  # type: ignore[assignment]


class GlmMoeDsaIndexerConfig(IndexerConfig):
    """See IndexerConfig."""

    operation: Literal["glm_moe_dsa_indexer"] = "glm_moe_dsa_indexer"  # type: ignore[assignment]


class PagedIndexerConfig(OperationConfig):
    """top_k: how many keys each token selects; a step may give it instead. update: as for `paged`, of index keys.

    pages_per_block, queries_per_block: pages and tokens that are worked on together; if unset or None, by their sizes. The pages
    of a block hold a multiple of 32 keys.
    """

    feeds: ClassVar = {}

    operation: Literal["paged_indexer"] = "paged_indexer"
    top_k: PositiveInt | None = None
    update: Literal["before", "fused", "none"] = "before"
    pages_per_block: PositiveInt | None = None
    queries_per_block: PositiveInt | None = None
