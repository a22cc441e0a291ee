"""IndexProblem: one call of an indexer without its arrays; frozen, hashable, and all that its plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...sharding import describe_mesh
from ..problem import KeyedProblem, platform_text

__all__ = ["IndexProblem"]


@dataclass(frozen=True, kw_only=True)
class IndexProblem(KeyedProblem):
    """What a call requests: sizes of the whole problem, the number of keys that each query selects, and the declared spec of each
    array. q_heads are the index heads. query_offset: None if it is an array of the call."""

    batch: int
    q_len: int
    kv_len: int
    index_dim: int
    top_k: int
    query_offset: int | None
    specs: tuple[tuple[str, PartitionSpec], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim."""
        names = "batch", "q_len", "kv_len", "index_dim", "top_k"
        return {name: getattr(self, name) for name in names} | {"index_heads": self.q_heads}

    def itemsize(self, name: str) -> int:
        """Bytes of an element of an array or a result."""
        dtypes = {"index_query": self.input_dtype, "index_key": self.key_dtype, "index_weights": self.value_dtype}
        operand = self.operand(name)
        return jnp.dtype(dtypes.get(name, "int32" if operand is None else operand.dtype)).itemsize

    def describe(self) -> str:
        """What is selected, and where, in one line."""
        return (
            f"{platform_text(self)}: the {self.top_k} best of {self.kv_len} keys for {self.batch} x {self.q_len} queries, "
            f"{self.q_heads} index heads of {self.index_dim}, {self.input_dtype} over keys of {self.key_dtype}, "
            f"mode {self.mode.strip('_')}, mesh {describe_mesh(self.mesh)}"
        )
