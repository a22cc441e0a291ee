"""What `attnops verify` checks: the declared call or step on one target, as a report that grows with every pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from ..verify.call import TargetReport, call_reports
from ..verify.paged_step import StepReport, step_reports
from .call_arrays import call_shapes
from .run_step import one_layer
from .step import is_paged, refuse_inputs, step_of
from .target import HERE, here, run_metadata, target_mesh

__all__ = ["AnyReport", "VerifyOptions", "target_metadata", "verified"]

AnyReport = TargetReport | StepReport


class VerifyOptions(NamedTuple):
    """The options of `attnops verify`. timeout: seconds that compiling a pass may take."""

    declaration: Declaration
    targets: tuple[str, ...]
    inputs: Path | None
    mesh: str | None
    mode: str | None
    fallback: str | None
    lowered: bool = False
    timeout: float | None = None


def verified(options: VerifyOptions, target: str) -> Iterator[AnyReport]:
    """The report of one target as it grows: planned, and then with one more pass each time."""
    declaration = options.declaration
    paged = is_paged(declaration)
    if paged:
        refuse_inputs(options.inputs)
    metadata = target_metadata(declaration, options, target)
    name = _devices_here(metadata) if target == HERE else target
    if paged:
        step = step_of(one_layer(declaration, metadata)[0], metadata, options.mode)
        yield from step_reports(*step, name, lower_only=options.lowered)
        return
    kind: Any = OperationRegistry.get(declaration.operation)
    arguments = declaration.call_arguments(call_shapes(declaration, options.inputs).arrays, mode=options.mode)
    yield from call_reports(kind(metadata), arguments, name, lower_only=options.lowered)


def target_metadata(declaration: Declaration, options: VerifyOptions, target: str) -> OperationMetadata:
    """The metadata on a target's mesh, whose devices are described or, for HERE, this machine's."""
    policy = {} if options.fallback is None else {"fallback": options.fallback}
    if target == HERE:
        return run_metadata(declaration, mesh=options.mesh).replace(**policy)
    mesh = target_mesh(target, options.mesh, declaration)
    return declaration.operation_metadata({"platform": None, "backend": None, "mesh": mesh, **policy})


def _devices_here(metadata: OperationMetadata) -> str:
    platform, _ = here()
    count = 1 if metadata.mesh is None else metadata.mesh.size
    return f"{count} {platform} device{'s' if count > 1 else ''}"
