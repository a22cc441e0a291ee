"""Steps over pages compiled for described GPUs: shapes of served models."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnops import Clip, OperationMetadata, OperationRegistry, RelativeBias, RelativeBias2D
from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep
from attnops.operators.paged.declared_step import declared_step
from attnops.operators.paged.mosaic_kernel import BLACKWELL_PAGES, HOPPER_PAGES, MosaicPages
from attnops.registry.declaration import Declaration
from attnops.scores import Score
from attnops.verify.gpu.gpu_kernels import GpuKernelUse
from attnops.verify.paged_step import PlannedStep
from attnops.verify.passes import target_reports
from attnops.verify.targets import target_of

LATENT = {"kind": "latent", "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64}
# (query heads, the cache) of layers of served models.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-3-8b": (32, {"kv_heads": 8, "head_dim": 128}),
    "llama-3.2-1b": (32, {"kv_heads": 8, "head_dim": 64}),
    "llama-3-70b, a device of 8": (8, {"kv_heads": 1, "head_dim": 128}),
    "qwen-2.5-7b": (28, {"kv_heads": 4, "head_dim": 128}),
    "gemma-2-9b": (16, {"kv_heads": 8, "head_dim": 256}),
    "gpt-oss-20b": (64, {"kv_heads": 8, "head_dim": 64}),
    "phi-3-like heads of 96": (32, {"kv_heads": 8, "head_dim": 96}),
    "latents of 288": (32, LATENT | {"head_dim": 288, "value_dim": 256}),
    "deepseek-v3": (128, LATENT),
}
# What a step can have beside its arrays; a dtype is the cache's too.
FEATURES: tuple[dict[str, Any], ...] = (
    {"sliding_window": [100, 0]},
    {"logits_soft_cap": 20.0},
    {"softmax_aux": True},
    {"return_lse": True},
    {"draft_tree": 64},
    {"spans": 30, "prefix_lengths": 20},
    {"score": {"kind": "alibi"}},
    {"score": {"kind": "position_temperature"}, "q_positions": True},
    {"dtype": "float16"},
)
# Tables of 32 query heads, of which a number belongs to each pair.
TABLES: dict[str, Score] = {
    "t5": RelativeBias(np.ones((32, 32), np.float32)),
    "clip": RelativeBias(np.ones((128, 32), np.float32), Clip(127)),
    "grid": RelativeBias2D(grid=(64, 64), table=np.ones((127 * 127, 32), np.float32)),
}
# (the model, the dtype of its pages, their scales)
QUANTISED = (
    ("llama-3-8b", "int8", "token_head"),
    ("llama-3-8b", "int8", "head"),
    ("llama-3-8b", "float8_e4m3fn", "tensor"),
    ("llama-3.2-1b", "int8", "token_head"),
    ("phi-3-like heads of 96", "float8_e5m2", "token_head"),
    ("gemma-2-9b", "int8", "head"),
    ("latents of 288", "int8", "token_head"),
    ("deepseek-v3", "int8", "token_head"),
)


def declared(
    model: str,
    target: str,
    *,
    q_lens: Any = 1,
    cache: Any = (),
    sizes: dict[str, int] | None = None,
    update: str = "before",
    **step: Any,
) -> tuple[Any, Any]:
    """(the operation, a step over 8 sequences)."""
    heads, fields = MODELS[model]
    fields = (
        {"layers": 1, "page_size": 16, "pages": 2048, "max_sequences": 8, "max_length": 4096} | fields | dict(cache)
    )
    given = {"q_heads": heads, "kv_lens": 3000, "q_lens": q_lens, "sequences": 8} | step
    if q_lens == 1:
        given["max_q_len"] = 1
    if fields.get("kind") == "latent":
        given["softmax_scale"] = 0.1
    file = Declaration.from_dict({"operation": "paged", "cache": fields, "step": given})
    mesh = target_of(target).mesh(sizes or {"tp": 1})
    configs = {"mesh": mesh, "fallback": "error", "tuning": "off", "operation_configs": {"paged": {"update": update}}}
    operation = OperationRegistry.create("paged", OperationMetadata(**configs))
    assert file.cache is not None
    return operation, declared_step(file, file.cache.plan(mesh).require(), update)


def _of(target: str) -> MosaicPages:
    return BLACKWELL_PAGES if target.startswith("b200") else HOPPER_PAGES


def kernels(
    model: str,
    target: str = "h100",
    *,
    q_lens: Any = 1,
    step: dict[str, Any] | None = None,
    score: Score | None = None,
    **cache: Any,
) -> tuple[dict[str, GpuKernelUse], PageStep]:
    """(the kernels of a step by name, the sizes). score: with arrays, for which a file has no place."""
    operation, of_file = declared(model, target, q_lens=q_lens, cache=cache, **(step or {}))
    options = of_file.options | ({} if score is None else {"score": score})
    planned = PlannedStep(operation, of_file._replace(options=options))
    *_, report = target_reports(planned, target)
    assert [one.failure for one in report.passes] == [None]
    of = _of(target)
    assert report.plan.implementation == f"paged.forward_{of.name}"
    found = {k.name: k for k in report.passes[0].kernels or () if isinstance(k, GpuKernelUse)}
    return found, of.step_tiles(planned.paged.problem, planned.paged.config)


def check_written_in_place(target: str, model: str, cache: dict[str, Any], q_lens: Any, spilled: int) -> None:
    """The pages after a step with a fused update take the place of those before, and there is no room for a copy."""
    planned = PlannedStep(*declared(model, target, q_lens=q_lens, cache=cache, update="fused"))
    *_, report = target_reports(planned, target)
    (one,) = report.passes
    assert one.failure is None
    assert report.plan.implementation == f"paged.forward_{_of(target).name}"
    assert not {n.code for n in report.plan.notes} & {"paged.fused_unsupported", "paged.fused_spans"}
    pages = planned.paged.cache.pages_array.fitted.local_bytes
    assert one.alias_bytes is not None
    assert one.temp_bytes is not None
    assert one.temp_bytes < pages <= one.alias_bytes
    for kernel in one.kernels or ():
        assert isinstance(kernel, GpuKernelUse)
        assert kernel.stack_bytes is not None
        assert kernel.stack_bytes <= spilled
