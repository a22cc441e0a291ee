"""The specs of operands and results inside an operation, in the kernel's layout, by their rows of the table."""

from __future__ import annotations

from jax.sharding import PartitionSpec

from ..sharding import RESULTS, Operand
from .problem import AttentionProblem

__all__ = ["run_specs", "split_specs"]


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def run_specs(
    problem: AttentionProblem, batch: tuple[str, ...], q: tuple[str, ...], heads: tuple[str, ...], kv: tuple[str, ...]
) -> tuple[tuple[str, PartitionSpec], ...]:
    """The spec of each operand and result, by the mesh axes that split a device's work."""
    split = {"batch": _entry(batch), "heads": _entry(heads), "q": _entry(q), "kv": _entry(kv)}
    split |= {"kv_heads": split["heads"], "q_len": split["q"], "kv_len": split["kv"]}

    def inside(operand: Operand) -> PartitionSpec:
        return PartitionSpec(*map(split.get, operand.dims_inside(problem.kernel_layout)))

    def broadcastable(shape: tuple[int, ...], dims: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(None if n == 1 else split.get(d) for n, d in zip(shape, dims, strict=True)))

    specs = {row.name: inside(row) for row in problem.required}
    specs |= {name: inside(row) for name, row in RESULTS.items()}
    specs |= {"query_offset": PartitionSpec(split["batch"]), "dropout_seed": PartitionSpec()}
    for x in problem.operands:
        if x.operand.inside is not None:
            specs[x.name] = inside(x.operand)
        else:
            shape = x.shape_inside(problem.kernel_layout, problem.sizes)
            specs[x.name] = broadcastable(shape, x.operand.dims_inside(problem.kernel_layout))
    for index, leaf in enumerate(problem.leaves):
        specs[f"leaf{index}"] = broadcastable(leaf.shape, leaf.dims)
    return tuple(specs.items())


def split_specs(
    problem: AttentionProblem, batch: tuple[str, ...], sequence: tuple[str, ...], heads: tuple[str, ...]
) -> tuple[tuple[str, PartitionSpec], ...]:
    """The specs of tensors that stay split along the sequence; they replace the earlier ones."""
    split = {"batch": _entry(batch), **dict.fromkeys(("heads", "kv_heads"), _entry(heads))}
    split |= dict.fromkeys(("q_len", "kv_len"), _entry(sequence))
    rows = (*problem.required, *(x.operand for x in problem.operands), *RESULTS.values())
    return tuple(
        (row.name, PartitionSpec(*map(split.get, row.dims_inside(problem.kernel_layout)))) for row in rows if row.moves
    )
