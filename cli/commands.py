"""The commands: their options, and which file implements each.

jax is imported inside the commands, after the options have been checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ..errors import AttnOpsError, ConfigError
from . import options as o
from .json_output import print_json

__all__ = ["Refused", "app"]

app = typer.Typer(
    name="attnops",
    help="Declare an attention operation, see what will run where and why, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Refused(AttnOpsError):
    """A plan was made, but it refuses the call."""


@app.callback()
def _about(version: o.Version = False) -> None:
    """Declare an attention operation, see what will run where and why, and run it."""
    del version  # its callback has already printed it


@app.command("list")
def list_operations(
    as_json: o.Json = False,
) -> None:
    """List the operations, the method that runs on each platform, and what each can do."""
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
    target: o.PlanTarget = None,
    strict: o.Strict = False,
    fallback: o.Fallback = None,
    verbose: o.Verbose = False,
    as_json: o.Json = False,
    model: o.Model = None,
    operation: o.Operation = None,
    family: o.Family = None,
    assume: o.Assume = None,
    part: o.Part = None,
    ignore: o.Ignore = None,
    dtype: o.Dtype = None,
    batch: o.Batch = None,
    q_len: o.QLen = None,
    kv_len: o.KvLen = None,
    layer: o.Layer = None,
    write: o.Write = None,
) -> None:
    """Show what would run and why, and where every tensor would be. Needs no devices."""
    of_model = {
        "operation": operation, "family": family, "assume": assume, "part": part, "ignore": ignore, "dtype": dtype,
        "batch": batch, "q_len": q_len, "kv_len": kv_len, "layer": layer, "write": write,
    }  # fmt: skip
    model_options = {name: value for name, value in of_model.items() if value is not None}
    chosen = {"mesh": mesh, "mode": mode, "target": target, "strict": strict, "fallback": fallback}
    if model is not None:
        for name, other in (("CONFIG", config), ("--inputs", inputs)):
            if other is not None:
                raise ConfigError(f"{name} {other} and --model {model} exclude each other; give one of them.")
        _plan_model({"model": model} | model_options | chosen, as_json, verbose)
        return
    if config is None:
        raise ConfigError("nothing to plan; give a declaration file, or --model with a model's config.json.")
    if model_options:
        names = ", ".join("--" + name.replace("_", "-") for name in model_options)
        raise ConfigError(f"{names} without --model; for {config} the declaration specifies that.")
    from .cache import plan_cache, show_cache
    from .declared import declared
    from .file_notes import enabled_notes, noted
    from .plan import print_plan
    from .source import declared_in
    from .target import TargetOptions, plan_metadata, targeted

    declaration = targeted(declared_in(config), TargetOptions(mesh, target, strict, fallback))
    metadata = plan_metadata(declaration)
    cache = plan_cache(declaration, metadata)
    if cache is not None and declaration.step is None and not declaration.is_set("call") and inputs is None:
        show_cache(cache, declaration, as_json)
        return
    work = declared(declaration, inputs, mode)
    decided = work.plan(metadata)
    if decided.cache is not None and not (cache and cache.parts):
        cache = decided.cache  # for the devices that the step is planned for
    notes = enabled_notes(declaration)
    if as_json:
        data = decided.to_dict() | ({} if cache is None else {"cache": cache.to_dict()})
        print_json(noted(data, declaration, notes))
    else:
        source = "--target" if target else None
        print_plan(decided, (*work.notes, *notes), source, cache=cache, verbose=verbose)
    decided.require()
    if cache is not None:
        cache.require()


def _plan_model(options: dict[str, Any], as_json: bool, verbose: bool) -> None:
    from .model import ModelOptions, model_json, plan_model, print_model

    plans = plan_model(ModelOptions(**options))
    if as_json:
        print_json(model_json(plans))
    else:
        print_model(plans, whole="layer" in options, verbose=verbose)
    if plans.refused:
        raise Refused("; ".join(plans.refused))


@app.command()
def verify(
    config: o.Config,
    target: o.Targets = None,
    inputs: o.Inputs = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    fallback: o.Fallback = None,
    lowered: o.Lowered = False,
    cycles: o.Cycles = False,
    timeout: o.Timeout = None,
    as_json: o.Json = False,
) -> None:
    """Compile for TPUs or GPUs that aren't here, or for virtual devices, and report whether it fits and what it sends."""
    from .file_notes import file_notes, noted
    from .source import declared_in
    from .verified import VerifyOptions
    from .verify import print_reports, verify_targets, why

    declaration = declared_in(config)
    options = VerifyOptions(declaration, tuple(target or ()), inputs, mesh, mode, fallback, lowered, timeout, cycles)
    reports = verify_targets(options)
    notes = file_notes(declaration)
    if as_json:
        print_json([noted(report.to_dict(), declaration, notes) for report in reports])
    else:
        print_reports(reports, notes)
    if failed := [why(report) for report in reports if not report.outcome.accepted]:
        raise Refused("; ".join(failed))


