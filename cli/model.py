"""`attnops plan --model`: plan every distinct layer of a model in a table, or one layer in full."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from ..errors import ConfigError
from ..planning import Plan
from ..planning.call_arrays import call_arrays
from ..planning.notes import is_info
from ..planning.plan_text import placement_rows
from ..planning.text import bytes_text
from ..registry.declaration import Declaration
from ..registry.layer_calls import is_cached
from ..registry.model_declaration import LayerDeclaration, ModelDeclaration, write_layers
from .console import fields, table, text, title
from .layer_plans import (
    NOTHING,
    STATE_CELLS,
    LayerPlans,
    cache_fields,
    cache_json,
    cache_rows,
    has_states,
    layer_json,
    layer_plans,
    state_cells,
    state_rows,
)
from .plan import print_plan, runs_row
from .target import TargetOptions, targeted

__all__ = ["ModelOptions", "ModelPlans", "model_json", "plan_model", "print_model"]

_NAMING = ("layers", "kind")
_LONGEST = 131072  # longest sequence planned by default; some configs promise millions


@dataclass(frozen=True)
class ModelOptions:
    """The options of the command line."""

    model: Path
    operation: str = "splash"
    family: str | None = None
    assume: str | None = None
    part: str | None = None
    ignore: tuple[str, ...] = ()
    dtype: str | None = None
    batch: int | None = None
    q_len: int | None = None
    kv_len: int | None = None
    layer: int | None = None
    write: Path | None = None
    mesh: str | None = None
    mode: str | None = None
    target: str | None = None
    strict: bool = False
    fallback: str | None = None


@dataclass(frozen=True)
class ModelPlans:
    """The model, and the plans of each of its distinct layers, or of the requested layer."""

    model: ModelDeclaration
    plans: tuple[LayerPlans, ...]
    notes: tuple[str, ...]
    platform_source: str | None

    @property
    def refused(self) -> list[str]:
        """The reasons of every refused layer."""
        every = [(one.layer.kind, plan) for one in self.plans for plan in one.every]
        return [f"{kind}: {plan.refusal()}" for kind, plan in every if plan.implementation is None]


def plan_model(options: ModelOptions) -> ModelPlans:
    """Read the config, plan its layers, and write their declarations if requested."""
    reading: dict[str, Any] = {
        "family": options.family,
        "assume": options.assume,
        "part": options.part,
        "ignore": options.ignore,
        "dtype": options.dtype,
    }
    q_len, kv_len, notes = options.q_len, options.kv_len, []
    if q_len is None:
        cached = is_cached(options.mode)
        if kv_len is not None and not cached:
            raise ConfigError(f"--kv-len {kv_len} without --q-len; give both.")
        read = ModelDeclaration.from_config(options.model, **reading)
        first = read.distinct[0].declaration
        if first is None or first.call.q_len is None:  # an image's layers have their own
            tokens = min(read.positions or _LONGEST, _LONGEST)
            if kv_len is None:
                kv_len = read.key_positions or tokens
                of = "" if read.positions is None else f", of max_position_embeddings={read.positions}"
                keys = "" if read.key_positions is None else f", {kv_len} keys, of max_source_positions"
                notes.append(f"{tokens} tokens{of}{keys}; --q-len and --kv-len override it")
            else:
                tokens = kv_len
            q_len = 1 if cached else tokens
    model = ModelDeclaration.from_config(
        options.model,
        operation=options.operation,
        mode=options.mode,
        batch=options.batch,
        q_len=q_len,
        kv_len=kv_len,
        **reading,
    )
    target = TargetOptions(options.mesh, options.target, options.strict, options.fallback)
    chosen: Sequence[LayerDeclaration] = model.distinct if options.layer is None else [model.layer(options.layer)]
    # The file declares what was planned, so it contains every option that changes the plan.
    layers = tuple(_targeted(layer, target) for layer in chosen)
    if options.write is not None:
        paths = write_layers(layers, options.write)
        notes.append(f"written: {', '.join(map(str, paths))}" if paths else "nothing to write")
    source = "--target" if options.target else None
    return ModelPlans(model, tuple(map(layer_plans, layers)), (*model.notes, *notes), source)


def _targeted(layer: LayerDeclaration, target: TargetOptions) -> LayerDeclaration:
    """The layer with the options in each of its declarations; that of latent attention in place of the attention inside."""

    def with_options(declaration: Declaration | None) -> Declaration | None:
        return None if declaration is None else targeted(declaration, target)

    return replace(
        layer,
        declaration=with_options(layer.latent or layer.declaration),
        recurrence=with_options(layer.recurrence),
        convolution=with_options(layer.convolution),
    )


def model_json(plans: ModelPlans) -> dict[str, Any]:
    """The plans as JSON-ready values."""
    return {
        "family": plans.model.family,
        "layers": [layer_json(one) for one in plans.plans],
        "cache_bytes": cache_json(plans.model),
        "cache_fields": cache_fields(plans.model),
        "notes": list(plans.notes),
    }


def print_model(plans: ModelPlans, *, whole: bool, verbose: bool = False) -> None:
    """Print the table, or with `whole` the plan of the one layer."""
    if whole:
        (one,) = plans.plans
        about = f"{plans.model.family}, {one.layer.kind}: layers {_numbers(one.layer.layers, len(plans.model.layers))}"
        text().print(Text(about, style="bold"))
        for number, plan in enumerate(one.every):
            last = number == len(one.every) - 1
            print_plan(plan, plans.notes if last else (), plans.platform_source, verbose=verbose)
        if not one.every:
            text().print("", fields([("runs", NOTHING), *(("note", note) for note in plans.notes)]), sep="\n")
        return
    console = text()
    attending = [one for one in plans.plans if one.attention is not None]
    every = [plan for one in (*attending, *plans.plans) for plan in one.every]
    head = f"{plans.model.family}: {len(plans.model.layers)} layers" + (
        f"; {every[0].problem.describe()}" if every else ""
    )
    console.print(title(head))
    layers = [_row(plans, one) for one in plans.plans]
    named = dict.fromkeys(name for row in layers for name in row if name not in _NAMING)
    stated = [name for name in named if name in STATE_CELLS and any(row.get(name) for row in layers)]
    differing = [
        name for name in named if name not in STATE_CELLS and len({row[name] for row in layers if name in row}) > 1
    ]
    columns = table(*_NAMING, *stated, *differing)
    for row in layers:
        columns.add_row(*(row.get(name) or "-" for name in (*_NAMING, *stated, *differing)))
    console.print(columns)
    rows: list[tuple[str, str | Text]] = []
    if attending and (first := attending[0].attention) is not None:
        rows += _alike(first, _row(plans, attending[0]), differing)
    rows += [*_plan_rows(plans.plans), *cache_rows(plans.model), *[("note", note) for note in plans.notes]]
    console.print("", fields(rows), sep="\n")


def _alike(plan: Plan, row: dict[str, str], differing: Sequence[str]) -> list[tuple[str, str | Text]]:
    """What all layers with attention have in common; the first line has their heads and dims."""
    rows: list[tuple[str, str | Text]] = []
    if not {"runs", "why"} & set(differing):
        rows.append(runs_row(plan))
    elif "runs" not in differing:
        rows.append(("runs", row["runs"]))
    rows += [
        (label, row[label])
        for label in ("keys", "indexer", "cap", "score", "sinks", "blocks")
        if label not in differing and row[label].strip("-")
    ]
    if "device" not in differing:
        devices = plan.problem.devices
        rows.append(("device", f"{row['device']} of operands" + (f" on each of {devices}" if devices > 1 else "")))
    return rows


def _row(plans: ModelPlans, one: LayerPlans) -> dict[str, str]:
    """A layer's cells by column heading: those of attention only if it has some, and those of states in models with them."""
    layer, plan = one.layer, one.attention
    named = dict(zip(_NAMING, (_numbers(layer.layers, len(plans.model.layers)), layer.kind), strict=True))
    named |= state_cells(layer) if has_states(plans.model) else {}
    if plan is None:
        return named
    problem = plan.problem
    heads, kv_heads, dim, value_dim = problem.q_heads, problem.kv_heads, problem.head_dim, problem.value_dim
    sinks = problem.operand("softmax_aux")
    return named | {
        "batch": f"{problem.batch}",
        "tokens": f"{problem.q_len}",
        "heads": f"{heads}" if kv_heads == heads else f"{heads}/{kv_heads}",
        "dim": f"{dim}" if value_dim == dim else f"{dim}/{value_dim}",
        "cap": "" if problem.logits_soft_cap is None else f"{problem.logits_soft_cap:g}",
        "score": "" if problem.score is None else problem.score.describe(),
        "keys": "" if layer.reads_layer is None else f"of layer {layer.reads_layer}",
        "indexer": _indexer(dict(layer.indexer)),
        "sinks": "" if sinks is None else f"{1 if len(sinks.shape) == 1 else sinks.shape[1]} per head",
        "runs": plan.implementation or "nothing",
        "why": plan.kind,
        "blocks": _blocks(plan),
        "device": _size(plan),
    }


