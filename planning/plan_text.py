"""A plan as text: all of it, or one screen with what runs, why, and what needs attention."""

from __future__ import annotations

import math

from ..sharding import AttnShardingRules
from .call_arrays import CallArray, call_arrays, large_arrays
from .config_lines import ConfigLine, config_lines
from .decision import WHY
from .notes import is_info
from .plan_fields import PlanFields
from .repeated import repeated_lines
from .text import bytes_text, spec_text
from .traffic import sends_line

__all__ = [
    "decision_rows",
    "dropped_lines",
    "explain",
    "placement_rows",
    "screen_rows",
    "tensor_rows",
]

_EXPLAINED = ("query", "key", "value", "key_scale", "value_scale", "softmax_aux")  # by `inside` lines, or small
_WASTE = 0.05  # share of the work on padding from which it is shown on one screen


def tensor_rows(plan: PlanFields) -> list[tuple[str, str, str, str, str, str]]:
    """Rows (tensor, declared spec, fitted spec, shape, per-device shape, per-device bytes): the ten tensors with declared specs,
    then the call's other arrays.
    """
    rows = []
    arrays = {array.name: array for array in call_arrays(plan)}
    for tensor in AttnShardingRules._fields:
        declared, fitted = getattr(plan.problem.rules, tensor), plan.placement.fitted.get(tensor)
        array = arrays.pop(tensor, None)
        if declared is None:
            rows.append((tensor, "none", "", "", "", ""))
        elif fitted is None:
            rows.append((tensor, spec_text(declared), "not in this call", "", "", ""))
        else:
            size = bytes_text(fitted.local_bytes) if array is None else _size(plan, array)
            shapes = _shape(fitted.shape), _shape(fitted.local_shape)
            rows.append((tensor, spec_text(declared), spec_text(fitted.spec), *shapes, size))
    for name, array in arrays.items():
        operand = plan.problem.operand(name)
        declared = f"as {name.removesuffix('_scale')}" if name in plan.problem.scales else "none"
        if operand is not None and operand.declared is not None:
            declared = spec_text(operand.declared)
        shapes = _shape(array.shape), _shape(array.device_shape)
        rows.append((name, declared, spec_text(array.spec), *shapes, _size(plan, array)))
    return rows


def dropped_lines(plan: PlanFields, *, brief: bool = False) -> list[str]:
    """One line per dropped mesh axis, dimension and reason, with the tensors; harmless ones come last.

    `brief` leaves out axes that split nothing anyway: standard axes that the mesh doesn't have, axes of size 1, Manual axes.
    """
    if not plan.problem.mesh:
        return []  # without a mesh nothing can be split
    could = {axis.name for axis in plan.problem.mesh if axis.splits}
    groups: dict[tuple[bool, str, str, str, str], list[str]] = {}
    for drop in plan.placement.fitted.dropped:
        if brief and drop.harmless and drop.axis not in could:
            continue
        key = (drop.harmless, drop.axis, drop.dim, drop.reason, "" if drop.harmless else f". {drop.hint}")
        groups.setdefault(key, []).append(drop.tensor)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [
        f"axis {axis!r} of {dim} in {', '.join(tensors)}: {reason}{hint}."
        for (_, axis, dim, reason, hint), tensors in ordered
    ]


def decision_rows(plan: PlanFields) -> list[tuple[str, str]]:
    """Labelled lines of what was requested and how it runs: everything except reasons, tensors and notes."""
    problem = plan.problem
    rows = [
        ("platform", f"{problem.platform}, from {problem.platform_source}"),
        ("mask", problem.mask.describe()),
        ("scale", f"{problem.softmax_scale:.6g}, softmax in {problem.softmax_dtype}"),
    ]
    if problem.logits_soft_cap is not None:
        rows.append(("soft cap", f"{problem.logits_soft_cap:g}"))
    if problem.score is not None:
        rows.append(("score", problem.score.describe()))
    if problem.dropout_prob > 0:
        rows.append(("dropout", f"{problem.dropout_prob:g}"))
    if fields := _config(plan):
        rows.append(("config", ", ".join(fields)))
    if plan.tuning is not None:
        rows.append(("tuning", f"{plan.tuning.source}: {plan.tuning.why}"))
    if plan.route is not None:
        rows.append(("route", plan.route.describe()))
    if plan.padding is not None:
        pad = plan.padding
        waste = f"{pad.waste:.1%} of the work is on padding"
        rows.append(("padding", f"per device q +{pad.q_len}, kv +{pad.kv_len}: {waste}"))
    return rows


def placement_rows(plan: PlanFields, *, brief: bool = True) -> list[tuple[str, str]]:
    """Rows for dropped mesh axes, for axes over which work is repeated, for changes of placement inside the operation, and for
    what is sent."""
    rows = [("dropped", line) for line in dropped_lines(plan, brief=brief)]
    rows += [("repeated", line) for line in repeated_lines(plan.placement.repeated)]
    rows += [("inside", change) for change in plan.placement.changes]
    sent = sends_line(plan)
    return rows + ([("sends", sent)] if sent else [])


