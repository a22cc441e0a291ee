"""What a latent attention sends: its keys, in one form or the other, and the gradients of its projections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...planning import Plan
from ...planning.notes import note
from ...planning.placed_tensors import sent_itemsize
from ...planning.traffic import Need, min_traffic
from ...registry.latent_dims import FORMS, LatentDims
from ...sharding import axes_at
from ...sharding.modes import canonical_mode
from .latent_operands import LATENT, dim_sizes
from .latent_plan import LatentPlan
from .work import Choice, form_note, query_notes

__all__ = ["form_notes", "projection_needs"]


def form_notes(dims: LatentDims, choice: Choice, plan: Plan) -> tuple[str, ...]:
    """The notes of the plan of the attention inside: its form, what the gradients of its projections send, and what its keys take
    if a strategy sends them."""
    split, notes = plan.placement.sequence, [form_note(choice), *query_notes(choice)]
    if plan.implementation is None or any(axis.kind == "manual" for axis in plan.problem.mesh):
        return tuple(notes)
    if plan.problem.mode == canonical_mode("train"):
        around = projection_needs(LatentPlan(dims, choice, plan))
        if total := round(sum(need.sent_bytes for need in around if not need.optional)):
            notes.append(note("latent.gradients", sent=total))
    if split.gathers or split.ring_axes:
        sent = sum(
            need.sent_bytes for need in min_traffic(plan, False).needs if need.what.split()[0] in ("key", "value")
        )
        columns = {}
        for form in FORMS:
            heads, head_dim, value_dim = dims.inner(form)
            token = head_dim + value_dim if form == "expanded" else head_dim
            columns[form] = (plan.placement.local.q_heads if heads > 1 else 1) * token
        other_sent = round(sent * columns[choice.other] / columns[choice.form])
        form, other = choice.form, choice.other
        notes.append(note("latent.sent_keys", form=form, sent=round(sent), other=other, other_sent=other_sent))
    return tuple(notes)


def projection_needs(plan: LatentPlan) -> tuple[Need, ...]:
    """The needs of the backward pass; the forward pass has none, as each device projects its own tokens for its own heads.

    Gradients of w_uk and w_uv are summed over the axes that split tokens, which a compiler may do one dimension after the other.
    Those of the latents and rotary keys of the expanded form are summed over the axes that split heads, and a latent's has two
    parts, of keys and of values, which a compiler may add before or after; in the absorbed form the attention inside does it.
    Queries that are made of latents have the same of w_uq and of their latents. Folded, the gradient of the weight that
    multiplies them is summed, which is that of w_uk and of w_uq's nope part.
    """
    return tuple(need for need in _needs(plan) if need.sent_bytes)


def _needs(plan: LatentPlan) -> Iterator[Need]:
    problem, specs = plan.inner.problem, plan.specs
    of_axis = {axis.name: axis.size for axis in problem.mesh}
    item = sent_itemsize(problem.runtime_dtype, problem.platform == "cpu")
    sizes = dim_sizes(plan.dims)
    sizes |= {"batch": problem.batch, "q_len": problem.q_len, "kv_len": problem.kv_len}

    def split(name: str) -> list[tuple[str, ...]]:
        return [axes for at in range(len(specs[name])) if (axes := axes_at(specs[name], at))]

    def share(axes: Sequence[str]) -> float:
        """Of its part of an array, what a device sends to sum it."""
        count = math.prod(of_axis[axis] for axis in axes)
        return 2 * (count - 1) / count

    def local(name: str, dims: Sequence[str] | None = None) -> float:
        parts = math.prod(of_axis[axis] for axes in split(name) for axis in axes)
        return math.prod(sizes[dim] for dim in dims or LATENT[name].dims) * item / parts

    heads = tuple(axis for axes in split("w_uk") for axis in axes)

    def weight(what: str, size: float, rows: str) -> Iterator[Need]:
        """Of a weight that multiplies rows of an array."""
        tokens = [axes for part in split(rows) if (axes := tuple(axis for axis in part if axis not in heads))]
        over = tuple(axis for axes in tokens for axis in axes)
        least = size * share(over)
        yield Need("all-reduce", least, what, axes=over)
        apart = size * sum(map(share, tokens)) - least
        yield Need("all-reduce", apart, f"{what}, one dimension after the other", True, over)

    made = plan.dims.query_latent_dim is not None
    queries = "query_latent" if made else "q_nope"
    rows = queries if plan.form == "absorbed" else "latent"
    folded = plan.choice.folded
    yield from () if folded else weight("gradient of w_uk", local("w_uk"), rows)
    yield from weight("gradient of w_uv", local("w_uv"), rows)
    if folded:
        size = local("w_uq", ("query_latent_dim", "heads", "latent_dim"))
        yield from weight("gradient of w_uq times w_uk", size, queries)
        size = local("w_uq", ("query_latent_dim", "heads", "rope_dim"))
        yield from weight("gradient of w_uq's rotary part", size, queries)
    elif made:
        yield from weight("gradient of w_uq", local("w_uq"), queries)
    if made and heads:
        yield Need("all-reduce", local(queries) * share(heads), "gradient of query_latent", axes=heads)
        yield Need("all-reduce", local(queries) * share(heads), "gradient of query_latent, in two parts", True, heads)
    if plan.form == "expanded" and heads:
        for name in ("latent", "rope_key"):
            yield Need("all-reduce", local(name) * share(heads), f"gradient of {name}", axes=heads)
        yield Need("all-reduce", local("latent") * share(heads), "gradient of latent, in two parts", True, heads)
