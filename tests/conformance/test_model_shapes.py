"""The attention shapes of real models, at reduced length, against the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnops import Causal, Chunked, Full, SlidingWindow

from . import harness
from .cases import Case

SHAPES = json.loads((Path(__file__).parents[1] / "data" / "model_shapes.json").read_text())["shapes"]


def _case(shape: dict[str, Any], heads: int, kv_heads: int) -> Case:
    q, kv = shape["test_seq_q"], shape["test_seq_kv"]
    i, j = np.arange(q)[:, None] + (kv - q if shape["causal"] else 0), np.arange(kv)[None, :]
    visible = np.ones((q, kv), bool)
    mask: Any = Full()
    if shape["causal"]:
        visible &= j <= i
        mask = mask & Causal()
    if shape["test_window"]:
        left, right = shape["test_window"]
        visible &= (j >= i - left) & (j <= i + right)
        mask = mask & SlidingWindow(left, right)
    if shape["test_chunk"]:
        visible &= i // shape["test_chunk"] == j // shape["test_chunk"]
        mask = mask & Chunked(shape["test_chunk"])
    rng = np.random.default_rng(3)
    call: dict[str, Any] = {"mask": mask, "softmax_scale": shape["softmax_scale"]}
    reference: dict[str, Any] = {"scale": shape["softmax_scale"]}
    smooth = []
    if shape["logits_soft_cap"]:
        call["logits_soft_cap"] = reference["soft_cap"] = shape["logits_soft_cap"]
    if shape["sinks"]:
        call["softmax_aux"] = reference["sinks"] = rng.standard_normal(heads).astype(np.float32)
        smooth.append("softmax_aux")
    if shape["bias"]:
        call["bias"] = reference["bias"] = rng.standard_normal((1, heads, q, kv)).astype(np.float32)
        smooth.append("bias")
    if shape["causal"] and q != kv:
        call["query_offset"] = kv - q
    return Case(
        name=shape["name"],
        features=frozenset(),
        call=call,
        mask=visible,
        reference=reference,
        differentiate=tuple(smooth),
        q_len=q,
        kv_len=kv,
        heads=heads,
        kv_heads=kv_heads,
        batch=1,
        value_dim=shape["head_dim_v"],
    )


def _fewer(shape: dict[str, Any], even: int, odd: int) -> tuple[int, int]:
    """Heads cut to a CPU test's size: at most two kv heads, in groups of at most so many query heads."""
    group = shape["hq"] // shape["hkv"]
    kv_heads = min(shape["hkv"], 2)
    return kv_heads * min(group, even if group % 2 == 0 else odd), kv_heads


def _kind(shape: dict[str, Any]) -> tuple[Any, ...]:
    """What two models have to share for one to stand for the other in the interpreter, where a shape takes seconds."""
    features = ("head_dim", "head_dim_v", "causal", "test_window", "test_chunk", "logits_soft_cap", "sinks", "bias")
    return *(str(shape[f]) for f in features), shape["test_seq_q"] == shape["test_seq_kv"]


NATIVE, SPLASH, FLASH = "vanilla.forward_native", "splash.forward_tpu", "flash_attn2.forward_cuda"
FIRST = {_kind(shape): shape["name"] for shape in reversed(SHAPES)}


def _often(shape: dict[str, Any], which: str) -> bool:
    """One of a kind, and every third of those in the interpreter."""
    return FIRST[_kind(shape)] == shape["name"] and (which == NATIVE or list(FIRST).index(_kind(shape)) % 3 == 0)


# (shape, implementation, largest groups): small groups in `make test`.
MODELS = [
    *((shape, which, (4, 3)) for shape in SHAPES for which in (NATIVE, SPLASH) if _often(shape, which)),
    *((shape, which, (16, 9)) for shape in SHAPES for which in (NATIVE, SPLASH, FLASH)),
]


@pytest.mark.parametrize(
    ("shape", "which", "groups"),
    [
        pytest.param(
            *key,
            id=f"{key[0]['name'].replace(' ', '_')}-{key[1]}-{key[2][0]}",
            marks=[] if key[2] == (4, 3) else [pytest.mark.slow],
        )
        for key in MODELS
    ],
)
def test_model(shape: dict[str, Any], which: str, groups: tuple[int, int]) -> None:
    implementation = harness.RUNNABLE[which]
    heads, kv_heads = _fewer(shape, *groups)
    case = _case(shape, heads, kv_heads)
    attend = implementation.make("float32")
    tensors = harness.draw(case, "float32", shape["head_dim"])
    plan = attend.plan(*tensors[:3], **case.call)
    if which == "splash.forward_tpu" and case.q_len == 1:
        assert plan.kind == "routed"  # the decode route runs, and is held against the reference like any other
        implementation = harness.RUNNABLE["vanilla.forward_native"]
        assert plan.method == implementation.method
    elif which == FLASH and shape["head_dim"] > 256:
        assert [reason.code for reason in plan.rejected[0].reasons] == ["flash.head_dim"]
        return
    else:
        assert plan.implementation == f"{implementation.operation}.{implementation.method}"
    got = harness.run(attend, case, tensors, "float32", "bthd")
    published = implementation.capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors, shape["head_dim"]), published.forward, published.backward)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=[s["name"].replace(" ", "_") for s in SHAPES])
def test_model_with_all_heads(shape: dict[str, Any]) -> None:
    case = _case(shape, shape["hq"], shape["hkv"])
    implementation = harness.RUNNABLE["vanilla.forward_native"]
    attend = implementation.make("float32")
    tensors = harness.draw(case, "float32", shape["head_dim"])
    got = harness.run(attend, case, tensors, "float32", "bthd")
    published = implementation.capability.tolerance["float32"]
    harness.agree(got, harness.expect(case, tensors, shape["head_dim"]), published.forward, published.backward)