def _indexer(sizes: Mapping[str, int]) -> str:
    """`64 heads of 128: 2048 keys`, which it leaves to each query."""
    if not sizes:
        return ""
    kept = f"{sizes['top_blocks']}x{sizes['block_size']}" if "top_blocks" in sizes else f"{sizes['top_k']}"
    return f"{sizes['heads']} heads of {sizes['head_dim']}: {kept} keys"


def _plan_rows(plans: Sequence[LayerPlans]) -> list[tuple[str, str | Text]]:
    """What the plans say that isn't in the table: each line once, with the kinds of layers it applies to unless it is all."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for one in plans:
        found: list[tuple[str, str]] = []
        if (plan := one.attention) is not None:
            notes = [("note", note) for note in plan.notes if not is_info(note)]
            found += [*plan.rejected_rows, *placement_rows(plan), *notes]
        for row in dict.fromkeys((*found, *state_rows(one))):
            kinds.setdefault(row, []).append(one.layer.kind)
    order = ("runs", "not", "dropped", "repeated", "inside", "sends", "note")
    ordered = sorted(kinds.items(), key=lambda item: order.index(item[0][0]))
    return [
        (label, line if len(about) == len(plans) else f"{', '.join(about)}: {line}") for (label, line), about in ordered
    ]


def _numbers(layers: Sequence[int], count: int) -> str:
    """`0, 2 ... 44 (23)`, `0-27 (28)` or `all but 5, 11 ... 29 (29)`, whichever is short."""
    rest = sorted(set(range(count)) - set(layers))
    text = min(_series(layers), f"all but {_series(rest)}" if rest else _series(layers), key=len)
    return f"{text} ({len(layers)})"


def _series(layers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in layers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    steps = {later - earlier for earlier, later in itertools.pairwise(layers)}
    if len(layers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]}, {layers[1]} ... {layers[-1]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _blocks(plan: Plan) -> str:
    """The route and its sizes, or the block sizes of the config that the implementation reads."""
    if plan.runs is None:
        return "-"
    sizes: Any = plan.route
    if sizes is None and plan.runs.reads(plan.config):
        sizes = plan.config
    blocks = [getattr(sizes, name, None) for name in ("block_q", "block_kv")]
    words = ([plan.route.name] if plan.route is not None else []) + (
        ["x".join(map(str, blocks))] if all(blocks) else []
    )
    return " ".join(words) or "-"


def _size(plan: Plan) -> str:
    results = ("output", "weights", "lse")
    return bytes_text(sum(array.device_bytes for array in call_arrays(plan) if array.name not in results))
