"""The options of the command: name, type and help text of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .version import version_text


def _print_version(value: bool) -> None:
    if value:
        print(version_text())
        raise typer.Exit


def optional(name: str, text: str, **more: Any) -> Any:
    """An option that may be left out: its default isn't shown."""
    return typer.Option(name, help=text, show_default=False, **more)


def _of_model(name: str, text: str, **more: Any) -> Any:
    return optional(name, text, rich_help_panel="With --model", **more)


def _argument(text: str) -> Any:
    return typer.Argument(help=text, show_default=False)


Version = Annotated[
    bool, typer.Option("--version", help="Print the versions and exit.", is_eager=True, callback=_print_version)
]
Config = Annotated[Path, _argument("Declaration file (JSON), or - for standard input.")]
ConfigOrModel = Annotated[
    Path | None, _argument("Declaration file (JSON), or - for standard input; omit it with --model.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the whole plan, not just one screen.")]
OneOperation = Annotated[str | None, _argument("Print the schema of this operation's config.")]
Inputs = Annotated[Path | None, optional("--inputs", "Input arrays (.npz or .safetensors).")]
Mesh = Annotated[str | None, optional("--mesh", "Mesh axes and sizes, such as fsdp=2,tp=2,sp=2.")]
Mode = Annotated[str | None, optional("--mode", "Mode: train, prefill, autoregressive or insert.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]
PlanTarget = Annotated[
    str | None,
    optional(
        "--target",
        "Plan for a platform (tpu, cuda, rocm, gpu, cpu), a device (v5e, h100) or several (v5e:2x2, h100:8, cpu:8).",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse specs that don't fit and mesh axes that split no work.")]
Fallback = Annotated[str | None, optional("--fallback", "Fallback policy: warn, error or allow.")]
Model = Annotated[Path | None, _of_model("--model", "A model's config.json, instead of CONFIG.")]
Operation = Annotated[str | None, _of_model("--operation", "Operation to run. Default: splash.")]
Family = Annotated[str | None, _of_model("--family", "Read the config as this model_type.")]
Assume = Annotated[
    str | None, _of_model("--assume", "Read a config of an unknown model_type as this one, with a warning.")
]
Part = Annotated[
    str | None,
    _of_model(
        "--part", "Part of an encoder-decoder (encoder, decoder, cross) or of several configs (text, vision, audio)."
    ),
]
Ignore = Annotated[list[str] | None, _of_model("--ignore", "A key of the config to ignore; repeatable.")]
Dtype = Annotated[str | None, _of_model("--dtype", "Dtype, instead of the config's.")]
Batch = Annotated[int | None, _of_model("--batch", "Batch size of the call.", min=1)]
QLen = Annotated[int | None, _of_model("--q-len", "Number of queries.", min=1)]
KvLen = Annotated[int | None, _of_model("--kv-len", "Number of keys.", min=1)]
Layer = Annotated[int | None, _of_model("--layer", "Plan only this layer, in full.", min=0)]
Write = Annotated[Path | None, _of_model("--write", "Write declarations to this folder.")]
Targets = Annotated[
    list[str] | None,
    optional(
        "--target",
        "TPU topology or GPUs, such as v5e:2x2, h100:8, or `here`; repeatable. Default: `here`, this machine's devices, "
        "virtual ones on CPU.",
    ),
]
Lowered = Annotated[
    bool, typer.Option("--lowered", help="Only lower the passes, which needs no compiler: exit status 0 if that works.")
]
Cycles = Annotated[
    bool,
    typer.Option(
        "--cycles", help="Print what a TPU's kernels take by the compiler's schedule; each is compiled once more."
    ),
]
Timeout = Annotated[
    float | None,
    optional("--timeout", "Give up a pass that takes more seconds to compile; it is then not compiled.", min=1),
]
How = Annotated[str | None, optional("--how", "static (cycles by the compiler) or device (measured times).")]
MaxCandidates = Annotated[int, typer.Option("--most", help="Maximum number of candidates per pass.", min=1)]
Cache = Annotated[Path | None, optional("--cache", "Folder of the tuning cache.")]
Output = Annotated[Path | None, optional("--output", "Write the results to this file (.npz or .safetensors).")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of random inputs and dropout.", min=0, max=2**64 - 1)]
Check = Annotated[
    bool, typer.Option("--check", help="Compare with the float64 reference, and with `expected` in the inputs.")
]
Repeats = Annotated[int, typer.Option("--repeats", help="Number of timed runs; the median is shown.", min=1)]
Explain = Annotated[bool, typer.Option("--explain", help="Print the whole plan.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors.")]
ExampleName = Annotated[str | None, _argument("Name of the example.")]
To = Annotated[Path, typer.Option("--to", help="Folder to write the files to.")]
ReportTarget = Annotated[
    list[str] | None,
    optional(
        "--target",
        "Compile for a TPU topology or GPUs, such as v5e:2x2, h100:8, or `here` for this machine; repeatable.",
    ),
]
NoCompare = Annotated[
    bool, typer.Option("--no-compare", help="Don't run the same work with jax.nn.dot_product_attention for comparison.")
]
Run = Annotated[bool, typer.Option("--run", help="Run the call on this machine's devices, and check it.")]
Page = Annotated[Path, typer.Option("--output", help="File to write the page to.")]
