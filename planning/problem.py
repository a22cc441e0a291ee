"""AttentionProblem: one call without its arrays; frozen, hashable, and all that a plan depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..masks import Mask
from ..scores import Score
from ..sharding import ATTENTION, RESULTS, AttnShardingRules, MeshAxis, Operand, OperandShape, describe_mesh
from ..symbolic import is_symbolic
from .operation_config import OperationConfig
from .quantised import QUANTISED

__all__ = ["AttentionProblem", "KeyedProblem", "LeafShape", "Problem", "heads_text", "platform_text", "positions_leaf"]


class LeafShape(NamedTuple):
    """A traced array of the mask: name, shape, names of its dimensions ('batch', 'heads', 'q', 'kv'), dtype."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What every request has: config, dtype, mode, features, mesh and platform.

    `input_dtype` is that of the first array. `operands` are arrays as given, in the order of the operation's table; of attention
    the optional ones. `platform_source` says where the platform was read from.
    """

    operation: str
    config: OperationConfig
    input_dtype: str
    mode: str
    features: frozenset[str]
    operands: tuple[OperandShape, ...]
    mesh: tuple[MeshAxis, ...]
    platform: str
    device_kind: str
    platform_source: str
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The device kind, or the platform if the kind is unknown."""
        return self.device_kind or f"{self.platform} of unknown kind"

    @property
    def declared_mask(self) -> Mask | None:
        """The mask; None of a call that has no keys to mask."""
        return None

    @property
    def devices(self) -> int:
        return math.prod(axis.size for axis in self.mesh)

    @property
    def symbolic(self) -> frozenset[str]:
        """What jax.export knows only by name: 'batch', 'length' (of queries or keys)."""
        return frozenset()

    def operand(self, name: str) -> OperandShape | None:
        """An array of `operands`; None if the call doesn't have it."""
        return next((operand for operand in self.operands if operand.operand.name == name), None)

    def describe(self) -> str:
        """What is computed, and where, in one line."""
        raise NotImplementedError

    def described_options(self) -> dict[str, Any]:
        """The static options of the call that plans record, as JSON values."""
        return {}


@dataclass(frozen=True, kw_only=True)
class KeyedProblem(Problem):
    """A request that compares queries with keys, whether these are arrays or lie in pages: heads, dtypes, mask and scores.

    `input_dtype` is the query's. `score` is what is applied after the soft cap, without its arrays.
    """

    q_heads: int
    key_dtype: str
    value_dtype: str
    runtime_dtype: str
    softmax_dtype: str
    mask: Mask
    softmax_scale: float
    logits_soft_cap: float | None
    score: Score | None = None

    @property
    def own_operands(self) -> tuple[str, ...]:
        """The names of the operation's own arrays: neither attention's nor the score's."""
        return tuple(x.name for x in self.operands if x.name not in ATTENTION and x.operand.feature != "score")

    @property
    def declared_mask(self) -> Mask | None:
        return self.mask

    @property
    def contiguous_positions(self) -> bool:
        """Whether positions follow from indices, so that a score may have numbers per distance."""
        return not self.symbolic and not positions_leaf(self.mask)

    def described_options(self) -> dict[str, Any]:
        """The mask in words, and the score."""
        return {"mask": self.mask.describe(), "score": None if self.score is None else self.score.to_dict()}


def positions_leaf(mask: Mask) -> bool:
    """Whether the mask has one array of positions for queries and one for keys, which then count as theirs."""
    return sum(leaf.kind == "positions" for leaf in mask.conjuncts()) == 1


def heads_text(q_heads: int, kv_heads: int, head_dim: int, value_dim: int) -> str:
    """`8 heads (2 kv), dim 64`."""
    heads = f"{q_heads} heads" + (f" ({kv_heads} kv)" if kv_heads != q_heads else "")
    return f"{heads}, dim {head_dim}" + (f" (value {value_dim})" if value_dim != head_dim else "")


def platform_text(problem: Problem) -> str:
    """`splash on tpu (TPU v5e)`."""
    kind = f" ({problem.device_kind})" if problem.device_kind not in (problem.platform, "") else ""
    return f"{problem.operation} on {problem.platform}{kind}"


