"""advise for a latent attention: its form is chosen on the target, and what is written is planned as estimated."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from attnops import LatentAttention, advise
from attnops.cli.declared import declared
from attnops.registry.declaration import Declaration

V3 = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512}
TRAIN = {"batch": 16, "q_len": 4096, "dtype": "bfloat16", "causal": True, "mode": "train"}
DECODE = {"batch": 16, "q_len": 1, "kv_len": 8192, "dtype": "bfloat16", "causal": False, "mode": "autoregressive"}


def _file(call: dict[str, Any], **latent: Any) -> dict[str, Any]:
    return {"operation": "splash", "latent": V3 | latent, "call": call}


@pytest.mark.parametrize(
    ("file", "form", "kv_heads", "dims"),
    [
        (_file(TRAIN), "expanded", 128, (192, 128)),
        (_file(DECODE), "absorbed", 1, (576, 512)),
        (_file(DECODE, form="expanded"), "expanded", 128, (192, 128)),
    ],
)
def test_the_attention_inside_is_estimated(file: Any, form: str, kv_heads: int, dims: tuple[int, int]) -> None:
    advice = advise(file, "v5e:4x4", most_compiled=0, mesh={"cp": 1, "sp": 1})
    problem = advice.best.plan.problem
    assert (problem.kv_heads, problem.head_dim, problem.value_dim) == (kv_heads, *dims)
    best = advice.best.declaration
    assert best.latent is not None
    assert (best.latent.form, best.latent.heads) == (form, 128)
    assert LatentAttention(Declaration.from_dict(best.to_dict()), mesh=None).dims.form == form
    again = declared(best, None, None).plan(best.operation_metadata())
    assert again.placement.local == advice.best.plan.placement.local
    assert again.config == advice.best.plan.config
    assert any("projections" in note for note in advice.notes)


def test_the_gradients_of_the_projections_are_sent() -> None:
    """8k tokens on 64 chips. Heads over all of them: each has the latents, whose gradients are summed. Or, as Ulysses, the
    sequence: those of the weights are."""
    file, fixed = _file({**TRAIN, "batch": 1, "q_len": 8192}), {"fsdp": 1, "cp": 1}
    how: dict[str, Any] = {"target": "v5p:4x4x4", "most_compiled": 0, "operations": ["splash"]}
    by_heads = advise(file, **how, mesh=fixed | {"sp": 1}).best
    _, backward = by_heads.estimate.passes
    assert by_heads.estimate.passes[0].sent_bytes == 0
    assert backward.sent_bytes == 2 * 8192 * (512 + 64) * 2 * 63 / 64
    assert backward.seconds > backward.work + backward.waiting
    file["metadata"] = {"sequence_parallel": "ulysses"}
    by_tokens = advise(file, **how, mesh=fixed | {"tp": 1}).best
    sends = {send.kind: send.sent_bytes for send in by_tokens.estimate.passes[1].sends}
    assert sends["all-reduce"] == 2 * (512 * 128 * 256) * 2 * 63 / 64
    assert sends["all-to-all"] == 2 * (8192 // 64) * 128 * (192 + 128) * 2 * 63 / 64


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
def test_the_best_is_compiled_with_its_projections() -> None:
    """64 sequences of 4k tokens. A chip has one: queries, latents, rotary keys, weights and the output's gradient."""
    advice = advise(_file({**TRAIN, "batch": 64}), "v5p:4x4x4", most_compiled=1, mesh={"cp": 1, "sp": 1, "tp": 1})
    compiled = advice.best.compiled
    assert compiled is not None
    assert not advice.best.differs
    arguments = 2 * (4096 * (128 * 192 + 512 + 64 + 128 * 128) + 512 * 128 * 256)
    assert compiled.passes[1].argument_bytes == arguments
    assert sum(one.sent_bytes for one in compiled.passes[1].collectives) == 2 * 2 * (512 * 128 * 256) * 63 / 64


def test_heads_are_those_of_the_form() -> None:
    """Ulysses splits 128 expanded heads over 16 devices; the one head of the latents is not split."""
    fixed = {"fsdp": 1, "tp": 1, "cp": 1, "sp": 16}
    call = {**TRAIN, "batch": 1}
    for form, runs in (("expanded", True), ("absorbed", False)):
        file = _file(call, form=form) | {"metadata": {"sequence_parallel": "ulysses"}}
        advice = advise(file, "v5e:4x4", most_compiled=0, mesh=fixed)
        assert bool(advice.entries) == runs
