"""RunnableLatent: a declared latent attention on this machine's devices, from its latents, for `attnops run` and for a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..operators.latent import LATENT, LatentAttention, LatentPlan, dim_sizes, names_of
from ..planning.score_operands import held_captures
from ..registry.declaration import Declaration
from ..registry.latent_dims import LatentDims
from .check import Comparison, check, tolerance_of
from .progress import ReportProgress
from .ran import Runnable
from .run_call import Compiled, compile_call
from .target import run_metadata

__all__ = ["RunnableLatent"]

_ROUNDED = 4  # queries, keys, values and outputs, besides what attention rounds
_BASE = 10_000.0


class RunnableLatent(Runnable):
    """Its arrays are drawn. `plan` is that of the attention inside, in the form that costs less. Errors: those of planning, and
    RefusedError if nothing can run it."""

    def __init__(self, declaration: Declaration, mesh: str | None, mode: str | None, seed: int) -> None:
        assert declaration.latent is not None
        self.dims, metadata = declaration.latent, run_metadata(declaration, mesh=mesh)
        dims = self.dims.model_dump()
        self.attend = LatentAttention(declaration.operation, **dims, metadata=metadata)
        self.expanded = LatentAttention(
            declaration.operation, **dims | {"form": "expanded", "fold_query": None}, metadata=metadata
        )
        inside = declaration.of_form("expanded")
        drawn = {name: x for name, x in inside.draw(seed).items() if name not in ("query", "key", "value")}
        shape = inside.shapes()["query"]
        sizes = dim_sizes(self.dims) | dict(zip(("batch", "q_len", "kv_len"), _lengths(inside), strict=True))
        self.latents = _drawn(self.dims, sizes, inside.call.layout, shape.dtype, seed)
        self.arrays = self.latents | drawn
        options = inside.call_arguments({"query": None, "key": None, "value": None} | drawn, mode=mode)
        static = {name: x for name, x in options.items() if name not in ("query", "key", "value", *drawn)}
        self.options = static | ({} if self.dims.query_latent_dim is None else {"q_nope": None, "q_rope": None})
        plan: LatentPlan = self.attend.plan(**self.arrays, **self.options)
        self.latent, self.plan = plan, plan.inner.require()
        self.score, self.mesh = inside.call.score, metadata.mesh
        self.notes = (f"inputs drawn at random, seed {seed}",)

    def compile(self) -> Compiled:
        def placed(name: str, x: Any) -> jax.Array:
            if not isinstance(self.mesh, Mesh):
                return jax.device_put(x)
            inside = self.latent.inner.placement
            spec = self.latent.specs[name] if name in LATENT else inside.call_spec(name, x.shape)
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        arrays = {name: placed(name, x) for name, x in self.arrays.items()}
        return compile_call(lambda arrays: self.attend(**arrays, **self.options), (arrays,))

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        """Against the float64 reference of each head's queries, keys and values."""
        plan: LatentPlan = self.expanded.plan(**self.arrays, **self.options)
        problem = plan.inner.problem
        wide = replace(plan.inner, problem=replace(problem, runtime_dtype="float64"))
        arrays = held_captures(self.score, problem.q_heads) | self.arrays
        arrays |= dict(zip(("query", "key", "value"), _heads(self.dims, self.latents, problem.layout), strict=True))
        published = tolerance_of(self.latent.inner)
        tolerance = None if published is None else _ROUNDED * published
        remark = "" if published is not None else f"no tolerance is published for {problem.runtime_dtype}"
        compared = check(wide, output, arrays, progress=progress)
        return [one._replace(tolerance=tolerance, remark=remark) for one in compared]


def _lengths(inside: Declaration) -> tuple[int, int, int]:
    sizes = inside.call.sizes()
    return sizes["batch"], sizes["q_len"], sizes["kv_len"]


def _drawn(dims: LatentDims, sizes: dict[str, int], layout: str, dtype: Any, seed: int) -> dict[str, np.ndarray]:
    """Normal numbers, of projections divided by the root of what they sum over, and the angles of a model's rotary positions."""
    random, arrays = np.random.default_rng([seed, 1]), dict[str, np.ndarray]()
    for name in names_of(dims):
        shape = LATENT[name].shape(sizes, layout)
        if name in ("q_cos", "q_sin"):
            half = sizes["rope_dim / 2"]
            angles = np.outer(np.arange(sizes["q_len"]), _BASE ** (-np.arange(half) / half))
            turned = np.broadcast_to((np.cos if name == "q_cos" else np.sin)(angles), shape)
            arrays[name] = np.asarray(turned, np.float32).astype(dtype)
            continue
        drawn = random.standard_normal(shape, np.float32)
        summed = np.sqrt(np.float32(shape[0])) if name.startswith("w_") else np.float32(1)
        arrays[name] = (drawn / summed).astype(dtype)
    return arrays


def _heads(dims: LatentDims, arrays: dict[str, np.ndarray], layout: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, key and value of each head in float64, in the layout."""
    wide = {name: np.asarray(jnp.asarray(x, jnp.float32), np.float64) for name, x in arrays.items()}
    flat = layout.replace("h", "").replace("d", "c")
    if dims.query_latent_dim is None:
        query = np.concatenate([wide["q_nope"], wide["q_rope"]], -1)
    else:
        query = np.einsum(f"{flat},chd->{layout}", wide["query_latent"], wide["w_uq"])
        cos, sin = (np.expand_dims(wide[name], layout.index("h")) for name in ("q_cos", "q_sin"))
        rope = query[..., dims.nope_dim :]
        apart = dims.rope_pairs == "interleaved"
        first, second = (rope[..., ::2], rope[..., 1::2]) if apart else np.split(rope, 2, -1)
        turned = first * cos - second * sin, second * cos + first * sin
        joined = np.stack(turned, -1).reshape(rope.shape) if apart else np.concatenate(turned, -1)
        query = np.concatenate([query[..., : dims.nope_dim], joined], -1)
    key, value = (np.einsum(f"{flat},chd->{layout}", wide["latent"], wide[name]) for name in ("w_uk", "w_uv"))
    shared = np.expand_dims(wide["rope_key"], layout.index("h"))
    shared = np.broadcast_to(shared, (*key.shape[:-1], dims.rope_dim))
    return query, np.concatenate([key, shared], -1), value
