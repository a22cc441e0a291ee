"""The `attnops` command. Exit status: 0 done, 1 refused or a check failed, 2 bad input, 130 interrupted.

jax is imported inside the commands, after the options are known to make sense.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import AttnOpsError, ConfigError, FallbackWarning, RefusedError, ShardingError

__all__ = ["app", "main"]

app = typer.Typer(
    name="attnops",
    help="Declare an attention operation, know what will run where and why, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# typer carries click inside from 0.22 on and has it as a dependency before; either way this is its ClickException.
_UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_OF_MODEL: dict[str, Any] = {"rich_help_panel": "With --model"}
_Config = Annotated[Path, typer.Argument(help="Declaration file (JSON).", show_default=False)]
_Inputs = Annotated[Path | None, typer.Option("--inputs", help="Arrays, .npz or .safetensors.", show_default=False)]
_Mesh = Annotated[str | None, typer.Option("--mesh", help="Mesh axes, such as fsdp=2,tp=2,sp=2.", show_default=False)]
_Mode = Annotated[
    str | None, typer.Option("--mode", help="train, prefill, autoregressive or insert.", show_default=False)
]
_Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]


@app.command("list")
def list_operations(as_json: _Json = False) -> None:
    """Show the operations, which method runs on which platform, and what each can do."""
    from .listing import listing, print_listing

    data = listing()
    if as_json:
        _print_json(data)
    else:
        print_listing(data)


@app.command()
def schema(
    operation: Annotated[str | None, typer.Argument(help="One operation's config.", show_default=False)] = None,
) -> None:
    """Print the JSON Schema of the declaration file, or of one operation's config."""
    from ..registry.declaration_schema import config_json_schema, declaration_json_schema

    _print_json(declaration_json_schema() if operation is None else config_json_schema(operation))


@app.command()
def plan(
    config: Annotated[
        Path | None, typer.Argument(help="Declaration file (JSON), or none with --model.", show_default=False)
    ] = None,
    inputs: _Inputs = None,
    mesh: _Mesh = None,
    mode: _Mode = None,
    platform: Annotated[
        str | None, typer.Option("--platform", help="Plan for tpu, cuda, rocm, gpu or cpu.", show_default=False)
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Plan for a TPU topology, such as v5e:2x2.", show_default=False)
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse specs that don't fit, and axes that split no work.")
    ] = False,
    fallback: Annotated[
        str | None, typer.Option("--fallback", help="warn, error or allow.", show_default=False)
    ] = None,
    as_json: _Json = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A model's config.json, in the place of CONFIG.", show_default=False, **_OF_MODEL),
    ] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", help="That runs. By default splash.", show_default=False, **_OF_MODEL)
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Read it as this model_type.", show_default=False, **_OF_MODEL)
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--part", help="Of an encoder-decoder: encoder, decoder or cross.", show_default=False, **_OF_MODEL
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="A key to pass over.", show_default=False, **_OF_MODEL)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="In the place of the config's.", show_default=False, **_OF_MODEL)
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Of the call.", show_default=False, **_OF_MODEL)
    ] = None,
    q_len: Annotated[
        int | None, typer.Option("--q-len", min=1, help="Queries.", show_default=False, **_OF_MODEL)
    ] = None,
    kv_len: Annotated[
        int | None, typer.Option("--kv-len", min=1, help="Keys.", show_default=False, **_OF_MODEL)
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="One layer, in full.", show_default=False, **_OF_MODEL)
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write declarations here.", show_default=False, **_OF_MODEL)
    ] = None,
) -> None:
    """Show what would run and why, and where every tensor would live. Needs no devices."""
    of_model = {
        "operation": operation, "family": family, "part": part, "ignore": ignore, "dtype": dtype, "batch": batch, "q_len": q_len,
        "kv_len": kv_len, "layer": layer, "write": write,
    }  # fmt: skip
    given = {name: value for name, value in of_model.items() if value is not None}
    target = {
        "mesh": mesh, "mode": mode, "platform": platform, "topology": topology, "strict": strict, "fallback": fallback,
    }  # fmt: skip
    if model is not None:
        for name, other in (("CONFIG", config), ("--inputs", inputs)):
            if other is not None:
                raise ConfigError(f"{name} {other} beside --model {model}; give one of them.")
        _plan_model({"model": model} | given | target, as_json)
        return
    if config is None:
        raise ConfigError("nothing to plan; give a declaration file, or --model with a model's config.json.")
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{names} without --model; in {config} the declaration says that.")
    from ..registry import OperationRegistry
    from ..registry.declaration import Declaration
    from .call_arrays import call_shapes
    from .enabled import enabled_json, enabled_notes
    from .plan import print_plan
    from .target import TargetOptions, plan_metadata, targeted

    declaration = targeted(Declaration.load(config), TargetOptions(mesh, platform, topology, strict, fallback))
    declared = OperationRegistry.get(declaration.operation)
    metadata = plan_metadata(declaration)
    shapes = call_shapes(declaration.call, inputs)
    arguments = declaration.call_arguments(shapes.arrays, mode=mode)
    try:
        decided = declared(metadata).plan(**arguments)
    except ShardingError as error:
        raise _Refused(str(error)) from None
    notes = enabled_notes(declaration)
    if as_json:
        _print_json(enabled_json(decided.to_dict(), notes))
    else:
        source = "--topology" if topology else "--platform" if platform else None
        print_plan(decided, (*shapes.notes, *notes), source)
    if decided.implementation is None:
        raise _Refused(decided.refusal())


