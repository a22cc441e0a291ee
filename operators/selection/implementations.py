"""What runs an indexer: plain XLA, in blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ...errors import ConfigError
from ...masks.causal_window import ANY_CAUSAL, causal_window
from ...planning import Implementation, OperationConfig, declares
from ...planning.selection.index_problem import IndexProblem
from .index_config import IndexerConfig
from .kernel.ordering import WORD
from .kernel.top_k import Selection, top_k_keys

__all__ = ["INDEX_ON_XLA", "IndexCall"]

_FEATURES = frozenset({"causal", "sliding_window", "kv_lengths", "segment_ids", "dynamic_query_offset", "quantized_kv"})


class IndexCall(NamedTuple):
    """One device's part of a call. arrays: by name, index_query, index_key and index_weights among them; query_offset: the
    position of the first query, an int or int32 [batch]."""

    arrays: dict[str, jax.Array]
    query_offset: Any
    problem: IndexProblem
    config: OperationConfig


class IndexOnXla(Implementation[IndexerConfig]):
    """Plain XLA: scores of a block of queries, and the k-th greatest found by counting."""

    operation = "indexer"
    config = IndexerConfig
    capability = declares(consumes=_FEATURES, tolerance=dict.fromkeys(("float32", "bfloat16", "float16"), (4e-6, None)))

    def __call__(self, call: IndexCall) -> Selection:
        """Select."""
        problem, arrays = call.problem, call.arrays
        causal, left, right = causal_window(problem.mask) or ANY_CAUSAL
        config = self.read(call.config)
        return top_k_keys(
            arrays["index_query"],
            arrays["index_key"],
            arrays["index_weights"],
            k=problem.top_k,
            softmax_scale=problem.softmax_scale,
            causal=causal,
            sliding_window=(left, right),
            query_offset=call.query_offset,
            kv_lengths=arrays.get("kv_lengths"),
            q_segment_ids=arrays.get("q_segment_ids"),
            kv_segment_ids=arrays.get("kv_segment_ids"),
            key_scale=arrays.get("key_scale"),
            block_q=config.block_q,
            block_kv=config.block_kv,
        )

    def resolve(self, problem: Any, placement: Any) -> OperationConfig:
        """The config as declared. Errors: ConfigError for a block of keys that isn't whole words of bits."""
        size = self.read(problem.config).block_kv
        if size is not None and size % WORD:
            raise ConfigError(f"block_kv={size}; wanted a multiple of {WORD}.")
        config: OperationConfig = problem.config
        return config


INDEX_ON_XLA = IndexOnXla()
