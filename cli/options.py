"""The options of the command, one line each: what they are called, what they take, their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .version import version_text

_MODEL = "With --model"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version_text())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the versions, and exit.", is_eager=True, callback=_print_version),
]
Config = Annotated[Path, typer.Argument(help="Declaration file (JSON), or - for standard input.", show_default=False)]
ConfigOrModel = Annotated[
    Path | None,
    typer.Argument(help="Declaration file (JSON), - for standard input, or none with --model.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="The whole plan, in place of one screen.")]
OneOperation = Annotated[str | None, typer.Argument(help="One operation's config.", show_default=False)]
Inputs = Annotated[Path | None, typer.Option("--inputs", help="Arrays, .npz or .safetensors.", show_default=False)]
Mesh = Annotated[str | None, typer.Option("--mesh", help="Mesh axes, such as fsdp=2,tp=2,sp=2.", show_default=False)]
Mode = Annotated[
    str | None, typer.Option("--mode", help="train, prefill, autoregressive or insert.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
Platform = Annotated[
    str | None,
    typer.Option("--platform", help="Plan for tpu, cuda, rocm, gpu, cpu, or for v5e, h100.", show_default=False),
]
Topology = Annotated[
    str | None, typer.Option("--topology", help="Plan for a TPU topology or GPUs: v5e:2x2, h100:8.", show_default=False)
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse specs that don't fit, and axes that split no work.")]
Fallback = Annotated[str | None, typer.Option("--fallback", help="warn, error or allow.", show_default=False)]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model", help="A model's config.json, in the place of CONFIG.", rich_help_panel=_MODEL, show_default=False
    ),
]
Operation = Annotated[
    str | None,
    typer.Option("--operation", help="That runs. By default splash.", rich_help_panel=_MODEL, show_default=False),
]
Family = Annotated[
    str | None, typer.Option("--family", help="Read it as this model_type.", rich_help_panel=_MODEL, show_default=False)
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part", help="Of an encoder-decoder: encoder, decoder or cross.", rich_help_panel=_MODEL, show_default=False
    ),
]
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", help="A key to pass over.", rich_help_panel=_MODEL, show_default=False)
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="In the place of the config's.", rich_help_panel=_MODEL, show_default=False),
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Of the call.", min=1, rich_help_panel=_MODEL, show_default=False)
]
QLen = Annotated[
    int | None, typer.Option("--q-len", help="Queries.", min=1, rich_help_panel=_MODEL, show_default=False)
]
KvLen = Annotated[int | None, typer.Option("--kv-len", help="Keys.", min=1, rich_help_panel=_MODEL, show_default=False)]
Layer = Annotated[
    int | None, typer.Option("--layer", help="One layer, in full.", min=0, rich_help_panel=_MODEL, show_default=False)
]
Write = Annotated[
    Path | None, typer.Option("--write", help="Write declarations here.", rich_help_panel=_MODEL, show_default=False)
]
VerifyTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="A TPU topology or GPUs, such as v5e:2x2, h100:8; may be repeated. Left out: this machine's, virtual ones on CPU.",
        show_default=False,
    ),
]
TuneTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="A TPU topology, such as v5e:2x2; may be repeated. Left out: this machine's device.",
        show_default=False,
    ),
]
How = Annotated[str | None, typer.Option("--how", help="static (the compiler's cycles) or device.", show_default=False)]
Most = Annotated[int, typer.Option("--most", help="Candidates of each pass.", min=1)]
Cache = Annotated[Path | None, typer.Option("--cache", help="The folder of kept choices.", show_default=False)]
Output = Annotated[
    Path | None, typer.Option("--output", help="Write the results, .npz or .safetensors.", show_default=False)
]
Seed = Annotated[int, typer.Option("--seed", help="Of drawn inputs and of dropout.", min=0, max=2**64 - 1)]
Check = Annotated[bool, typer.Option("--check", help="Compare with float64, and with `expected`.")]
Repeats = Annotated[int, typer.Option("--repeats", help="Timed runs; the median is shown.", min=1)]
Explain = Annotated[bool, typer.Option("--explain", help="Print the whole plan.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors.")]
ExampleName = Annotated[str | None, typer.Argument(help="Its name.", show_default=False)]
To = Annotated[Path, typer.Option("--to", help="The folder that its files go into.")]
ReportTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="Compile for a TPU topology or GPUs, such as v5e:2x2, h100:8, or for here; may be repeated.",
        show_default=False,
    ),
]
Run = Annotated[bool, typer.Option("--run", help="Run it on this machine's devices, and check it.")]
Page = Annotated[Path, typer.Option("--output", help="The page.")]
