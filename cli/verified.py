"""What `attnops verify` checks: the declared call or step on one target, as a report that grows with every pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..verify.passes import target_reports
from ..verify.report import TargetReport
from .declared import declared
from .target import HERE, here, run_metadata, target_mesh

__all__ = ["VerifyOptions", "target_metadata", "verified"]


class VerifyOptions(NamedTuple):
    """The options of `attnops verify`. timeout: seconds that compiling a pass may take. cycles: whether kernels' schedules are
    read."""

    declaration: Declaration
    targets: tuple[str, ...]
    inputs: Path | None
    mesh: str | None
    mode: str | None
    fallback: str | None
    lowered: bool = False
    timeout: float | None = None
    cycles: bool = False


def verified(options: VerifyOptions, target: str) -> Iterator[TargetReport]:
    """The report of one target as it grows: planned, and then with one more pass each time."""
    work = declared(options.declaration, options.inputs, options.mode)
    metadata = target_metadata(options.declaration, target, options.mesh, options.fallback)
    name = _devices_here(metadata) if target == HERE else target
    yield from target_reports(work.planned(metadata), name, lower_only=options.lowered, cycles=options.cycles)


def target_metadata(
    declaration: Declaration, target: str, mesh: str | None, fallback: str | None = None
) -> OperationMetadata:
    """The metadata on a target's mesh, whose devices are described or, for HERE, this machine's."""
    policy = {} if fallback is None else {"fallback": fallback}
    if target == HERE:
        return run_metadata(declaration, mesh=mesh).replace(**policy)
    devices = target_mesh(target, mesh, declaration)
    return declaration.operation_metadata({"platform": None, "backend": None, "mesh": devices, **policy})


def _devices_here(metadata: OperationMetadata) -> str:
    platform, _ = here()
    count = 1 if metadata.mesh is None else metadata.mesh.size
    return f"{count} {platform} device{'s' if count > 1 else ''}"