def _plan_model(options: dict[str, Any], as_json: bool) -> None:
    from .model import ModelOptions, model_json, plan_model, print_model

    try:
        found = plan_model(ModelOptions(**options))
    except ShardingError as error:
        raise _Refused(str(error)) from None
    if as_json:
        _print_json(model_json(found))
    else:
        print_model(found, whole="layer" in options)
    if found.refused:
        raise _Refused("; ".join(found.refused))


@app.command()
def verify(
    config: _Config,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="A TPU topology, such as v5e:2x2; may be repeated. Left out: this machine's devices, virtual ones on CPU.",
            show_default=False,
        ),
    ] = None,
    inputs: _Inputs = None,
    mesh: _Mesh = None,
    mode: _Mode = None,
    fallback: Annotated[
        str | None, typer.Option("--fallback", help="warn, error or allow.", show_default=False)
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compile for TPUs that aren't here, or for a mesh of virtual devices: does it fit, what does it take, what does it send."""
    from .enabled import enabled_json, enabled_notes
    from .verify import VerifyOptions, print_reports
    from .verify import verify as verify_command

    try:
        reports = verify_command(VerifyOptions(config, tuple(target or ()), inputs, mesh, mode, fallback))
    except ShardingError as error:
        raise _Refused(str(error)) from None
    notes = enabled_notes(config)
    if as_json:
        _print_json([enabled_json(report.to_dict(), notes) for report in reports])
    else:
        print_reports(reports, notes)
    failed = [report for report in reports if not report.passed]
    if failed:
        raise _Refused("; ".join(_why(report) for report in failed))


def _why(report: Any) -> str:
    if report.plan.implementation is None:
        return f"{report.target}: {report.plan.refusal()}"
    failed = [f"{p.name}: {p.failure.message}" for p in report.passes if p.failure]
    differing = [f"{p.name}: {line}" for p in report.passes for line in p.differences]
    return f"{report.target}: " + "; ".join([*failed, *differing])


@app.command()
def tune(
    config: _Config,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="A TPU topology, such as v5e:2x2; may be repeated. Left out: this machine's device.",
            show_default=False,
        ),
    ] = None,
    inputs: _Inputs = None,
    mesh: _Mesh = None,
    mode: _Mode = None,
    how: Annotated[
        str | None, typer.Option("--how", help="static (the compiler's cycles) or device.", show_default=False)
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Candidates of each pass.")] = 16,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="The folder of kept choices.", show_default=False)
    ] = None,
    as_json: _Json = False,
) -> None:
    """Search block sizes, for TPUs that aren't here or on this machine's device, and keep the best for later plans."""
    from .enabled import enabled_json, enabled_notes
    from .tune import TuneOptions, print_tuned, tuned_json
    from .tune import tune as tune_command

    reports = tune_command(TuneOptions(config, tuple(target or ()), inputs, mesh, mode, how, most, cache))
    notes = enabled_notes(config)
    if as_json:
        _print_json([enabled_json(report, notes) for report in tuned_json(reports)])
    else:
        print_tuned(reports, notes)
    failed = [name for name, report in reports if report.found.choice is None]
    if failed:
        raise _Refused(f"{', '.join(failed)}: no candidate compiles or runs; the reasons stand beside them.")


@app.command()
def run(
    config: _Config,
    inputs: _Inputs = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the results, .npz or .safetensors.", show_default=False)
    ] = None,
    mesh: _Mesh = None,
    mode: _Mode = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Of drawn inputs and of dropout.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Compare with float64, and with `expected`.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed runs; the median is shown.")] = 5,
    explain: Annotated[bool, typer.Option("--explain", help="Print the whole plan.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but what goes wrong.")] = False,
) -> None:
    """Run the declared call on this machine's devices, virtual CPU devices where the mesh needs more."""
    from .run import RunOptions
    from .run import run as run_command

    options = RunOptions(config, inputs, output, mesh, mode, seed, check, repeats, explain, quiet)
    raise typer.Exit(run_command(options))


class _Refused(AttnOpsError):
    """A plan that was made and says no."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. What attnops raises on purpose becomes one message on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=FallbackWarning)
        warnings.showwarning = _short_warning(warnings.showwarning)
        try:
            status = app(args=given or ["--help"], prog_name="attnops", standalone_mode=False) or 0
            sys.stdout.flush()
            # typer answers an interrupt with 130 and no word; older ones raise Abort.
            return status if status != 130 else _fail("interrupted.", 130)
        except (_Refused, RefusedError) as error:
            return _fail(str(error), 1)
        except AttnOpsError as error:
            return _fail(str(error), 2)
        except _UsageProblem as error:
            return _fail(f"{error.format_message()} Try `attnops --help`.", 2)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted.", 130)
        except MemoryError as error:
            return _fail(f"not enough memory: {error}; make the call smaller.", 2)
        except BrokenPipeError:  # the reader went away, as in `attnops schema | head`: nobody is left to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _fail(message: str, status: int) -> int:
    print(f"attnops: {message}", file=sys.stderr)
    return status


def _short_warning(otherwise: Any) -> Any:
    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, FallbackWarning):
            print(f"attnops: warning: {str(message).splitlines()[0]}", file=sys.stderr)
        else:
            otherwise(message, category, filename, lineno, file, line)

    return show


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
