"""The arrays of an indexer's call, and what it returns."""

from __future__ import annotations

from ...sharding import Operand, OperandTable

__all__ = ["INDEX", "SELECTIONS_OF"]

INDEX = OperandTable(
    Operand("index_query", ("batch", "q_len", "index_heads", "index_dim"), optional=False, gradient=False),
    Operand("index_key", ("batch", "kv_len", "index_dim"), optional=False, dtype="stored", gradient=False),
    Operand("index_weights", ("batch", "q_len", "index_heads"), optional=False, gradient=False),
    Operand("key_scale", ("batch", "kv_len"), gradient=False),
    Operand("kv_lengths", ("batch",), dtype="integers", gradient=False),
    Operand("q_segment_ids", ("batch", "q_len"), dtype="integers", gradient=False),
    Operand("kv_segment_ids", ("batch", "kv_len"), dtype="integers", gradient=False),
    Operand("query_offsets", ("batch",), dtype="integers", gradient=False),
)
SELECTIONS_OF = (
    Operand("positions", ("batch", "q_len", "top_k"), dtype="integers", gradient=False),
    Operand("counts", ("batch", "q_len"), dtype="integers", gradient=False),
)
