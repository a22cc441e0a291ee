"""One device's part of a planned call, as a call of its own: what a size search compiles and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError
from ..operators import Operation
from ..operators.call.key_columns import KeyColumns
from ..planning import AttentionProblem, Placement
from ..registry import OperationMetadata, OperationRegistry
from ..sharding.mesh import AnyMesh
from .static_clock import Region, TileCycles, tile_cycles
from .with_gradient import outputs, outputs_and_gradients

__all__ = ["LocalProblem"]


@dataclass(frozen=True)
class LocalProblem:
    """A call without a mesh. It can be pickled: `metadata` is JSON values, `arguments` hold ShapeDtypeStructs."""

    operation: str
    metadata: dict[str, Any]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, problem: AttentionProblem, placement: Placement) -> LocalProblem:
        """The part of one device. Errors: ConfigError where the queries are split, because the parts then differ."""
        if placement.q_axes:
            raise ConfigError(
                f"the queries are split over {'+'.join(placement.q_axes)}, so each device has different tiles. Hint: search for "
                "the call of one device instead, without a mesh."
            )
        local, dtype = placement.local, jnp.dtype(problem.runtime_dtype)
        sizes = {
            "batch": local.batch, "heads": local.q_heads, "kv_heads": local.kv_heads, "q_len": local.q_len,
            "kv_len": local.kv_len, "head_dim": problem.head_dim, "value_dim": problem.value_dim,
        }  # fmt: skip
        sizes |= {"q": local.q_len, "kv": local.kv_len, "all_keys": local.kv_len}

        def cut(shape: tuple[int, ...], dims: tuple[str, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            dims_of_shape = zip(shape, dims, strict=True)
            return jax.ShapeDtypeStruct(tuple(1 if n == 1 else sizes.get(d, n) for n, d in dims_of_shape), dtype)

        leaves = [cut(leaf.shape, leaf.dims, leaf.dtype) for leaf in problem.leaves]
        arguments: dict[str, Any] = {
            **{
                row.name: jax.ShapeDtypeStruct(
                    row.shape(sizes, problem.kernel_layout), problem.quantised.get(row.name, dtype)
                )
                for row in problem.required
            },
            **({"value": KeyColumns(problem.value_dim)} if problem.values_in_key else {}),
            "mask": problem.mask.merge(leaves),
            "query_offset": problem.query_offset,
            "softmax_scale": problem.softmax_scale,
            "logits_soft_cap": problem.logits_soft_cap,
            "return_weights": "return_weights" in problem.features,
            "return_lse": "return_lse" in problem.features,
            "mode": problem.mode,
            "layout": problem.kernel_layout,
        }
        if problem.dynamic_query_offset:
            arguments["query_offset"] = jax.ShapeDtypeStruct((local.batch,), jnp.int32)
        captures = []
        for operand in problem.operands:
            row, shape = operand.operand, operand.shape
            dims = row.accepted(shape, problem.sizes, problem.layout) or ()
            if row.inside == ("heads",):  # given for each kv head or each head; passed for each head
                dims = ("heads", *dims[1:])
            elif row.order:
                dims, shape = row.dims_in(problem.kernel_layout), shape if problem.layout != "thd" else (1, *shape)
            array = cut(shape, dims, operand.dtype)
            if row.feature == "score":
                captures.append(array)
            else:
                arguments[operand.name] = array
        if problem.score is not None:
            arguments["score"] = problem.score.with_arrays(captures)
        if problem.dropout_prob > 0:
            arguments["dropout_rng"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
            arguments |= {"dropout_prob": problem.dropout_prob, "deterministic": False}
        metadata = {
            "runtime_dtype": problem.runtime_dtype,
            "runtime_softmax_dtype": problem.softmax_dtype,
            "operation_configs": {problem.config.operation: problem.config.to_dict()},
            "fallback": "error",
            "tuning": "off",
        }
        return cls(problem.operation, metadata, arguments)

    def make(self, fields: Mapping[str, Any], mesh: AnyMesh | None = None) -> Operation:
        """The operation with some fields of its config set."""
        metadata = OperationMetadata.from_dict(self.metadata).replace(mesh=mesh)
        ((of, config),) = metadata.operation_configs.items()
        kind: Any = OperationRegistry.get(self.operation)
        return kind(metadata.replace(operation_configs={of: config.with_fields(fields)}))

    def program(
        self, fields: Mapping[str, Any], part: str, mesh: AnyMesh | None = None
    ) -> tuple[Callable[[Any], Any], Any]:
        """(function of the arrays, their shapes): the call or, for part 'backward', its gradient."""
        attend = self.make(fields, mesh)
        leaves, tree = jax.tree.flatten(self.arguments, is_leaf=lambda x: x is None)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

        def run(arrays: list[jax.Array]) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            arguments = jax.tree.unflatten(tree, filled)
            return (outputs if part == "forward" else outputs_and_gradients)(attend, arguments)

        return run, [leaves[i] for i in places]

    def read(self, kernel: str, root: Region) -> TileCycles:
        """A kernel's cycles by tile."""
        return tile_cycles(root)

    def arrays(self, shapes: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Values to time it with: normal numbers; int8 from -127 to 127; one segment, full lengths, positions in order, mask
        arrays all visible.
        """
        names = {id(leaf.array): leaf.name for leaf in self.arguments["mask"].split()[1]}
        kv_len = self.arguments["key"].shape[self.arguments["layout"].index("t")]
        keys = jax.random.split(jax.random.key(0), len(shapes))

        def draw(shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
            name = names.get(id(shape), "")
            if jnp.issubdtype(shape.dtype, jnp.floating):
                narrow = jnp.dtype(shape.dtype).itemsize == 1  # fp8 can't be drawn directly
                return jax.random.normal(key, shape.shape, jnp.float32 if narrow else shape.dtype).astype(shape.dtype)
            if shape.dtype == jnp.int8 and not name:
                return jax.random.randint(key, shape.shape, -127, 128, jnp.int8)
            if name.endswith("positions"):
                return jnp.broadcast_to(jnp.arange(shape.shape[-1], dtype=shape.dtype), shape.shape)
            return jnp.full(shape.shape, {"kv_lengths": kv_len, "mask": True}.get(name, 0), shape.dtype)

        return [draw(shape, key) for shape, key in zip(shapes, keys, strict=True)]
