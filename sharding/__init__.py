"""Where tensors are placed: modes, layouts, the ten PartitionSpecs, fitting them to shapes and a mesh, placing arrays."""

from .auto import on_auto_axes, spec_of
from .fit import DroppedAxis, FittedRules, FittedSpec, TensorShape, axes_at, fit, fit_tensor, kv_repeat, refuse_unfit
from .mesh import (
    MeshAxis,
    axes_of,
    current_mesh,
    describe_mesh,
    devices_platform,
    mesh_from_dict,
    mesh_to_dict,
    parse_mesh,
    virtual_mesh,
)
from .modes import LAYOUTS, MODES, canonical_layout, canonical_mode
from .operands import ATTENTION, RESULTS, Operand, OperandShape, OperandTable
from .partition_axis import AnyPartitionAxis, PartitionAxis
from .place import only, pin, place
from .rules import AttnShardingRules, declared_axes, resolve_rules, resolve_spec, tensor_dims

__all__ = [
    "ATTENTION",
    "LAYOUTS",
    "MODES",
    "RESULTS",
    "AnyPartitionAxis",
    "AttnShardingRules",
    "DroppedAxis",
    "FittedRules",
    "FittedSpec",
    "MeshAxis",
    "Operand",
    "OperandShape",
    "OperandTable",
    "PartitionAxis",
    "TensorShape",
    "axes_at",
    "axes_of",
    "canonical_layout",
    "canonical_mode",
    "current_mesh",
    "declared_axes",
    "describe_mesh",
    "devices_platform",
    "fit",
    "fit_tensor",
    "kv_repeat",
    "mesh_from_dict",
    "mesh_to_dict",
    "on_auto_axes",
    "only",
    "parse_mesh",
    "pin",
    "place",
    "refuse_unfit",
    "resolve_rules",
    "resolve_spec",
    "spec_of",
    "tensor_dims",
    "virtual_mesh",
]
