"""The options of the command: name, type and help text of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .version import version_text

_MODEL = "With --model"


def _print_version(value: bool) -> None:
    if value:
        print(version_text())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the versions and exit.", is_eager=True, callback=_print_version),
]
Config = Annotated[Path, typer.Argument(help="Declaration file (JSON), or - for standard input.", show_default=False)]
ConfigOrModel = Annotated[
    Path | None,
    typer.Argument(help="Declaration file (JSON), or - for standard input; omit it with --model.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the whole plan, not just one screen.")]
OneOperation = Annotated[
    str | None, typer.Argument(help="Print the schema of this operation's config.", show_default=False)
]
Inputs = Annotated[
    Path | None, typer.Option("--inputs", help="Input arrays (.npz or .safetensors).", show_default=False)
]
Mesh = Annotated[
    str | None, typer.Option("--mesh", help="Mesh axes and sizes, such as fsdp=2,tp=2,sp=2.", show_default=False)
]
Mode = Annotated[
    str | None, typer.Option("--mode", help="Mode: train, prefill, autoregressive or insert.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]
PlanTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Plan for a platform (tpu, cuda, rocm, gpu, cpu), a device (v5e, h100) or several (v5e:2x2, h100:8, cpu:8).",
        show_default=False,
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse specs that don't fit and mesh axes that split no work.")]
Fallback = Annotated[
    str | None, typer.Option("--fallback", help="Fallback policy: warn, error or allow.", show_default=False)
]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model", help="A model's config.json, instead of CONFIG.", rich_help_panel=_MODEL, show_default=False
    ),
]
Operation = Annotated[
    str | None,
    typer.Option("--operation", help="Operation to run. Default: splash.", rich_help_panel=_MODEL, show_default=False),
]
Family = Annotated[
    str | None,
    typer.Option("--family", help="Read the config as this model_type.", rich_help_panel=_MODEL, show_default=False),
]
Assume = Annotated[
    str | None,
    typer.Option(
        "--assume",
        help="Read a config of an unknown model_type as this one, with a warning.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        help="Part of an encoder-decoder (encoder, decoder, cross) or of several configs (text, vision, audio).",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore", help="A key of the config to ignore; repeatable.", rich_help_panel=_MODEL, show_default=False
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Dtype, instead of the config's.", rich_help_panel=_MODEL, show_default=False),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", help="Batch size of the call.", min=1, rich_help_panel=_MODEL, show_default=False),
]
QLen = Annotated[
    int | None, typer.Option("--q-len", help="Number of queries.", min=1, rich_help_panel=_MODEL, show_default=False)
]
KvLen = Annotated[
    int | None, typer.Option("--kv-len", help="Number of keys.", min=1, rich_help_panel=_MODEL, show_default=False)
]
Layer = Annotated[
    int | None,
    typer.Option("--layer", help="Plan only this layer, in full.", min=0, rich_help_panel=_MODEL, show_default=False),
]
Write = Annotated[
    Path | None,
    typer.Option("--write", help="Write declarations to this folder.", rich_help_panel=_MODEL, show_default=False),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="TPU topology or GPUs, such as v5e:2x2, h100:8, or `here`; repeatable. Default: `here`, this machine's devices, "
        "virtual ones on CPU.",
        show_default=False,
    ),
]
Lowered = Annotated[
    bool, typer.Option("--lowered", help="Only lower the passes, which needs no compiler: exit status 0 if that works.")
]
Cycles = Annotated[
    bool,
    typer.Option(
        "--cycles",
        help="Print what a TPU's kernels take by the compiler's schedule; each is compiled once more.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        help="Give up a pass that takes more seconds to compile; it is then not compiled.",
        min=1,
        show_default=False,
    ),
]
How = Annotated[
    str | None,
    typer.Option("--how", help="static (cycles by the compiler) or device (measured times).", show_default=False),
]
MaxCandidates = Annotated[int, typer.Option("--most", help="Maximum number of candidates per pass.", min=1)]
Cache = Annotated[Path | None, typer.Option("--cache", help="Folder of the tuning cache.", show_default=False)]
Output = Annotated[
    Path | None,
    typer.Option("--output", help="Write the results to this file (.npz or .safetensors).", show_default=False),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of random inputs and dropout.", min=0, max=2**64 - 1)]
Check = Annotated[
    bool, typer.Option("--check", help="Compare with the float64 reference, and with `expected` in the inputs.")
]
Repeats = Annotated[int, typer.Option("--repeats", help="Number of timed runs; the median is shown.", min=1)]
Explain = Annotated[bool, typer.Option("--explain", help="Print the whole plan.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors.")]
ExampleName = Annotated[str | None, typer.Argument(help="Name of the example.", show_default=False)]
To = Annotated[Path, typer.Option("--to", help="Folder to write the files to.")]
ReportTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="Compile for a TPU topology or GPUs, such as v5e:2x2, h100:8, or `here` for this machine; repeatable.",
        show_default=False,
    ),
]
NoCompare = Annotated[
    bool, typer.Option("--no-compare", help="Don't run the same work with jax.nn.dot_product_attention for comparison.")
]
Run = Annotated[bool, typer.Option("--run", help="Run the call on this machine's devices, and check it.")]
Page = Annotated[Path, typer.Option("--output", help="File to write the page to.")]
