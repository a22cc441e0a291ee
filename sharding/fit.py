"""Fit specs to shapes and a mesh: which axes are kept, which are dropped and why, and what each device then holds.

Pure: it needs only axis names and sizes, no devices. jax itself is inconsistent here: `with_sharding_constraint` on Auto
axes silently accepts an axis that doesn't divide, but `device_put`, `shard_map` and `reshard` raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import PartitionSpec

from ..errors import RefusedShardingError, ShardingError, nearest
from ..symbolic import is_symbolic
from .mesh import AnyMesh, MeshAxis, axes_of, describe_mesh
from .modes import canonical_layout, canonical_mode
from .rules import AttnShardingRules, tensor_dims

__all__ = [
    "DroppedAxis",
    "FittedRules",
    "FittedSpec",
    "TensorShape",
    "axes_at",
    "fit",
    "fit_tensor",
    "kv_repeat",
    "refuse_unfit",
]

# The axis names that every PartitionAxis uses by default. A mesh without one of them is normal. Any other name, and
# one of these that was declared, is expected: with strict its absence is an error.
_STANDARD = frozenset({"dp", "fsdp", "tp", "sp", "ep"})


class TensorShape(NamedTuple):
    """A tensor's shape and the bytes of one element."""

    shape: tuple[int, ...]
    itemsize: int = 4


@dataclass(frozen=True)
class DroppedAxis:
    """A mesh axis that a spec names but that can't be used for a dimension.

    `harmless` is True if dropping it changes nothing: a mesh axis of size 1, a standard axis (dp, fsdp, tp, sp, ep) that
    wasn't declared and that the mesh doesn't have, or a dimension of length 1, which is broadcast.
    """

    tensor: str
    dim: str
    index: int
    axis: str
    reason: str
    hint: str
    harmless: bool = False


@dataclass(frozen=True)
class FittedSpec:
    """A fitted spec, with the names of the dimensions, and the shape and bytes on each device."""

    tensor: str
    dims: tuple[str, ...]
    spec: PartitionSpec
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    local_bytes: int
    dropped: tuple[DroppedAxis, ...]

    def axes(self, index: int) -> tuple[str, ...]:
        """The mesh axes that split dimension `index`; () if it isn't split."""
        return axes_at(self.spec, index)


@dataclass(frozen=True)
class FittedRules:
    """The fitted specs by name, for the tensors of the call only, and how many times KV heads are repeated."""

    specs: tuple[FittedSpec, ...]
    kv_repeat: int = 1

    def __getitem__(self, tensor: str) -> FittedSpec:
        for fitted in self.specs:
            if fitted.tensor == tensor:
                return fitted
        raise KeyError(tensor)

    def get(self, tensor: str) -> FittedSpec | None:
        return next((f for f in self.specs if f.tensor == tensor), None)

    @property
    def dropped(self) -> tuple[DroppedAxis, ...]:
        return tuple(d for f in self.specs for d in f.dropped)


