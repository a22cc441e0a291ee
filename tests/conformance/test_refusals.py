"""The other direction for implementations that can't run here: what they declare is planned, what they don't is refused."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh

from attnops.compat import abstract_device

from . import cases, harness

H100 = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device("NVIDIA H100 80GB HBM3", None, "cuda"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", cases.names())
def test_cudnn(name: str, dtype: str) -> None:
    implementation = harness.DECLARED_ONLY["sdpa.forward_cuda"]
    case = cases.build(name, "bthd", cases.Sizes(length=152))
    tensors = harness.draw(case, dtype)
    plan = implementation.make(dtype, H100).plan(*harness.handed_over(case, tensors, dtype, "bthd"), **case.call)
    refusal = {f"feature.{f}" for f in case.features - implementation.capability.consumes}
    refusal |= {"sdpa.cudnn_dtype"} if dtype == "float32" else set()
    refusal |= {"sdpa.score"} if name in ("forgetting", "score_function") else set()  # which multiply logits
    if plan.problem.mode == "__train__" and (case.q_len % 2 or case.kv_len % 2):
        refusal |= {"sdpa.cudnn_even_lengths"}
    got = {r.code for rejected in plan.rejected for r in rejected.reasons} - {"policy.fallback"}
    assert got == refusal
    assert plan.implementation == (None if refusal else "sdpa.forward_cuda")


@pytest.mark.parametrize(("kind", "head_dim", "refused"), [
    ("NVIDIA H100 80GB HBM3", 256, False),
    ("NVIDIA A100-SXM4-80GB", 256, True),
    ("NVIDIA A100-SXM4-80GB", 128, False),
    ("NVIDIA H100 80GB HBM3", 100, True),
])  # fmt: skip
def test_cudnn_head_dims(kind: str, head_dim: int, refused: bool) -> None:
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, None, "cuda"))
    case = cases.build("causal", "bthd")
    tensors = harness.draw(case, "bfloat16", head_dim)
    attend = harness.DECLARED_ONLY["sdpa.forward_cuda"].make("bfloat16", mesh)
    plan = attend.plan(tensors.query, tensors.key, tensors.key)
    assert (plan.implementation is None) == refused
