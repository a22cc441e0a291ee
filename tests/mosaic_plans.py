"""Plans of calls for GPUs that aren't here, and reports of calls compiled for them: what tests of kernels in Mosaic GPU share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from attnops import T5, Causal, OperationMetadata, OperationRegistry, Positions, RelativeBias, RelativeBias2D
from attnops.compat import abstract_device
from attnops.verify.call import verify_call
from attnops.verify.report import TargetReport
from attnops.verify.targets import target_of

A100, H100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"
B200, GB200 = "NVIDIA B200", "NVIDIA GB200"


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _by_positions(length: int) -> dict[str, Any]:
    """By arrays of positions there is no number for each distance of two indices."""
    places = _shape(2, length, dtype="int32")
    return {
        "score": RelativeBias(buckets=T5()), "table": _shape(32, 32), "mask": Positions(places, places), "query_offset": None,
    }  # fmt: skip


# Scores that read a number for each pair, for 32 heads and as many queries and keys.
GATHERED: dict[str, Callable[[int], dict[str, Any]]] = {
    "buckets of positions": _by_positions,
    "grid": lambda length: {
        "score": RelativeBias2D(grid=(length // 64, 64)), "table": _shape((length // 32 - 1) * 127, 32),
    },
    "decomposed": lambda length: {
        "score": RelativeBias2D(grid=(length // 64, 64), decomposed=True),
        "height": _shape(2, 32, length, length // 64), "width": _shape(2, 32, length, 64),
    },
}  # fmt: skip


def _arrays(
    batch: int, dims: tuple[int, int], lengths: tuple[int, int], heads: tuple[int, int], dtype: str
) -> dict[str, Any]:
    shapes = {"query": (lengths[0], heads[0], dims[0]), "key": (lengths[1], heads[1], dims[0])}
    shapes["value"] = lengths[1], heads[1], dims[1]
    return {name: jax.ShapeDtypeStruct((batch, *shape), dtype) for name, shape in shapes.items()}


def mosaic_plan(
    kind: str,
    operation: str = "flash_attn2",
    *,
    dims: tuple[int, int] = (128, 128),
    lengths: tuple[int, int] = (2048, 2048),
    heads: tuple[int, int] = (32, 8),
    config: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    call: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """The plan of a causal call on one GPU of this kind, whose queries are the last tokens. fields: of the metadata."""
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, "gpu"))
    metadata = OperationMetadata(
        mesh=mesh, operation_configs={"flash_attn2": config or {}}, tuning="off", runtime_dtype=dtype, **fields
    )
    given = _arrays(2, dims, lengths, heads, dtype)
    given |= {"mask": Causal(), "query_offset": lengths[1] - lengths[0]} | (call or {})
    return OperationRegistry.create(operation, metadata).plan(**given)


def codes_against(plan: Any, method: str) -> set[str]:
    """The codes of the reasons against a method."""
    reasons = (one.reasons for one in plan.rejected if one.implementation.endswith(f".{method}"))
    return {reason.code for some in reasons for reason in some}


def mosaic_report(
    target: str,
    *,
    dims: tuple[int, int] = (128, 128),
    lengths: tuple[int, int] = (1024, 1024),
    heads: tuple[int, int] = (4, 2),
    dtype: str = "bfloat16",
    mode: str = "prefill",
    operation: str = "flash_attn2",
    config: dict[str, Any] | None = None,
    sizes: dict[str, int] | None = None,
    **call: Any,
) -> TargetReport:
    """The report of a causal call with kernels in Mosaic GPU, compiled for a target such as h100:2."""
    wanted = target_of(target)
    configs = {"flash_attn2": {"kernel": "mosaic"} | (config or {})}
    metadata = OperationMetadata(
        mesh=wanted.mesh(sizes or {"fsdp": wanted.count}), fallback="error", tuning="off", runtime_dtype=dtype,
        operation_configs=configs,
    )  # fmt: skip
    given = _arrays(1, dims, lengths, heads, dtype) | {"mask": Causal(), "query_offset": 0, "mode": mode} | call
    return verify_call(OperationRegistry.create(operation, metadata), given, target)