@dataclass(frozen=True, kw_only=True)
class AttentionProblem(KeyedProblem):
    """What a call requests: global shapes, dtypes, mask structure, features, mode, layout, mesh and platform.

    `layout` is the caller's; thd counts as batch 1. The arrays of the mask are in `leaves`. `query_offset` is an int, or None
    if it is known only at run time or nothing depends on it. `declared_axes`: the mesh axes that the rules name not only by
    default. `manual_sequence`: the Manual axes over which the caller
    has split (queries, keys), if the strategy uses them; lengths are then the total ones. `batch`, `q_len` and `kv_len` may be
    symbolic dimensions of jax.export; see `symbolic`. values_in_key: values are the first numbers of their keys, and no array of
    the call.
    """

    batch: int
    q_len: int
    kv_len: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layout: str
    leaves: tuple[LeafShape, ...]
    dropout_prob: float
    query_offset: int | None
    dynamic_query_offset: bool
    rules: AttnShardingRules
    declared_axes: frozenset[str]
    vma: bool = False
    values_in_key: bool = False
    manual_sequence: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def required(self) -> tuple[Operand, ...]:
        """The rows of query, key and, where it is an array of the call, value."""
        return tuple(row for row in ATTENTION.required if not (self.values_in_key and row.name == "value"))

    @property
    def value_columns(self) -> int | None:
        """How many of a key's numbers, read as they are, are its value; None where kernels need an array of values."""
        return self.value_dim if self.values_in_key and not self.quantised else None

    @property
    def token_dim(self) -> int:
        """The numbers of a key and its value, which counts once if it is a part of the key."""
        return self.head_dim + (0 if self.values_in_key else self.value_dim)

    @property
    def kernel_layout(self) -> str:
        """The layout that kernels see: thd becomes bthd with batch 1."""
        return "bthd" if self.layout == "thd" else self.layout

    @property
    def symbolic(self) -> frozenset[str]:
        """What jax.export knows only by name: 'batch', 'length' (of queries or keys)."""
        sizes = {"batch": (self.batch,), "length": (self.q_len, self.kv_len)}
        return frozenset(name for name, some in sizes.items() if any(map(is_symbolic, some)))

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the query."""
        return self.itemsize_of("query")

    @property
    def quantised(self) -> dict[str, str]:
        """The dtypes of 'key' and 'value', for those that are int8 or fp8."""
        dtypes = {"key": self.key_dtype, "value": self.value_dtype}
        return {name: dtype for name, dtype in dtypes.items() if dtype in QUANTISED}

    @property
    def scales(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the scales in the call, in the caller's layout: 'key_scale', 'value_scale'."""
        return {x.name: x.shape for x in self.operands if x.name in ("key_scale", "value_scale")}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each logical dim."""
        names = "batch", "q_len", "kv_len", "kv_heads", "head_dim", "value_dim"
        return {name: getattr(self, name) for name in names} | {"heads": self.q_heads}

    def dtype_of(self, tensor: str) -> str:
        """The dtype of an array as given, or as returned: each has its own. Mask arrays are in `leaves`."""
        if (operand := self.operand(tensor)) is not None:
            return operand.dtype
        if tensor in RESULTS:
            return self.runtime_dtype if RESULTS[tensor].inside_dtype == "runtime" else self.softmax_dtype
        return {
            "query": self.input_dtype,
            "query3d": self.input_dtype,
            "key": self.key_dtype,
            "value": self.value_dtype,
        }[tensor]

    def dtype_inside(self, operand: Operand) -> str:
        """The dtype of an operand inside the operation."""
        name = operand.inside_dtype
        if name == "given":
            return self.dtype_of(operand.name)
        if name == "runtime":
            return self.quantised.get(operand.name, self.runtime_dtype)
        return self.softmax_dtype if name == "softmax" else name

    def itemsize_of(self, tensor: str) -> int:
        """Bytes of one element of an array as given, or as returned."""
        return jnp.dtype(self.dtype_of(tensor)).itemsize

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """The global shape of query, key, value, output or query3d in the caller's layout."""
        if tensor == "query3d":
            return (self.batch, self.q_heads, self.head_dim)
        return (RESULTS if tensor in RESULTS else ATTENTION)[tensor].shape(self.sizes, self.layout)

    def describe(self) -> str:
        """What is computed, and where, in one line."""
        heads = heads_text(self.q_heads, self.kv_heads, self.head_dim, self.value_dim)
        kv = "".join(f", {name} {dtype}" for name, dtype in self.quantised.items())
        return (
            f"{platform_text(self)}: batch {self.batch}, q {self.q_len}, kv {self.kv_len}, {heads}, {self.runtime_dtype}{kv}, "
            f"{self.layout}, mode {self.mode.strip('_')}, mesh {describe_mesh(self.mesh)}"
        )
