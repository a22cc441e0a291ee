"""A planned call, and the call with its gradients, as programs to compile: arrays are laid out on the mesh as planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..operators import Operation
from ..operators.latent import LATENT, LatentAttention
from ..planning import Plan
from ..sharding import OperandTable
from .with_gradient import is_differentiable, operands_of, outputs

__all__ = ["call_program"]


def call_program(
    operation: Operation | LatentAttention,
    arguments: Mapping[str, Any],
    plan: Plan,
    backward: bool,
    spec_of: Callable[[str, tuple[int, ...]], PartitionSpec] | None = None,
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """(the jitted call, with or without its gradients; its arrays, laid out as planned). spec_of: the spec of an array by its
    name and shape, if it isn't one of the plan's.

    For the backward pass the arrays include the outputs' gradients, and each gradient is returned where its array lies. So all
    communication is for attention, not for a loss.
    """
    attends = operation.attention.operation if isinstance(operation, LatentAttention) else operation
    mesh, spec = attends.metadata.mesh, spec_of or plan.placement.call_spec

    def laid_out(name: str, x: Any) -> jax.ShapeDtypeStruct:
        return _on(mesh, x, spec(name, x.shape))

    def holds_arrays(x: Any) -> bool:
        leaves = jax.tree.leaves(x)  # a mask may hold arrays; a static one has no leaves
        return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)

    arrays = {
        name: jax.tree.map(lambda leaf, name=name: laid_out(name, leaf), x)
        for name, x in arguments.items()
        if holds_arrays(x)
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}

    def forward(arguments: dict[str, Any]) -> Any:
        return outputs(operation, arguments | static)

    if not backward:
        return jax.jit(forward), arrays
    output_shapes = jax.eval_shape(forward, arrays)
    names = ["output", *["weights"] * ("return_weights" in plan.problem.features), *["lse"] * (len(output_shapes) > 1)]
    packed = plan.problem.layout == "thd"
    specs = [plan.placement.spec(name) for name in names[: len(output_shapes)]]
    specs = [PartitionSpec(*spec[1:]) if packed else spec for spec in specs]
    cotangents = tuple(_on(mesh, x, spec) for x, spec in zip(output_shapes, specs, strict=True))
    table = OperandTable(*operands_of(attends, arguments), *LATENT)
    smooth = {name: x for name, x in arrays.items() if is_differentiable(name, x, table)}

    def both(arguments: dict[str, Any]) -> Any:
        d_outputs = arguments.pop("d_outputs")
        others = {name: x for name, x in arguments.items() if name not in smooth}
        primals, back = jax.vjp(lambda x: forward(x | others), {name: arguments[name] for name in smooth})
        return primals, back(d_outputs)[0]

    where = None
    if isinstance(mesh, Mesh):
        where = tuple(x.sharding for x in cotangents), {name: x.sharding for name, x in smooth.items()}
    return jax.jit(both, out_shardings=where), arrays | {"d_outputs": cotangents}


def _on(mesh: Any, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