def fit(
    rules: AttnShardingRules,
    shapes: Mapping[str, TensorShape | tuple[int, ...]],
    mesh: AnyMesh | Mapping[str, int] | tuple[MeshAxis, ...] | None,
    *,
    mode: str = "__train__",
    layout: str = "bthd",
    strict: bool = False,
    kv_heads: str = "replicate",
    qkv_mni_sharding: bool = False,
    declared: Set[str] = frozenset(),
) -> FittedRules:
    """Fit each tensor of `shapes` (by its name in AttnShardingRules) to the mesh.

    Manual axes are left out of every spec: inside the caller's own shard_map the arrays are already local to them.
    If the KV head count doesn't divide, `kv_heads='replicate'` repeats the heads of K and V (the result has the factor), and
    'error' refuses. `declared`: mesh axes that are expected though their names are standard, as `declared_axes` returns. With
    `strict`, all drops that aren't harmless are raised as one ShardingError.
    Errors: ShardingError for a tensor that the rules don't have or that has another rank; InputError for an unknown mode
    or layout.
    """
    mode, layout = canonical_mode(mode), canonical_layout(layout)
    if kv_heads not in ("replicate", "error"):
        raise ShardingError(f"kv_heads={kv_heads!r}; wanted 'replicate' or 'error'.")
    axes = {a.name: a for a in axes_of(mesh)}
    where = _where(mode, layout, tuple(axes.values()))
    sized = {name: _sized(value) for name, value in shapes.items()}
    known = AttnShardingRules._fields
    for tensor in sized:
        if tensor not in known:
            raise ShardingError(f"no tensor is called {tensor!r}; wanted {', '.join(known)}." + nearest(tensor, known))
        if getattr(rules, tensor) is None:
            raise ShardingError(f"{tensor} has a shape, but the rules have no spec for it; resolve them with {tensor}.")

    standard = _STANDARD - declared
    repeat = _repeat_for(rules, sized, axes, layout, kv_heads, where)
    fitted = []
    for tensor in AttnShardingRules._fields:
        if tensor not in sized:
            continue
        spec = getattr(rules, tensor)
        shape, itemsize = sized[tensor]
        dims = tensor_dims(tensor, layout, qkv_mni_sharding=qkv_mni_sharding, aux_ndim=len(shape))
        if len(dims) != len(shape):
            raise ShardingError(f"{tensor} has shape {shape}; layout {layout} requires dimensions ({', '.join(dims)}).")
        if len(spec) > len(shape):
            raise ShardingError(f"{tensor} has shape {shape}; its spec {spec} is for {len(spec)} dimensions.")
        if tensor in ("key", "value") and repeat > 1:
            at = layout.index("h")
            shape = (*shape[:at], shape[at] * repeat, *shape[at + 1 :])
        fitted.append(_fit_one(tensor, spec, shape, itemsize, dims, axes, standard))
    result = FittedRules(tuple(fitted), repeat)
    if strict:
        refuse_unfit(result, mode, layout, tuple(axes.values()))
    return result


def refuse_unfit(
    fitted: FittedRules, mode: str, layout: str, mesh: tuple[MeshAxis, ...], repeated: Sequence[str] = ()
) -> None:
    """Raise one ShardingError for all that `strict` refuses: drops that aren't harmless, and the lines of `repeated` axes."""
    serious = [d for d in fitted.dropped if not d.harmless]
    counts = [f"{len(serious)} axes can't be used as declared"] * bool(serious)
    counts += [f"work is repeated over {len(repeated)} of the mesh's axes"] * bool(repeated)
    if not counts:
        return
    lines = [f"{d.tensor}, dimension {d.dim}, axis {d.axis!r}: {d.reason}. {d.hint}." for d in serious]
    text = "\n".join(f"  {line}" for line in (*lines, *repeated))
    raise RefusedShardingError(f"strict sharding ({_where(mode, layout, mesh)}): {', and '.join(counts)}:\n{text}")


def _where(mode: str, layout: str, mesh: tuple[MeshAxis, ...]) -> str:
    return f"mode={mode.strip('_')}, layout={layout}, mesh {describe_mesh(mesh)}"


def axes_at(spec: PartitionSpec, index: int) -> tuple[str, ...]:
    """The axes that a spec names for a dimension; () for none."""
    entry = spec[index] if index < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def kv_repeat(kv_heads: int, shards: int) -> int:
    """How many times each KV head must be repeated so that `shards` devices get whole heads."""
    return shards // math.gcd(kv_heads, shards)


def _sized(value: TensorShape | tuple[int, ...]) -> TensorShape:
    return value if isinstance(value, TensorShape) else TensorShape(tuple(value))


