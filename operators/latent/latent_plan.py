"""LatentPlan: which form of latent attention runs and why, what the other would cost, and the plan of the attention inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ...planning import Plan
from ...planning.text import spec_text
from ...registry.latent_dims import Form, LatentDims
from ...sharding.mesh import AnyMesh
from .latent_operands import LATENT, names_of
from .work import Choice

__all__ = ["LatentPlan"]

_FORM = {
    "expanded": "keys and values are projected for each head",
    "absorbed": "one key head of latent and rotary key; values are its latents",
}


@dataclass(frozen=True)
class LatentPlan:
    """What was decided for a call of LatentAttention. choice: the form, and operations and bytes of both. inner: the plan of the
    attention between the projections."""

    dims: LatentDims
    choice: Choice
    inner: Plan

    @property
    def form(self) -> Form:
        """'expanded' or 'absorbed'."""
        return self.choice.form

    @property
    def reason(self) -> str:
        """Why this form runs."""
        times = f"{self.choice.other} would cost {self.choice.ratio:.3g} times as much"
        return f"declared; {times}" if self.choice.declared else times

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """The spec of each array, by name: heads are split as the query's. The latents have no heads, so the mesh axes that split
        heads repeat them."""
        problem, placement = self.inner.problem, self.inner.placement
        query, key = (
            _by_dim(placement.call_spec(name, problem.shape_of(name)), problem.layout) for name in ("query", "key")
        )
        axes = {"batch": query.get("b"), "q_len": query.get("t"), "heads": query.get("h"), "kv_len": key.get("t")}
        return MappingProxyType(
            {
                name: PartitionSpec(*(axes.get(dim) for dim in LATENT[name].split_dims(problem.layout)))
                for name in names_of(self.dims)
            }
        )

    def named_shardings(self, mesh: AnyMesh | None = None) -> Mapping[str, NamedSharding]:
        """The shardings of the arrays and of the output. Errors: ShardingError for a plan without a mesh, or for another mesh."""
        inner = self.inner.named_shardings(mesh)
        on = inner["query"].mesh
        arrays = {name: NamedSharding(on, spec) for name, spec in self.specs.items()}
        return MappingProxyType({**arrays, "output": inner["output"]})

    def explain(self, verbose: bool = False) -> str:
        """The decision as text, then that about the attention inside."""
        lines = [f"latent attention, {self.form}: {_FORM[self.form]}", f"  because {self.reason}"]
        for form in (self.form, self.choice.other):
            work = self.choice.work[form]
            lines.append(
                f"  {form}: {work.flops / 1e9:.3g} GFLOP, {work.moved_bytes / 2**20:.3g} MiB moved; "
                f"keys and values of a token take {work.cached_bytes} bytes"
            )
        if (query := self.choice.query) is not None and self.form == "absorbed":
            how = "multiplied first" if query.folded else "applied in turn"
            work = query.work[query.folded]
            lines.append(
                f"  projections of queries and keys are {how}: {work.flops / 1e9:.3g} GFLOP; the other way would cost "
                f"{query.ratio:.3g} times as much"
            )
        lines.append(f"  compared at {self.choice.operations_per_byte:.3g} operations per byte")
        lines += (
            [f"  {name}: {spec_text(spec)}" for name, spec in self.specs.items()] if self.inner.problem.mesh else []
        )
        return "\n".join([*lines, "", self.inner.explain(verbose)])

    def __str__(self) -> str:
        return self.explain()

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON-ready values."""
        return {
            "form": self.form,
            "declared": self.choice.declared,
            "ratio": self.choice.ratio,
            "operations_per_byte": self.choice.operations_per_byte,
            "work": {form: vars(work) for form, work in self.choice.work.items()},
            "fold_query": self.choice.folded,
            "dims": self.dims.model_dump(),
            "specs": {name: spec_text(spec) for name, spec in self.specs.items()},
            "attention": self.inner.to_dict(),
        }


def _by_dim(spec: PartitionSpec, layout: str) -> dict[str, Any]:
    return dict(zip(layout, (*spec, *(None for _ in range(len(layout) - len(spec)))), strict=True))
