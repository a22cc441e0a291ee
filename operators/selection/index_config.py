"""IndexerConfig: what can be declared for an indexer."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from ...planning import OperationConfig

__all__ = ["DsaIndexerConfig", "GlmMoeDsaIndexerConfig", "IndexerConfig"]


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