@app.command()
def tune(
    config: o.Config,
    target: o.Targets = None,
    inputs: o.Inputs = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    how: o.How = None,
    most: o.MaxCandidates = 16,
    cache: o.Cache = None,
    as_json: o.Json = False,
) -> None:
    """Search block sizes for TPUs that aren't here, or on this machine's device, and keep the best for later plans."""
    from .file_notes import file_notes, noted
    from .source import declared_in
    from .tune import TuneOptions, print_tuned, tuned_json
    from .tune import tune as tune_command

    declaration = declared_in(config)
    reports = tune_command(TuneOptions(declaration, tuple(target or ()), inputs, mesh, mode, how, most, cache))
    notes = file_notes(declaration)
    if as_json:
        print_json([noted(report, declaration, notes) for report in tuned_json(reports)])
    else:
        print_tuned(reports, notes)
    failed = [name for name, report in reports if report.result.choice is None]
    if failed:
        raise Refused(f"{', '.join(failed)}: no candidate compiles or runs; the table lists the reasons.")


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
    as_json: o.Json = False,
    no_compare: o.NoCompare = False,
) -> None:
    """Run the declared call on this machine's devices, or on virtual CPU devices if the mesh needs more."""
    from .run import RunOptions
    from .run import run as run_command
    from .source import declared_in

    options = RunOptions(
        declared_in(config), inputs, output, mesh, mode, seed, check, repeats, explain, quiet, as_json, not no_compare
    )
    raise typer.Exit(run_command(options))


@app.command()
def example(name: o.ExampleName = None, to: o.To = Path("examples")) -> None:
    """Write the files of an example used in the manual; without NAME, list the examples."""
    from .example import list_examples, write_example

    if name is None:
        list_examples()
    else:
        write_example(name, to)


@app.command()
def report(
    config: o.Config,
    target: o.ReportTarget = None,
    inputs: o.Inputs = None,
    mesh: o.Mesh = None,
    mode: o.Mode = None,
    fallback: o.Fallback = None,
    lowered: o.Lowered = False,
    timeout: o.Timeout = None,
    run: o.Run = False,
    repeats: o.Repeats = 5,
    seed: o.Seed = 0,
    output: o.Page = Path("report.html"),
) -> None:
    """Write one HTML page: declaration, mask, placement, plan with reasons, compiler results, tuning, timings."""
    from .file_notes import file_notes
    from .report import ReportOptions
    from .report import report as report_command
    from .source import declared_in
    from .verified import VerifyOptions

    declaration = declared_in(config)
    verify_options = VerifyOptions(declaration, tuple(target or ()), inputs, mesh, mode, fallback, lowered, timeout)
    failed = report_command(ReportOptions(verify_options, run, repeats, seed, output, file_notes(declaration)))
    print(f"wrote {output}")
    if failed:
        raise Refused("; ".join(failed))
