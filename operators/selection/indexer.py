"""indexer: for each query the keys that it will attend to, those with the greatest scores of a few light heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ...call_arguments import CallArray
from ...compat import tree_of
from ...errors import InputError, InputTypeError, is_whole, nearest, shown
from ...masks import Mask
from ...planning import plan
from ...planning.notes import note
from ...planning.selection.index_operands import INDEX, SELECTIONS_OF
from ...planning.selection.index_plan import SELECTIONS, IndexPlan
from ...planning.selection.index_problem import IndexProblem
from ...pytree_export import exported
from ...sharding import OperandShape, axes_of, pin
from ...sharding.mesh import AnyMesh
from ...sharding.modes import canonical_mode
from ...sharding.rules import resolve_spec
from ..api.declared_config import declared_config
from ..call.arrays import is_array, shaped
from ..call.declared import DeclaredOperation
from ..call.planned_platform import planned_platform
from ..call.program import Program, attention
from ..call.same_arguments import explained
from ..notes.unread_fields import unread_fields
from .implementations import INDEX_ON_XLA, IndexCall
from .index_checks import call_sizes, selected_count, static_options
from .index_config import DsaIndexerConfig, GlmMoeDsaIndexerConfig, IndexerConfig
from .kernel.top_k import Selection

__all__ = ["DsaIndexer", "GlmMoeDsaIndexer", "IndexArguments", "IndexOutput", "Indexer"]

_UNREAD = ("kv_heads", "sequence_parallel", "ring_order", "scan_ring_attention")


class IndexArguments(TypedDict, total=False):
    """The keywords of an indexer's call; those that attention has too have the same meaning."""

    top_k: int | None
    mask: Mask | None
    causal: bool | None
    sliding_window: int | tuple[int | None, int | None] | None
    query_offset: int | CallArray
    kv_lengths: CallArray | None
    q_segment_ids: CallArray | None
    kv_segment_ids: CallArray | None
    key_scale: CallArray | None
    softmax_scale: float | None
    mode: str | None


@exported()
@tree_of(["positions", "counts"], dropped=["plan"])
@dataclass(frozen=True)
class IndexOutput:
    """A JAX pytree. positions: int32 [batch, q, top_k], ascending, then -1; counts: int32 [batch, q], how many are used. plan:
    what ran and why; not part of the tree, so the result of jit has None here."""

    positions: jax.Array
    counts: jax.Array
    plan: IndexPlan | None = field(default=None, kw_only=True)