def screen_rows(
    plan: PlanFields, notes: tuple[str, ...] = (), whole: str = "explain(verbose=True)"
) -> list[tuple[str, str]]:
    """The rows of one screen, after what runs: reasons, fields that were chosen, specs of split tensors, notes that matter.

    `notes` come after the plan's own. The last row names what is left out; `whole` says how to get it.
    """
    rows = [("not", f"{r.implementation}: {reason}") for r in plan.rejected for reason in r.reasons]
    chosen = [line for line in _config(plan) if line.origin != "default"]
    default = len(_config(plan)) - len(chosen)
    hidden = []
    for label, line in decision_rows(plan):
        if label == "config":
            rows += [("config", ", ".join(chosen))] if chosen else []
            hidden += _counted(default, "default of the config", "defaults of the config")
        elif label == "route" and plan.route is not None:
            rows.append((label, f"{plan.route.name}: {plan.route.why}"))
            hidden.append("the route's sizes")
        elif _asks(plan, label):
            rows.append((label, line))
        else:
            hidden.append(label)
    rows += [*_array_rows(plan), *placement_rows(plan)]
    all_notes = [*plan.notes, *notes]
    rows += [("note", note) for note in all_notes if not is_info(note)]
    hidden += ["declared specs"]
    hidden += _counted(len(dropped_lines(plan)) - len(dropped_lines(plan, brief=True)), "harmless drop")
    hidden += _counted(sum(is_info(note) for note in all_notes), "note")
    return [*rows, ("more", f"{whole} adds {', '.join(hidden)}")]


def explain(plan: PlanFields, *, verbose: bool) -> str:
    """Return the decision as plain text."""
    problem = plan.problem
    lines = [problem.describe(), f"runs      {plan.implementation or 'nothing'} ({WHY[plan.kind]})"]
    if not verbose:
        return "\n".join([*lines, *(f"{label:<9} {line}" for label, line in screen_rows(plan))])
    lines += [f"{label:<9} {line}" for label, line in decision_rows(plan)]
    for rejected in plan.rejected:
        lines.append(f"not       {rejected.implementation}:")
        lines.extend(f"            {reason}" for reason in rejected.reasons)
    lines.append("tensors   declared -> fitted, shape -> per device, bytes per device")
    for tensor, declared, fitted, shape, local, size in tensor_rows(plan):
        where = declared if declared == fitted or not fitted else f"{declared} -> {fitted}"
        lines.append(f"  {tensor:<15} {where}" + (f"  {shape} -> {local}  {size}" if shape else ""))
    rows = placement_rows(plan, brief=False)
    lines += [f"  dropped: {line}" if label == "dropped" else f"{label:<9} {line}" for label, line in rows]
    lines.extend(f"note      {note}" for note in plan.notes)
    return "\n".join(lines)


def _config(plan: PlanFields) -> list[ConfigLine]:
    """The config lines, for the fields that the method reads."""
    if plan.runs is None or not plan.runs.reads(plan.config):
        return []
    return config_lines(plan.config, plan.problem.config, {} if plan.tuning is None else plan.tuning.fields)


def _array_rows(plan: PlanFields) -> list[tuple[str, str]]:
    """On a mesh, names, spec, shapes and bytes of the call's arrays; those with the same placement share a row. Else the bytes of
    the large ones. An array without a declared spec is left out if it is small.
    """
    large = large_arrays(plan)
    if plan.problem.devices == 1:
        alike: dict[str, list[str]] = {}
        for array in large:
            alike.setdefault(_size(plan, array), []).append(array.name)
        texts = [f"{', '.join(names)} {size}{' each' * (len(names) > 1)}" for size, names in alike.items()]
        total = sum(array.device_bytes for array in call_arrays(plan))
        return [("arrays", f"{bytes_text(total)}: {'; '.join(texts)}")]
    rows: dict[str, list[str]] = {}
    for array in call_arrays(plan):
        captured = (operand := plan.problem.operand(array.name)) is not None and operand.operand.feature == "score"
        if plan.placement.fitted.get(array.name) is None and array not in large and not captured:
            continue
        where = f"{spec_text(array.spec)}  {_shape(array.shape)} -> {_shape(array.device_shape)}, {_size(plan, array)}"
        if array.inside is not None and array.name not in _EXPLAINED and array.inside[1] != array.device_bytes:
            where += f"; inside {spec_text(array.inside[0])}, {bytes_text(array.inside[1])}"
        rows.setdefault(where, []).append(array.name)
    return [("specs", f"{', '.join(names)}: {line}") for line, names in rows.items()]


def _size(plan: PlanFields, array: CallArray) -> str:
    """Bytes per device, and the dtype if it isn't the query's."""
    dtype = "" if array.dtype == plan.problem.input_dtype else f" of {array.dtype}"
    return f"{bytes_text(array.device_bytes)}{dtype}"


def _asks(plan: PlanFields, label: str) -> bool:
    """Whether a line of the decision belongs on one screen."""
    if label == "padding":
        return plan.padding is not None and plan.padding.waste >= _WASTE
    if label == "tuning":
        return plan.tuning is not None and plan.tuning.source != "heuristic"
    if label == "scale":
        return not math.isclose(plan.problem.softmax_scale, plan.problem.head_dim**-0.5)
    return True


def _counted(count: int, name: str, names: str = "") -> list[str]:
    return [f"{count} {name if count == 1 else names or name + 's'}"] if count else []


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
