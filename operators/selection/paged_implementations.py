"""What runs an indexer's step over pages: plain XLA, in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...planning import OperationConfig, declares
from ...planning.notes import note
from ...planning.paged.step_tuning import step_fields
from ..paged.implementations import PagedImplementation
from ..paged_cache.paged_call import PagedCall
from .index_config import PagedIndexerConfig
from .kernel.paged_top_k import whole_words
from .select_keys import SelectedKeys, index_on_xla

__all__ = ["INDEX_ON_PAGES"]

_FEATURES = frozenset({"causal", "sliding_window", "gqa", "latent_values", "quantized_kv"})
_KEYS, _QUERIES = (256, 512, 1024, 2048, 4096), (4, 8, 16, 32, 64)


class IndexOnPages(PagedImplementation):
    """Plain XLA: scores of a block of tokens over their pages, and the k-th greatest found by counting."""

    operation = "paged_indexer"
    config = PagedIndexerConfig  # type: ignore[assignment]
    # Selections that were gathered are equal on all devices, which shard_map can't see.
    capability = declares(
        consumes=_FEATURES,
        tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), (4e-6, None)),
        check_vma=False,
    )

    def __call__(self, call: PagedCall) -> SelectedKeys:
        """Select."""
        return index_on_xla(call)

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config as declared. Errors: ConfigError for a block of pages that isn't whole words of bits."""
        config: Any = problem.config
        size, unit = config.pages_per_block, whole_words(problem.page_size)
        if size is not None and size % unit:
            raise ConfigError(
                f"pages_per_block={size} of {problem.page_size} tokens; wanted a multiple of {unit}: blocks of 32 keys."
            )
        resolved: OperationConfig = config
        return resolved

    def candidates(self, problem: Any, placement: Any) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Sizes of the blocks; the first candidate declares nothing and is the rule's choice."""
        names, unit = step_fields(problem), whole_words(problem.page_size)
        width = -(-problem.cache.table_width // problem.sequence_shards // unit) * unit
        pages = dict.fromkeys(min(max(1, keys // problem.page_size // unit) * unit, width) for keys in _KEYS)
        queries = [n for n in _QUERIES if n < 2 * problem.local_tokens] or [_QUERIES[0]]
        sizes = {"pages_per_block": list(pages), "queries_per_block": queries}
        found: list[dict[str, Any]] = [{}]
        for name in names:
            found = [candidate | {name: size} for candidate in found for size in sizes[name]]
        return {"step": ({}, *found) if names else ()}

    def notes(self, problem: Any, placement: Any, config: OperationConfig) -> tuple[str, ...]:
        """That there is no fused update."""
        if problem.update == "fused" and problem.mode != "insert":
            return (note("paged.fused_unsupported", method="forward_native"),)
        return ()


INDEX_ON_PAGES = IndexOnPages()
