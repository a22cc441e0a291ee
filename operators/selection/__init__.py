"""Selected attention: an indexer scores keys, and each query attends to the best of them, or of their blocks."""

from __future__ import annotations

from .indexer import DsaIndexer, GlmMoeDsaIndexer, Indexer, IndexOutput
from .kernel.block_recipes import (
    merge_branches,
    moba_blocks,
    msa_blocks,
    nsa_blocks,
    nsa_compressed,
    positions_of_pages,
    quest_bounds,
    quest_pages,
)
from .kernel.distillation import indexer_loss
from .kernel.selected import selected_attention
from .kernel.top_k import Selection, top_k_keys
from .paged_indexer import IndexStepOutput, PagedIndexer
from .selected_operation import SelectedAttention, SelectedConfig

__all__ = [
    "DsaIndexer",
    "GlmMoeDsaIndexer",
    "IndexOutput",
    "IndexStepOutput",
    "Indexer",
    "PagedIndexer",
    "SelectedAttention",
    "SelectedConfig",
    "Selection",
    "indexer_loss",
    "merge_branches",
    "moba_blocks",
    "msa_blocks",
    "nsa_blocks",
    "nsa_compressed",
    "positions_of_pages",
    "quest_bounds",
    "quest_pages",
    "selected_attention",
    "top_k_keys",
]
