"""Notes on arguments without effect, and on what was decided for the caller."""

from __future__ import annotations

from typing import Any

from ...masks import Mask
from ...planning.notes import note
from ...planning.quantised import QUANTISED
from ...registry import OperationMetadata
from ...sharding import AttnShardingRules, axes_at, axes_of, canonical_layout, describe_mesh
from ...sharding.mesh import AnyMesh
from ..call.arrays import Arrays
from ..call.options import Options

__all__ = ["argument_notes"]


def argument_notes(
    metadata: OperationMetadata, options: Options, arrays: Arrays, shapes: Arrays, mask: Mask, offset: int | None,
    dynamic: bool, probability: float, platform: str, source: str,
    mesh: AnyMesh | None, by_caller: tuple[tuple[str, ...], ...], rules: AttnShardingRules,
) -> list[str]:  # fmt: skip
    """Notes on arguments without effect, and on what was decided for the caller: reported, not silently dropped."""
    notes: list[str] = []

    def add(code: str, **values: Any) -> None:
        notes.append(note(code, **values))

    if platform == "gpu":
        add("platform.unknown_gpu_vendor")
    if metadata.backend not in (None, platform, "gpu" if platform in ("cuda", "rocm") else None):
        add("platform.backend_unused", backend=metadata.backend, source=source, platform=platform)
    if metadata.runtime_dtype is not None and shapes.query.dtype != metadata.runtime_dtype:
        cast = [n for n in ("query", "key", "value") if getattr(shapes, n).dtype.name not in QUANTISED]
        add("dtype.cast", names=cast, given=shapes.query.dtype.name, runtime=metadata.runtime_dtype.name)
    for name in ("key", "value"):
        dtype = getattr(shapes, name).dtype.name
        if dtype in QUANTISED and getattr(shapes, f"{name}_scale") is None:
            add("dtype.unscaled", name=name, dtype=dtype)
    declared = metadata.declared_mesh
    if declared is not None and mesh is not declared and axes_of(declared) != axes_of(mesh):
        add("mesh.context", context=describe_mesh(mesh), declared=describe_mesh(declared))
    counted = {a for axes in by_caller for a in axes}
    manual = [a.name for a in axes_of(mesh) if a.kind == "manual" and a.size > 1 and a.name not in counted]
    of_keys = set(axes_at(rules.key, canonical_layout(options.layout).index("t"))) & set(manual)
    if of_keys and metadata.policy.sequence_parallel == "auto":
        add("mesh.manual_keys", axes=sorted(of_keys))
    if manual and probability > 0 and not options.deterministic:
        add("mesh.manual_dropout", axes=manual)
    if options.deterministic and probability > 0:
        add("dropout.off", probability=probability)
    elif not options.deterministic and probability == 0:
        add("dropout.zero")
    if arrays.dropout_rng is not None and (options.deterministic or probability == 0):
        add("dropout.key_unused", why="deterministic=True" if options.deterministic else "dropout_prob is 0")
    structured = options.mask is not None and not options.mask_is_array
    if structured and options.causal is None and metadata.causal and "causal" not in mask.features():
        add("mask.default_causal")
    if options.causal is False and structured and "causal" in mask.features():
        add("mask.causal_false")
    has_offset = options.query_offset is not None or arrays.query_offset is not None
    if has_offset and offset is None and not dynamic:
        add("mask.offset_unused")
    if options.mode is None:
        add("mode.derived")
    if not has_offset and offset not in (None, 0):
        add("mask.offset_at_end", offset=offset)
    if not has_offset and dynamic:
        add("mask.offset_of_cache")
    return notes
