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
from .latent_operands import LATENT
from .latent_plan import LatentPlan
from .work import Choice, form_note

__all__ = ["form_notes", "projection_needs"]


def form_notes(dims: LatentDims, choice: Choice, plan: Plan) -> tuple[str, ...]:
    """The notes of the plan of the attention inside: its form, and what its keys take if a strategy sends them."""
    split, of_form = plan.placement.sequence, form_note(choice)
    if plan.implementation is None or not (split.gathers or split.ring_axes):
        return (of_form,)
    sent = sum(need.sent_bytes for need in min_traffic(plan, False).needs if need.what.split()[0] in ("key", "value"))
    columns = {}
    for form in FORMS:
        heads, head_dim, value_dim = dims.inner(form)
        columns[form] = (plan.placement.local.q_heads if heads > 1 else 1) * (head_dim + value_dim)
    other_sent = round(sent * columns[choice.other] / columns[choice.form])
    return of_form, note(
        "latent.sent_keys", form=choice.form, sent=round(sent), other=choice.other, other_sent=other_sent
    )


def projection_needs(plan: LatentPlan) -> tuple[Need, ...]:
    """The needs of the backward pass; the forward pass has none, as each device projects its own tokens for its own heads.

    Gradients of w_uk and w_uv are summed over the axes that split tokens, which a compiler may do one dimension after the other.
    Those of the latents and rotary keys of the expanded form are summed over the axes that split heads, and a latent's has two
    parts, of keys and of values, which a compiler may add before or after; in the absorbed form the attention inside does it.
    """
    return tuple(need for need in _needs(plan) if need.sent_bytes)


def _needs(plan: LatentPlan) -> Iterator[Need]:
    problem, specs = plan.inner.problem, plan.specs
    of_axis = {axis.name: axis.size for axis in problem.mesh}
    item = sent_itemsize(problem.runtime_dtype, problem.platform == "cpu")
    sizes = {name: getattr(plan.dims, name) for name in ("heads", "nope_dim", "rope_dim", "value_dim", "latent_dim")}
    sizes |= {"batch": problem.batch, "q_len": problem.q_len, "kv_len": problem.kv_len}

    def split(name: str) -> list[tuple[str, ...]]:
        return [axes for at in range(len(specs[name])) if (axes := axes_at(specs[name], at))]

    def share(axes: Sequence[str]) -> float:
        """Of its part of an array, what a device sends to sum it."""
        count = math.prod(of_axis[axis] for axis in axes)
        return 2 * (count - 1) / count

    def local(name: str) -> float:
        parts = math.prod(of_axis[axis] for axes in split(name) for axis in axes)
        return math.prod(sizes[dim] for dim in LATENT[name].dims) * item / parts

    heads = tuple(axis for axes in split("w_uk") for axis in axes)
    multiplied = split("q_nope" if plan.form == "absorbed" else "latent")
    tokens = [axes for part in multiplied if (axes := tuple(axis for axis in part if axis not in heads))]
    over = tuple(axis for axes in tokens for axis in axes)
    for name in ("w_uk", "w_uv"):
        what, least = f"gradient of {name}", local(name) * share(over)
        yield Need("all-reduce", least, what, axes=over)
        apart = local(name) * sum(map(share, tokens)) - least
        yield Need("all-reduce", apart, f"{what}, one dimension after the other", True, over)
    if plan.form == "expanded" and heads:
        for name in ("latent", "rope_key"):
            yield Need("all-reduce", local(name) * share(heads), f"gradient of {name}", axes=heads)
        yield Need("all-reduce", local("latent") * share(heads), "gradient of latent, in two parts", True, heads)
