"""Selected attention: an indexer scores keys, each query attends to the best of them."""

from __future__ import annotations

from .indexer import DsaIndexer, GlmMoeDsaIndexer, Indexer, IndexOutput
from .kernel.distillation import indexer_loss
from .kernel.selected import selected_attention
from .kernel.top_k import Selection, top_k_keys

__all__ = [
    "DsaIndexer",
    "GlmMoeDsaIndexer",
    "IndexOutput",
    "Indexer",
    "Selection",
    "indexer_loss",
    "selected_attention",
    "top_k_keys",
]
