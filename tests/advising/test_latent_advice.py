"""advise for a latent attention: its form is chosen on the target, and what is written is planned as estimated."""

from __future__ import annotations

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


def test_heads_are_those_of_the_form() -> None:
    """Ulysses splits 128 expanded heads over 16 devices; the one head of the latents is not split."""
    fixed = {"fsdp": 1, "tp": 1, "cp": 1, "sp": 16}
    call = {**TRAIN, "batch": 1}
    for form, runs in (("expanded", True), ("absorbed", False)):
        file = _file(call, form=form) | {"metadata": {"sequence_parallel": "ulysses"}}
        advice = advise(file, "v5e:4x4", most_compiled=0, mesh=fixed)
        assert bool(advice.entries) == runs
