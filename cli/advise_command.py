"""The options of `attnops advise`. The implementation is imported only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import RefusedError
from . import options as o

__all__ = ["advise"]

Target = Annotated[str, typer.Option("--target", help="TPU topology, GPUs or CPUs: v5p:4x4x4, h100:8, cpu:8.")]
Batch = Annotated[
    list[int] | None, o.optional("--batch", "Batch size, instead of the declared one; repeatable.", min=1)
]
Devices = Annotated[str | None, o.optional("--devices", "Number of devices: 8, or 8..64. Default: all.")]
FixedAxes = Annotated[str | None, o.optional("--mesh", "Fixed sizes of mesh axes fsdp, cp, sp, tp: tp=8.")]
Operations = Annotated[
    list[str] | None,
    o.optional("--operation", "Operation to try, instead of the declared one and its alternatives; repeatable."),
]
Compile = Annotated[int, typer.Option("--compile", min=0, help="Number of best candidates to compile.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Rows of the table.")]
WriteTo = Annotated[Path | None, o.optional("--write", "Write the best declaration to this file.")]


def advise(
    config: o.Config,
    target: Target,
    batch: Batch = None,
    devices: Devices = None,
    mesh: FixedAxes = None,
    operation: Operations = None,
    mode: o.Mode = None,
    compiled: Compile = 3,
    rows: Rows = 12,
    write: WriteTo = None,
    as_json: o.Json = False,
) -> None:
    """Find the best declaration for a target: estimate meshes, strategies, operations and blocks, and compile the best."""
    from .advise import AdviseOptions, print_advice, run_advise
    from .json_output import print_json

    options = AdviseOptions(
        config, target, tuple(batch or ()), devices, mesh, tuple(operation or ()), mode, compiled, rows, write
    )
    advice, notes = run_advise(options)
    if as_json:
        print_json(advice.to_dict() | {"notes": [*advice.notes, *notes]})
    else:
        print_advice(advice, options, notes)
    if not advice.entries:
        raise RefusedError(advice.refusal())
