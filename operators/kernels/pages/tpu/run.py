"""One Pallas call over a list of work items, with scalars, the pages' ring and everything else by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .....compat import varying_as
from ...varying import vary, varying
from .geometry import Geometry, Options
from .pages import page_scratch

__all__ = ["call", "counts"]


def counts(arrays: Mapping[str, jax.Array], count: jax.Array) -> jax.Array:
    """How many work items there are, and after it which of the devices with pages in turn this is, if there are several."""
    return jnp.stack([count, *([arrays["shard"].reshape(())] if "shard" in arrays else [])])


def call(
    name: str,
    kernel: Any,
    geometry: Geometry,
    options: Options,
    scalars: dict[str, jax.Array],
    inputs: dict[str, tuple[jax.Array, pl.BlockSpec]],
    outputs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    out_specs: list[pl.BlockSpec],
    scratch: dict[str, Any],
    count: jax.Array,
    same: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Run a kernel over the work items; it gets its refs by name. same: inputs whose memory an output takes over, by name."""
    scratch = scratch | page_scratch(geometry, options)
    names = (*scalars, *inputs, *outputs, *scratch)
    arrays = [*scalars.values(), *(x for x, _ in inputs.values())]
    input_names, made_by = [*scalars, *inputs], list(outputs)
    axes = varying(arrays)
    arrays = [vary(x, axes) for x in arrays]
    results = pl.pallas_call(
        lambda *refs: kernel(dict(zip(names, refs, strict=True)), geometry, options),
        out_shape=[varying_as(arrays[0], s, d) for s, d in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(count, 1),),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=out_specs,
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.ARBITRARY,),
            vmem_limit_bytes=options.vmem_limit_bytes,
            disable_bounds_checks=True,  # a third of what a copy costs to start; ids are checked in pages.py
        ),
        input_output_aliases={input_names.index(a): made_by.index(b) for a, b in (same or {}).items()},
        interpret=options.interpret,
        name=name,
    )(*arrays)
    return dict(zip(outputs, results, strict=True))
