"""The `attnops` command. Exit status: 0 done, 1 refused or a check failed, 2 bad input, 130 interrupted.

jax is imported inside the commands, after the options are known to make sense.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import AttnOpsError, ConfigError, FallbackWarning, RefusedError, UnfitError
from . import options as o
from .advise_command import advise
from .json_output import print_json

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


@app.command("list")
def list_operations(
    as_json: o.Json = False,
) -> None:
    """Show the operations, which method runs on which platform, and what each can do."""
    from .listing import listing, print_listing

    data = listing()
    if as_json:
        print_json(data)
    else:
        print_listing(data)


@app.command()
def schema(
    operation: o.OneOperation = None,
) -> None:
    """Print the JSON Schema of the declaration file, or of one operation's config."""
    from ..registry.declaration_schema import config_json_schema, declaration_json_schema

    print_json(declaration_json_schema() if operation is None else config_json_schema(operation))


@app.command()
def plan(
    config: o.ConfigOrModel = None,
    inputs: o.Inputs = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    platform: o.Platform = None,
    topology: o.Topology = None,
    strict: o.Strict = False,
    fallback: o.Fallback = None,
    as_json: o.Json = False,
    model: o.Model = None,
    operation: o.Operation = None,
    family: o.Family = None,
    part: o.Part = None,
    ignore: o.Ignore = None,
    dtype: o.Dtype = None,
    batch: o.Batch = None,
    q_len: o.QLen = None,
    kv_len: o.KvLen = None,
    layer: o.Layer = None,
    write: o.Write = None,
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
    from .cache import plan_cache, print_cache, show_cache
    from .call_arrays import call_shapes
    from .enabled import enabled_json, enabled_notes
    from .plan import print_plan
    from .step import is_paged, plan_step, show_step
    from .target import TargetOptions, plan_metadata, targeted

    declaration = targeted(Declaration.load(config), TargetOptions(mesh, platform, topology, strict, fallback))
    declared = OperationRegistry.get(declaration.operation)
    metadata = plan_metadata(declaration)
    source = "--topology" if topology else "--platform" if platform else None
    if is_paged(declaration) and declaration.step is not None:
        step, cache = plan_step(declaration, metadata, mode, inputs), plan_cache(declaration, metadata)
        show_step(step, cache, enabled_notes(declaration), source, as_json)
        return
    cache = plan_cache(declaration, metadata)
    if cache is not None and not declaration.is_set("call") and inputs is None:
        show_cache(cache, enabled_notes(declaration), as_json)
        return
    shapes = call_shapes(declaration.call, inputs)
    arguments = declaration.call_arguments(shapes.arrays, mode=mode)
    decided = declared(metadata).plan(**arguments)
    notes = enabled_notes(declaration)
    if as_json:
        found = enabled_json(decided.to_dict(), notes)
        print_json(found if cache is None else found | {"cache": cache.to_dict()})
    else:
        print_plan(decided, (*shapes.notes, *notes), source)
        if cache is not None:
            print()
            print_cache(cache)
    if decided.implementation is None:
        raise _Refused(decided.refusal())
    if cache is not None:
        cache.require()


def _plan_model(options: dict[str, Any], as_json: bool) -> None:
    from .model import ModelOptions, model_json, plan_model, print_model

    found = plan_model(ModelOptions(**options))
    if as_json:
        print_json(model_json(found))
    else:
        print_model(found, whole="layer" in options)
    if found.refused:
        raise _Refused("; ".join(found.refused))


@app.command()
def verify(
    config: o.Config,
    target: o.VerifyTarget = None,
    inputs: o.Inputs = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    fallback: o.Fallback = None,
    as_json: o.Json = False,
) -> None:
    """Compile for TPUs or GPUs that aren't here, or for virtual devices: does it fit, what does it take, what does it send."""
    from .cache import cache_notes, noted
    from .enabled import enabled_json, enabled_notes
    from .verify import VerifyOptions, print_reports, why
    from .verify import verify as verify_command

    reports = verify_command(VerifyOptions(config, tuple(target or ()), inputs, mesh, mode, fallback))
    notes, cached = enabled_notes(config), cache_notes(config)
    if as_json:
        print_json([noted(enabled_json(report.to_dict(), notes), cached) for report in reports])
    else:
        print_reports(reports, (*notes, *cached))
    if failed := [why(report) for report in reports if not report.passed]:
        raise _Refused("; ".join(failed))


@app.command()
def tune(
    config: o.Config,
    target: o.TuneTarget = None,
    inputs: o.Inputs = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    how: o.How = None,
    most: o.Most = 16,
    cache: o.Cache = None,
    as_json: o.Json = False,
) -> None:
    """Search block sizes, for TPUs that aren't here or on this machine's device, and keep the best for later plans."""
    from .cache import cache_notes, noted
    from .enabled import enabled_json, enabled_notes
    from .tune import TuneOptions, print_tuned, tuned_json
    from .tune import tune as tune_command

    reports = tune_command(TuneOptions(config, tuple(target or ()), inputs, mesh, mode, how, most, cache))
    notes, cached = enabled_notes(config), cache_notes(config)
    if as_json:
        print_json([noted(enabled_json(report, notes), cached) for report in tuned_json(reports)])
    else:
        print_tuned(reports, (*notes, *cached))
    failed = [name for name, report in reports if report.found.choice is None]
    if failed:
        raise _Refused(f"{', '.join(failed)}: no candidate compiles or runs; the reasons stand beside them.")


@app.command()
def run(
    config: o.Config,
    inputs: o.Inputs = None,
    output: o.Output = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    seed: o.Seed = 0,
    check: o.Check = False,
    repeats: o.Repeats = 5,
    explain: o.Explain = False,
    quiet: o.Quiet = False,
) -> None:
    """Run the declared call on this machine's devices, virtual CPU devices where the mesh needs more."""
    from .run import RunOptions
    from .run import run as run_command

    options = RunOptions(config, inputs, output, mesh, mode, seed, check, repeats, explain, quiet)
    raise typer.Exit(run_command(options))


app.command()(advise)


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
        except (_Refused, RefusedError, UnfitError) as error:
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


if __name__ == "__main__":
    sys.exit(main())
