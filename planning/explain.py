"""A plan as text that a person reads: what runs, why, why not the others, and where every tensor lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from ..sharding import AttnShardingRules
from .repeated import repeated_lines

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["bytes_text", "config_lines", "dropped_lines", "explain", "fields_text", "spec_text", "tensor_rows"]

_WHY = {
    "platform": "the platform's own implementation",
    "native": "dispatch: nothing better is written for this platform",
    "routed": "dispatch: the platform's own implementation leaves such calls to it",
    "fallback": "FALLBACK: the platform's own implementation refused",
    "refused": "REFUSED: no implementation may run this",
}


def spec_text(spec: PartitionSpec) -> str:
    """`P(fsdp+dp, sp, tp, -)`: axes of one dimension joined by +, - for unsplit."""

    def entry(axes: str | tuple[str, ...] | None) -> str:
        return "-" if axes is None else axes if isinstance(axes, str) else "+".join(axes) or "-"

    return f"P({', '.join(entry(axes) for axes in spec)})"


def bytes_text(count: float) -> str:
    """`12.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def fields_text(fields: Mapping[str, Any]) -> str:
    """`block_q=512, block_kv=256`."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def tensor_rows(plan: Plan) -> list[tuple[str, str, str, str, str, str]]:
    """Rows (tensor, declared spec, fitted spec, shape, per-device shape, per-device bytes) of the ten tensors and of scales."""
    rows = []
    for tensor in AttnShardingRules._fields:
        declared, fitted = getattr(plan.problem.rules, tensor), plan.placement.fitted.get(tensor)
        if declared is None:
            rows.append((tensor, "none", "", "", "", ""))
        elif fitted is None:
            rows.append((tensor, spec_text(declared), "not in this call", "", "", ""))
        else:
            rows.append(
                (
                    tensor,
                    spec_text(declared),
                    spec_text(fitted.spec),
                    _shape(fitted.shape),
                    _shape(fitted.local_shape),
                    bytes_text(fitted.local_bytes),
                )
            )
    for name in plan.problem.scales:
        fitted = plan.placement.fitted[name]
        shapes = _shape(fitted.shape), _shape(fitted.local_shape), bytes_text(fitted.local_bytes)
        rows.append((name, f"as {name.removesuffix('_scale')}", spec_text(fitted.spec), *shapes))
    return rows


def config_lines(plan: Plan) -> list[str]:
    """`block_q=512 (declared)` and so on, every field of the resolved config: what is declared first, then what is tuned."""
    declared = plan.problem.config
    tuned = {} if plan.tuning is None else plan.tuning.fields

    def origin(name: str) -> str:
        return "declared" if declared.is_set(name) else "tuned" if name in tuned else "default"

    fields = [name for name in type(plan.config).model_fields if name not in ("operation", "schema_version")]
    return [
        f"{name}={getattr(plan.config, name)} ({origin(name)})"
        for name in sorted(fields, key=lambda name: (not declared.is_set(name), name not in tuned))
    ]


def dropped_lines(plan: Plan, *, brief: bool = False) -> list[str]:
    """One line per dropped mesh axis, dimension and reason, naming the tensors; harmless ones come last.

    `brief` leaves out axes that split nothing anyway: a standard one that the mesh doesn't have, one of size 1, a Manual one.
    """
    if not plan.problem.mesh:
        return []  # without a mesh there is nothing that could be split
    could = {axis.name for axis in plan.problem.mesh if axis.size > 1 and axis.kind != "manual"}
    groups: dict[tuple[bool, str, str, str, str], list[str]] = {}
    for drop in plan.placement.fitted.dropped:
        if brief and drop.harmless and drop.axis not in could:
            continue
        key = (drop.harmless, drop.axis, drop.dim, drop.reason, "" if drop.harmless else f". {drop.mend}")
        groups.setdefault(key, []).append(drop.tensor)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [
        f"axis {axis!r} of {dim} in {', '.join(tensors)}: {reason}{mend}."
        for (_, axis, dim, reason, mend), tensors in ordered
    ]


def explain(plan: Plan) -> str:
    """Return the whole decision as plain text."""
    problem, placement = plan.problem, plan.placement
    lines = [
        problem.describe(),
        f"runs      {plan.implementation or 'nothing'} ({_WHY[plan.kind]})",
        f"platform  {problem.platform}, from {problem.platform_source}",
        f"mask      {problem.mask.describe()}",
        f"scale     {problem.softmax_scale:.6g}, softmax in {problem.softmax_dtype}",
    ]
    if problem.logits_soft_cap is not None:
        lines.append(f"soft cap  {problem.logits_soft_cap:g}")
    reads = plan.method is not None and problem.operation.reads_config(plan.method)
    if reads and (fields := config_lines(plan)):
        lines.append("config    " + ", ".join(fields))
    if plan.tuning is not None:
        lines.append(f"tuning    {plan.tuning.source}: {plan.tuning.why}")
    if plan.route is not None:
        lines.append(f"route     {plan.route.describe()}")
    if plan.padding is not None:
        pad = plan.padding
        lines.append(
            f"padding   per device q +{pad.q_len}, kv +{pad.kv_len}: {pad.waste:.1%} of the work is on padding"
        )
    for rejected in plan.rejected:
        lines.append(f"not       {rejected.implementation}:")
        lines.extend(f"            {reason}" for reason in rejected.reasons)
    lines.append("tensors   declared -> fitted, shape -> per device, bytes per device")
    for tensor, declared, fitted, shape, local, size in tensor_rows(plan):
        where = declared if declared == fitted or not fitted else f"{declared} -> {fitted}"
        lines.append(f"  {tensor:<15} {where}" + (f"  {shape} -> {local}  {size}" if shape else ""))
    lines.extend(f"  dropped: {text}" for text in dropped_lines(plan))
    lines.extend(f"repeated  {text}" for text in repeated_lines(placement.repeated))
    lines.extend(f"inside    {change}" for change in placement.changes)
    lines.extend(f"note      {note}" for note in plan.notes)
    return "\n".join(lines)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