class Indexer(DeclaredOperation):
    """For each query exactly the top_k of its visible keys with the greatest scores; of equal ones, the lower position.

    The score of a key is the sum over the index heads of weight * relu(scale * query . key). Source: DeepSeek-AI,
    "DeepSeek-V3.2" (2025).
    """

    name = "indexer"
    config = IndexerConfig
    operands = INDEX
    family = "selection"
    planner = SELECTIONS
    convention = "attnops:indexer"
    forward_native = INDEX_ON_XLA

    def __call__(
        self,
        index_query: CallArray,
        index_key: CallArray,
        index_weights: CallArray,
        **call: Unpack[IndexArguments],
    ) -> IndexOutput:
        """Select. Shapes: index_query [batch, q, index_heads, dim], index_key [batch, kv, dim], index_weights [batch, q,
        index_heads]; int8 and fp8 keys have a key_scale [batch, kv].

        The scale is dim ** -0.5 by default; a model's factor for the heads belongs in the weights. A selection is a constant: it
        has no gradient. Errors: InputError, InputTypeError (bad arguments), RefusedError (nothing can run it).
        """
        arrays, problem, mesh = self._described(index_query, index_key, index_weights, call)
        decided = self._ready(plan(type(self), problem, self.metadata.policy), tuple(arrays.values()), mesh)
        given = {name: jnp.asarray(x) for name, x in arrays.items()}
        found = attention(Program(self, decided, mesh, None), given)
        return IndexOutput(found.positions, found.counts, plan=decided)

    def plan(
        self,
        index_query: CallArray,
        index_key: CallArray,
        index_weights: CallArray,
        **call: Unpack[IndexArguments],
    ) -> IndexPlan:
        """The plan of the same call, from arrays or ShapeDtypeStructs; nothing runs."""
        _, problem, _ = self._described(index_query, index_key, index_weights, call)
        decided: IndexPlan = plan(type(self), problem, self.metadata.policy)
        return decided

    explain = explained(plan)

    def run_program(self, program: Program, arrays: dict[str, jax.Array]) -> Selection:
        """Run a planned call; traceable."""
        decided: Any = program.plan
        problem, mesh = decided.problem, program.mesh
        method = getattr(self, decided.method)
        first = arrays["query_offsets"] if problem.query_offset is None else problem.query_offset
        if mesh is None or mesh.size == 1 or all(axis.kind == "manual" for axis in axes_of(mesh)):
            found: Selection = method(IndexCall(arrays, first, problem, decided.config))
            return found
        batch, queries = (decided.placement.axes("index_query", at) or None for at in (0, 1))
        axes = {"batch": batch, "q_len": queries}
        in_specs = {name: PartitionSpec(*map(axes.get, INDEX[name].dims)) for name in arrays}

        def body(arrays: dict[str, jax.Array]) -> Selection:
            offset = arrays["query_offsets"] if problem.query_offset is None else problem.query_offset
            if queries:
                rows, count = arrays["index_query"].shape[:2]
                start = lax.axis_index(queries).astype(np.int32) * np.int32(count)
                offset = jnp.broadcast_to(start + offset, (rows,))
            on_device: Selection = method(IndexCall(arrays, offset, problem, decided.config))
            return on_device

        placed = {name: pin(x, in_specs[name], mesh) for name, x in arrays.items()}
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(in_specs,),
            out_specs=Selection(PartitionSpec(batch, queries, None), PartitionSpec(batch, queries)),  # type: ignore[arg-type]
            axis_names={axis.name for axis in axes_of(mesh) if axis.kind != "manual"},
        )(placed)

    # -- the description of a call ------------------------------------------------------------------------------------

    def _described(
        self, index_query: Any, index_key: Any, index_weights: Any, call: Mapping[str, Any]
    ) -> tuple[dict[str, Any], IndexProblem, AnyMesh | None]:
        """(the arrays by name, the problem, the mesh). Errors: those of a call."""
        for name in call:
            if name not in IndexArguments.__annotations__:
                raise InputTypeError(
                    f"unknown argument {shown(name)} of an indexer." + nearest(name, IndexArguments.__annotations__)
                )
        offset = call.get("query_offset", 0)
        arrays = {"index_query": index_query, "index_key": index_key, "index_weights": index_weights}
        arrays |= {row.name: x for row in INDEX if row.optional and (x := call.get(row.name)) is not None}
        if is_array(offset) and offset.shape:
            arrays["query_offsets"] = offset
        elif not is_whole(offset, 0):
            raise InputError(f"query_offset={shown(offset)}; wanted a whole number from 0 on, or integers [batch].")
        shapes = {name: shaped(name, x) for name, x in arrays.items()}
        sizes = call_sizes(shapes)
        mesh, metadata = self._mesh(), self.metadata
        platform, kind, source = planned_platform(metadata, mesh, tuple(arrays.values()))
        config, notes = declared_config(type(self), metadata, platform)
        if unread := unread_fields(metadata, _UNREAD):
            notes.append(note("index.unread", fields=unread))
        mask, scale = static_options(call, metadata.causal)
        scale = metadata.softmax_scale if scale is None else scale
        scale = sizes["index_dim"] ** -0.5 if scale is None else scale
        if not math.isfinite(scale):
            raise InputError(f"softmax_scale={shown(scale)}; wanted a finite number.")
        mode = canonical_mode(call.get("mode") or "train")
        features = {
            "kv_lengths": "kv_lengths" in shapes,
            "segment_ids": "q_segment_ids" in shapes,
            "dynamic_query_offset": "query_offsets" in shapes,
            "quantized_kv": "key_scale" in shapes,
        }
        specs = {row.name: resolve_spec(metadata.partition_axis, row.dims, mode) for row in (*INDEX, *SELECTIONS_OF)}
        names = "index_query", "index_key", "index_weights"
        dtypes = [shapes[name].dtype.name for name in names]
        problem = IndexProblem(
            operation=self.name,
            config=config,
            q_heads=sizes["index_heads"],
            input_dtype=dtypes[0],
            key_dtype=dtypes[1],
            value_dtype=dtypes[2],
            runtime_dtype=dtypes[0],
            softmax_dtype="float32",
            mode=mode,
            mask=mask,
            features=mask.features() | {name for name, used in features.items() if used},
            softmax_scale=float(scale),
            logits_soft_cap=None,
            operands=tuple(
                OperandShape(INDEX[name], tuple(x.shape), x.dtype.name)
                for name, x in shapes.items()
                if name not in names
            ),
            mesh=axes_of(mesh),
            platform=platform,
            device_kind=kind,
            platform_source=source,
            notes=tuple(notes),
            batch=sizes["batch"],
            q_len=sizes["q_len"],
            kv_len=sizes["kv_len"],
            index_dim=sizes["index_dim"],
            top_k=selected_count(call.get("top_k"), getattr(config, "top_k", None)),
            query_offset=None if "query_offsets" in shapes else int(offset),
            specs=tuple(specs.items()),
        )
        return arrays, problem, mesh


class DsaIndexer(Indexer):
    """`indexer` by the name of DeepSeek's sparse attention."""

    name = "dsa_indexer"
    config = DsaIndexerConfig
    backend_operation = "indexer"


class GlmMoeDsaIndexer(Indexer):
    """`indexer` by the name that it has in GLM-5."""

    name = "glm_moe_dsa_indexer"
    config = GlmMoeDsaIndexerConfig
    backend_operation = "indexer"
