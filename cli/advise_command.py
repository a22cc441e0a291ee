"""The options of `attnops advise`; what they do is imported when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import RefusedError
from . import options as o

__all__ = ["advise"]

Target = Annotated[str, typer.Option("--target", help="A TPU topology, GPUs or CPUs: v5p:4x4x4, h100:8, cpu:8.")]
Batch = Annotated[
    list[int] | None,
    typer.Option("--batch", min=1, help="Instead of the declared one; may be repeated.", show_default=False),
]
Devices = Annotated[
    str | None, typer.Option("--devices", help="How many: 8, or 8..64. By default all.", show_default=False)
]
Held = Annotated[
    str | None,
    typer.Option("--mesh", help="Axes of fsdp, cp, sp, tp whose sizes are held: tp=8.", show_default=False),
]
Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--operation", help="Instead of the declared one and its rivals; may be repeated.", show_default=False
    ),
]
Compile = Annotated[int, typer.Option("--compile", min=0, help="How many of the best are compiled.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Of the table.")]
WriteTo = Annotated[Path | None, typer.Option("--write", help="Write the best as a declaration.", show_default=False)]


def advise(
    config: o.Config,
    target: Target,
    batch: Batch = None,
    devices: Devices = None,
    mesh: Held = None,
    operation: Operations = None,
    mode: o.Mode = None,
    compiled: Compile = 3,
    rows: Rows = 12,
    write: WriteTo = None,
    as_json: o.Json = False,
) -> None:
    """Search what to declare for a target: meshes, strategies, operations and blocks, estimated; the best are compiled."""
    from .advise import AdviseOptions, print_advice, run_advise
    from .json_output import print_json

    options = AdviseOptions(
        config, target, tuple(batch or ()), devices, mesh, tuple(operation or ()), mode, compiled, rows, write
    )
    found, notes = run_advise(options)
    if as_json:
        print_json(found.to_dict() | {"notes": [*found.notes, *notes]})
    else:
        print_advice(found, options, notes)
    if not found.entries:
        raise RefusedError(found.refusal())