def _repeat_for(
    rules: AttnShardingRules,
    sized: Mapping[str, TensorShape],
    axes: Mapping[str, MeshAxis],
    layout: str,
    policy: str,
    where: str,
) -> int:
    """The repeat factor that lets KV heads follow the split of the query heads."""
    if "query" not in sized or "key" not in sized:
        return 1
    at = layout.index("h")
    query = _fit_one("query", rules.query, *sized["query"], tensor_dims("query", layout), axes)
    shards = math.prod(axes[name].size for name in query.axes(at))
    heads = sized["key"].shape[at]
    factor = kv_repeat(heads, shards)
    if factor > 1 and policy == "error":
        names = ",".join(query.axes(at))
        raise RefusedShardingError(
            f"key has {heads} kv heads and the query heads are split {shards} ways over {names!r} ({where}); wanted a "
            f"multiple of {shards}. Set kv_heads='replicate' (each head repeated {factor} times), or make {names!r} at "
            f"most {heads}."
        )
    return factor


def _fit_one(
    tensor: str,
    spec: PartitionSpec,
    shape: tuple[int, ...],
    itemsize: int,
    dims: tuple[str, ...],
    axes: Mapping[str, MeshAxis],
    standard: Set[str] = _STANDARD,
) -> FittedSpec:
    entries: list[str | tuple[str, ...] | None] = []
    dropped: list[DroppedAxis] = []
    used: set[str] = set()
    local = list(shape)
    for index, length in enumerate(shape):
        declared = axes_at(spec, index)
        fitted: list[str] = []
        for name in declared:
            why = _why_dropped(name, local[index], length, used, axes, standard)
            if why is None:
                used.add(name)
                fitted.append(name)
                local[index] //= axes[name].size
            else:
                dropped.append(DroppedAxis(tensor, dims[index] or str(index), index, name, *why))
        entries.append(None if not fitted else fitted[0] if len(fitted) == 1 else tuple(fitted))
    size = math.prod(local) * itemsize
    return FittedSpec(tensor, dims, PartitionSpec(*entries), shape, tuple(local), size, tuple(dropped))


def _why_dropped(
    name: str, left: int, length: int, used: set[str], axes: Mapping[str, MeshAxis], standard: Set[str]
) -> tuple[str, str, bool] | None:
    """(reason, hint, harmless), or None if the axis can be used."""
    axis = axes.get(name)
    if axis is None:
        known = ", ".join(axes) or "none"
        if name in standard or not axes:
            return f"the mesh has no axis {name!r} (it has {known}), so it splits nothing", "Nothing to do", True
        return (
            f"the mesh has no axis {name!r} (it has {known})",
            f"Add {name!r} to the mesh (size 1 is enough) or declare another partition_axis",
            False,
        )
    if axis.kind == "manual":
        return f"{name!r} is a Manual axis here, arrays are already local to it", "Nothing to do", True
    if axis.size == 1:
        return f"{name!r} has size 1", "Nothing to do", True
    if name in used:
        return f"{name!r} already splits another dimension of this tensor", "Use each mesh axis once per tensor", False
    if is_symbolic(left):
        return f"the symbolic {length} isn't split", "Give a number", False
    if left % axis.size:
        multiple = axis.size * (length // left if left else 1)
        over = f"{length}" if left == length else f"{length} (each shard {left})"
        return (
            f"{over} is not divisible by {name}={axis.size}",
            f"Make it a multiple of {multiple}, make {name!r} smaller, or declare it unsplit",
            length == 1,
        )
    return None


def fit_tensor(
    tensor: str,
    spec: PartitionSpec,
    shape: TensorShape | tuple[int, ...],
    dims: tuple[str, ...],
    mesh: AnyMesh | Mapping[str, int] | tuple[MeshAxis, ...] | None,
) -> FittedSpec:
    """Fit the spec of a tensor that is not in the rules. `dims`: the names of its dimensions."""
    sized = _sized(shape)
    return _fit_one(tensor, spec, sized.shape, sized.itemsize, dims, {axis.name: axis for axis in axes_of(mesh)})
