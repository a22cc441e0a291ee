"""The kernels of each pass of splash, and their sizes in a resolved config."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from ...planning import PassSizes
from .kernel.splash_blocks import ExternalBlocks, PassBlocks
from .pass_fields import DKV, DQ, FORWARD, FUSED, PassFields
from .splash_config import LANES, SplashConfig

__all__ = ["blocks_of", "pass_blocks", "passes_of", "splash_passes"]

_Blocks = TypeVar("_Blocks", bound=ExternalBlocks)


def passes_of(config: SplashConfig, backward: bool) -> tuple[PassFields, ...]:
    """The forward pass, or the backward passes."""
    if not backward:
        return (FORWARD,)
    return (FUSED,) if config.use_fused_bwd_kernel else (DKV, DQ)


def pass_blocks(config: SplashConfig, pass_fields: PassFields) -> PassBlocks:
    """A pass's sizes; a kernel's default for those that are None."""

    def size(fields: tuple[str, ...], number: int) -> Any:
        return getattr(config, fields[number]) if number < len(fields) else None

    block_q, block_kv = (size(fields, 0) or LANES for fields in (pass_fields.queries, pass_fields.keys))
    compute_q, compute_kv = size(pass_fields.queries, 1) or block_q, size(pass_fields.keys, 1) or block_kv
    pipeline_depth = 0 if pass_fields.pipeline_depth is None else getattr(config, pass_fields.pipeline_depth) or 0
    return PassBlocks(block_q, block_kv, compute_q, compute_kv, pipeline_depth)


def blocks_of(config: SplashConfig, kind: type[_Blocks]) -> _Blocks:
    """A resolved config in the form of a kernel: the blocks of its passes, and the other fields by their names."""
    passes: dict[str, Any] = {
        "forward": pass_blocks(config, FORWARD),
        "dkv": pass_blocks(config, DKV),
        "dq": None if config.use_fused_bwd_kernel else pass_blocks(config, DQ),
    }
    return kind(
        **passes, **{field.name: getattr(config, field.name) for field in fields(kind) if field.name not in passes}
    )


def splash_passes(config: SplashConfig, backward: bool) -> tuple[PassSizes, ...]:
    """The kernels of the forward pass, or of the backward pass without it, by a resolved config.

    Only attnops' own kernels leave out parts of tiles, and have a name in a program by which their schedule is found.
    """
    return tuple(_pass_sizes(config, pass_fields) for pass_fields in passes_of(config, backward))


def _pass_sizes(config: SplashConfig, pass_fields: PassFields) -> PassSizes:
    blocks = pass_blocks(config, pass_fields)
    sizes = PassSizes(pass_fields.products, blocks.block_q, blocks.block_kv, heads=config.heads_per_tile or 1)
    if config.kernel != "attnops":
        return sizes
    return sizes._replace(
        kernel=f"attnops_splash_{pass_fields.products}",
        compute_q=blocks.compute_q,
        compute_kv=blocks.compute_kv,
        pipelined=bool(blocks.pipeline_depth) and pass_fields is not DKV,
    )
