"""RecurrentOperation: a call described, planned, placed and run by the operation's table of operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ...errors import InputError, InputTypeError, nearest, shown
from ...planning import plan
from ...planning.notes import note
from ...planning.recurrent.inside import KEY_HEADS, inside_axes, repeats_keys
from ...planning.recurrent.planner import RECURRENCES
from ...planning.tables.table_plan import TablePlan
from ...planning.tables.table_problem import TableProblem
from ...sharding import Operand, OperandShape, OperandTable, axes_of, pin
from ...sharding.mesh import AnyMesh
from ...sharding.modes import canonical_layout, canonical_mode
from ...sharding.rules import resolve_spec
from ..api.declared_config import declared_config
from ..call.arrays import shaped
from ..call.declared import DeclaredOperation
from ..call.planned_platform import planned_platform
from ..call.program import Program, attention
from ..call.table_sizes import call_sizes
from ..notes.unread_fields import unread_fields
from .arithmetic import Results
from .checks import check_sizes, check_values, option_value
from .documents import documents, moved
from .local import RecurrentCall
from .output import RecurrentOutput

__all__ = ["RecurrentOperation", "alone"]

# Fields of the metadata that no recurrence reads, besides those of attention's dtypes and dropout.
_UNREAD = ("softmax_scale", "causal", "kv_heads", "scan_ring_attention")


class RecurrentOperation(DeclaredOperation):
    """Base class of operations with a state. `Operation(metadata)(...)` runs one."""

    family = "recurrence"
    planner = RECURRENCES
    convention = "attnops:recurrence"
    results: ClassVar[tuple[Operand, ...]]
    # The static arguments of a call besides mode and layout, and their types. The config has fields of the same names.
    options: ClassVar[Mapping[str, type]] = {}
    # What each option of type str may be.
    values: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Dims of the table that say nothing about a call.
    unsized: ClassVar[tuple[str, ...]] = ()
    # The other static arguments of a call.
    static: ClassVar[tuple[str, ...]] = ("mode", "layout")

    @classmethod
    def map_numbers(cls, size: Mapping[str, int]) -> tuple[int, int]:
        """(numbers of what multiplies a state, numbers of what is added) in the map of a device's tokens; (0, 0) if the operation
        has no such map. size: of its own state."""
        raise NotImplementedError

    @classmethod
    def token_flops(cls, size: Mapping[str, int], chunk: int) -> float:
        """Operations per token of a forward pass on one device. size: of each dim, there."""
        raise NotImplementedError

    @classmethod
    def chunk_of(cls, config: Any) -> int:
        """Tokens of a chunk, by a resolved config; 1 without chunks."""
        return config.chunk_size or 1

    @classmethod
    def flops(cls, plan: TablePlan) -> float:
        """Operations of a forward pass on one device, counted from the chunks; twice if states are passed along the sequence."""
        size: dict[str, int] = {}
        for x in plan.tensors:
            size = dict(zip(x.dims, x.local_shape, strict=True)) | size
        split = plan.placement.strategy == "state"
        tokens = size["q_len"] if split or not plan.placement.over else plan.problem.size["q_len"]
        per_token = cls.token_flops(size, cls.chunk_of(plan.config))
        return (2 if split else 1) * size.get("batch", 1) * tokens * per_token

    @classmethod
    def packed(cls, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call from its arrays by name."""
        return dict(arrays)

    @classmethod
    def flat(cls, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call with its arrays by name: the reverse of `packed`."""
        return dict(keywords)

    # -- calling -----------------------------------------------------------------------------------------------------

    def _run(self, given: Mapping[str, Any], call: Mapping[str, Any]) -> RecurrentOutput:
        arrays, problem, mesh = self._described(given, call)
        decided: TablePlan = self._ready(plan(type(self), problem, self.metadata.policy), tuple(arrays.values()), mesh)
        results = attention(Program(self, decided, mesh, None), {name: jnp.asarray(x) for name, x in arrays.items()})
        return RecurrentOutput(results["attention_outputs"], results["state"], plan=decided)

    def _plan(self, given: Mapping[str, Any], call: Mapping[str, Any]) -> TablePlan:
        _, problem, _ = self._described(given, call)
        decided: TablePlan = plan(type(self), problem, self.metadata.policy)
        return decided

    # -- the description of a call -----------------------------------------------------------------------------------

    @classmethod
    def _table(cls) -> OperandTable:
        """Every array of a call."""
        return cls.operands

    def _form(self, call: Mapping[str, Any]) -> tuple[str, str, str]:
        """(the layout, the mode, that whose rules split the arrays). Errors: InputError."""
        mode = canonical_mode(call.get("mode") or "train")
        return canonical_layout(call.get("layout") or "bthd"), mode, mode

    @classmethod
    def _splits_rows(cls, arrays: Mapping[str, Any]) -> bool:
        """Whether a mesh may split the rows of a call."""
        return True

    def _described(
        self, given: Mapping[str, Any], call: Mapping[str, Any]
    ) -> tuple[dict[str, Any], TableProblem, AnyMesh | None]:
        """(the arrays by name, the problem, the mesh). Errors: those of a call."""
        table, metadata = self._table(), self.metadata
        optional = [row.name for row in table if row.optional]
        known = [*optional, *self.options, *self.static]
        for name in call:
            if name not in known:
                raise InputTypeError(f"unknown argument {shown(name)} of {self.name}." + nearest(name, known))
        layout, mode, of_specs = self._form(call)
        arrays = {row.name: x for row in table if (x := {**given, **call}.get(row.name)) is not None}
        if (decay := self._default_decay(arrays, layout)) is not None:
            arrays["decay"] = decay
        if missing := [row.name for row in table.required if row.name not in arrays]:
            raise InputTypeError(f"{self.name} has no {', '.join(missing)}; pass arrays.")
        shapes = {name: shaped(name, x) for name, x in arrays.items()}
        sizes = call_sizes(table, shapes, layout)
        check_sizes(sizes, shapes)
        mesh = self._mesh()
        platform, kind, source = planned_platform(metadata, mesh, tuple(arrays.values()))
        config, notes = declared_config(type(self), metadata, platform)
        if unread := unread_fields(metadata, _UNREAD):
            notes.append(note("table.unread", fields=unread, operation=self.name))
        self._check(arrays, sizes, config)
        axes, over_rows = metadata.partition_axis, self._splits_rows(arrays)

        def shape(row: Operand, shape: tuple[int, ...], dtype: str) -> OperandShape:
            dims = row.split_dims(layout)[-len(shape) :] if shape else ()
            split = [dim if over_rows or dim != "batch" else "" for dim in dims]
            return OperandShape(row, shape, dtype, resolve_spec(axes, split, of_specs))

        first = shapes[table.names[0]].dtype.name
        # What a step writes in place it returns in the dtype in which it came.
        dtypes = {"attention_outputs": first, "state": getattr(config, "state_dtype", None) or first}
        dtypes |= {name: x.dtype.name for name, x in shapes.items()}
        results = tuple(
            shape(row, row.shape(sizes, layout), dtypes[row.name]) for row in self.results if row.name in dtypes
        )
        problem = TableProblem(
            operation=self.name,
            config=config,
            input_dtype=first,
            mode=mode,
            features=frozenset(),
            operands=tuple(shape(table[name], tuple(x.shape), x.dtype.name) for name, x in shapes.items()),
            mesh=axes_of(mesh),
            platform=platform,
            device_kind=kind,
            platform_source=source,
            notes=tuple(notes),
            results=results,
            sizes=tuple((dim, size) for dim, size in sizes.items() if dim not in self.unsized),
            options=self._options(call, config),
            layout=layout,
        )
        return arrays, problem, mesh

    def _options(self, call: Mapping[str, Any], config: Any) -> tuple[tuple[str, Any], ...]:
        """The static arguments that the problem has. Errors: InputError and InputTypeError."""
        given = {name: x if (x := call.get(name)) is not None else getattr(config, name, None) for name in self.options}
        return tuple((n, option_value(n, x, self.options[n], self.values.get(n, ()))) for n, x in given.items())

    @classmethod
    def _default_decay(cls, arrays: Mapping[str, Any], layout: str) -> np.ndarray | None:
        """The log decay of each head [heads] of a call without a decay; None if the operation has no such."""
        return None

    def _check(self, arrays: Mapping[str, Any], sizes: Mapping[str, int], config: Any) -> None:
        """Refuse what a call of this operation can't mean. Errors: InputError."""
        gate, beta = getattr(config, "gate", "log_decay"), getattr(config, "beta_form", "value")
        if gate == "raw" and not {"decay", "A_log"} <= arrays.keys():
            raise InputError(f"gate='raw' of {self.name} needs decay, what the model projects, and A_log.")
        if gate != "raw" and (
            unread := [name for name in ("A_log", "dt_bias") if name in arrays and "dt" not in arrays]
        ):
            raise InputError(f"{', '.join(unread)}: read for gate='raw' only; declare that, or leave it out.")
        if "beta" in self.operands and beta == "sigmoid" and "beta" not in arrays:
            raise InputError(f"beta_form='sigmoid' of {self.name} needs beta, what the model projects.")
        steps = not getattr(config, "dt_softplus", False) and getattr(config, "dt_min", None) is None
        check_values(arrays, sizes, gate, beta, getattr(config, "beta_max", 1.0), steps=steps)

    # -- running -----------------------------------------------------------------------------------------------------

    def run_program(self, program: Program, arrays: dict[str, jax.Array]) -> Results:
        """Run a planned call; traceable."""
        decided: Any = program.plan
        problem, mesh = decided.problem, program.mesh
        arrays = {name: self._standard(name, x, problem.layout) for name, x in arrays.items()}
        if alone(mesh):
            return self._returned(self._local(decided, arrays), problem)
        return self._by_device(program, arrays)

    def _by_device(self, program: Program, arrays: dict[str, jax.Array]) -> Results:
        """Each device's part."""
        decided: Any = program.plan
        problem, mesh, placement = decided.problem, program.mesh, decided.placement
        if repeats_keys(placement):
            group = problem.size["heads"] // problem.size["kv_heads"]
            for name in KEY_HEADS:
                if name in arrays:
                    at = self._dims(name, arrays[name].ndim).index("kv_heads")
                    arrays[name] = jnp.repeat(arrays[name], group, axis=at)
        split = inside_axes(placement)

        def spec(dims: tuple[str, ...]) -> PartitionSpec:
            return PartitionSpec(*(split.get(dim) or None for dim in dims))

        in_specs = {name: spec(self._dims(name, x.ndim)) for name, x in arrays.items()}
        placed = {name: pin(x, in_specs[name], mesh) for name, x in arrays.items()}
        out_specs = {x.name: spec(x.operand.dims_in("bthd")) for x in problem.results}
        results = jax.shard_map(
            lambda arrays: self._local(decided, arrays),
            mesh=mesh,
            in_specs=(in_specs,),
            out_specs=out_specs,
            axis_names={axis.name for axis in axes_of(mesh) if axis.kind != "manual"},
            check_vma=False,
        )(placed)
        fitted = {x.tensor: x for x in placement.tensors}
        returned = self._returned(results, problem)
        return {name: pin(x, fitted[name].spec, mesh) for name, x in returned.items()}

    def _local(self, decided: Any, arrays: dict[str, jax.Array]) -> Results:
        placement = decided.placement
        over = placement.over if placement.strategy == "state" else ()
        batch, tokens = arrays[self.operands.names[0]].shape[:2]
        arrays = arrays | documents(arrays, over, batch, tokens)
        document, valid = arrays.get("document"), arrays.get("valid")
        if valid is not None:
            arrays = {name: self._zeroed(name, x, valid) for name, x in arrays.items()}
        relative = None if document is None else document - arrays["previous"][:, :1]
        call = RecurrentCall(arrays, relative, valid, decided.problem, decided.config, over, placement.exchange)
        results: Results = self.forward(decided.method, decided.problem.config)(call)
        return results

    def _zeroed(self, name: str, x: jax.Array, valid: jax.Array) -> jax.Array:
        """An array with 0 for tokens that don't count, as these may hold anything, also NaN, of which 0 times is NaN."""
        if (
            name not in self.operands
            or self.operands[name].dtype == "integers"
            or "q_len" not in self._dims(name, x.ndim)
        ):
            return x
        return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)

    def _dims(self, name: str, ndim: int) -> tuple[str, ...]:
        """The dims of an array in the layout of implementations."""
        row = self._table()[name]
        return next(dims for dims in (row.dims_in("bthd"), *row.also) if len(dims) == ndim)

    def _standard(self, name: str, x: jax.Array, layout: str) -> jax.Array:
        """An array in layout bthd, with a batch of 1 for thd."""
        row = self.operands[name]
        if not row.order or x.ndim != len(row.dims_in(layout)):
            return x
        return moved(x, row.dims_in(layout), row.dims_in("bthd"))

    def _returned(self, results: Results, problem: TableProblem) -> Results:
        """The results in the caller's layout and dtypes."""
        returned = {}
        for x in problem.results:
            inside, outside = x.operand.dims_in("bthd"), x.operand.dims_in(problem.layout)
            returned[x.name] = moved(results[x.name], inside, outside).astype(x.dtype)
        return returned


def alone(mesh: AnyMesh | None) -> bool:
    """Whether a device has all of a call."""
    return mesh is None or mesh.size == 1 or all(axis.kind == "manual" for axis in axes_of(mesh))
