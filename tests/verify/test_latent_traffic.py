"""What latent attention sends, forward and with the gradients of all its arrays: by hand, by its plan, and as compiled for meshes
of virtual CPU devices and for a described pod."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import pytest

from attnops import Declaration, LatentAttention
from attnops.cli.verified import VerifyOptions, verified
from attnops.operators.latent import LATENT
from attnops.planning.notes import Note

HEADS, NOPE, ROPE, VALUE, LATENT_DIM, BATCH, LENGTH = 8, 16, 8, 16, 64, 4, 64
SMALL = {"heads": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "latent_dim": LATENT_DIM}
V3 = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512}


def _file(form: str, strategy: str, latent: Any = SMALL, operation: str = "vanilla", **call: Any) -> dict[str, Any]:
    call = {"batch": BATCH, "q_len": LENGTH, "dtype": "float32", "causal": True, "mode": "train"} | call
    metadata = {"sequence_parallel": strategy, "fallback": "error"}
    return {"operation": operation, "latent": latent | {"form": form}, "metadata": metadata, "call": call}


def _verified(file: dict[str, Any], mesh: str, target: str = "here") -> Any:
    *_, report = verified(VerifyOptions(Declaration.from_dict(file), (target,), None, mesh, None, None), target)
    assert report.outcome.name == "PASSED", report.passes
    return report


def _sent(report: Any) -> list[dict[str, int]]:
    """Bytes that a device sends in each pass, by kind."""
    found: list[dict[str, int]] = []
    for made in report.passes:
        kinds = sorted({one.kind for one in made.collectives})
        found.append(
            {kind: round(sum(one.sent_bytes for one in made.collectives if one.kind == kind)) for kind in kinds}
        )
    return found


WEIGHTS = 4 * HEADS * LATENT_DIM * (NOPE + VALUE)  # bytes of w_uk and w_uv
TOKEN = 4 * HEADS * (NOPE + ROPE + VALUE)  # of a token's expanded key and value


def _weights(split: int, heads: int) -> int:
    """Their gradients summed over the devices that have other tokens."""
    return 2 * WEIGHTS // heads * (split - 1) // split


def _latents(tokens: int, heads: int, parts: int) -> int:
    """The gradients of latents and rotary keys summed over the devices that have other heads; parts: of the latents'."""
    return 2 * 4 * tokens * (parts * LATENT_DIM + ROPE) * (heads - 1) // heads


# (strategy, form, mesh, forward, backward alone). The CPU's compiler sums both parts of the latents' gradients by themselves, and
# the gradients of weights over batch and tokens one after the other.
SPLIT: list[Any] = [
    pytest.param(
        "ulysses", "expanded", "sp=4,tp=2",  # query and output have as many bytes as key and value
        {"all-to-all": 2 * TOKEN // 2 * BATCH * LENGTH // 4 * 3 // 4},
        {
            "all-to-all": 2 * TOKEN // 2 * BATCH * LENGTH // 4 * 3 // 4,
            "all-reduce": _weights(4, 2) + _latents(BATCH * LENGTH // 4, 2, 2),
        },
    ),
    pytest.param(
        "gather", "expanded", "fsdp=4,tp=2", {},
        {"all-reduce": _weights(4, 2) + _latents(BATCH * LENGTH // 4, 2, 2)},
        marks=pytest.mark.slow,
    ),
    pytest.param(  # the gradient of the one key head has that of its values, which are a part of it
        "gather", "absorbed", "fsdp=4,tp=2", {},
        {"all-reduce": _weights(4, 2) + _latents(BATCH * LENGTH // 4, 2, 1)},
        marks=pytest.mark.slow,
    ),
    pytest.param(  # the batch is split over fsdp and dp, in this order, so groups are of a mesh in another order
        "gather", "absorbed", "dp=2,fsdp=2,tp=2", {},
        {"all-reduce": _weights(4, 2) + _latents(BATCH * LENGTH // 4, 2, 1)},
    ),
    pytest.param(
        "gather", "expanded", "fsdp=2,sp=4", {"all-gather": TOKEN * BATCH // 2 * LENGTH * 3 // 4},
        {"reduce-scatter": TOKEN * BATCH // 2 * LENGTH * 3 // 4, "all-reduce": _weights(2, 1) + _weights(4, 1)},
        marks=pytest.mark.slow,
    ),
    pytest.param(  # three steps; the sums of the gradients come home in a fourth
        "ring", "expanded", "sp=4,tp=2", {"collective-permute": TOKEN // 2 * BATCH * LENGTH // 4 * 3},
        {
            "collective-permute": TOKEN // 2 * BATCH * LENGTH // 4 * (3 + 4),
            "all-reduce": _weights(4, 2) + _latents(BATCH * LENGTH // 4, 2, 2),
        },
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "form", "mesh", "forward", "backward"), SPLIT)
def test_what_is_sent(strategy: str, form: str, mesh: str, forward: dict[str, int], backward: dict[str, int]) -> None:
    file = _file(form, strategy)
    if strategy == "ring":
        file["metadata"]["ring_order"] = "contiguous"
    report = _verified(file, mesh)
    kinds = sorted({*forward, *backward})
    both = {kind: forward.get(kind, 0) + backward.get(kind, 0) for kind in kinds}
    assert _sent(report) == [forward, both]
    assert all(not made.differences for made in report.passes)


QUERY = 24


@pytest.mark.parametrize(
    ("form", "fold", "weights", "parts"),
    [
        # All of w_uk, w_uv and w_uq.
        ("expanded", None, LATENT_DIM * (NOPE + VALUE) + QUERY * (NOPE + ROPE), 1),
        pytest.param("absorbed", False, LATENT_DIM * (NOPE + VALUE) + QUERY * (NOPE + ROPE), 1, marks=pytest.mark.slow),
        # w_uv, w_uq's rotary part, and the weight that multiplies query latents.
        ("absorbed", True, LATENT_DIM * VALUE + QUERY * (LATENT_DIM + ROPE), 2),
    ],
)
def test_what_queries_that_are_made_of_latents_send(form: str, fold: bool | None, weights: int, parts: int) -> None:
    """Gradients of weights over two devices with other tokens; those of all latents over two with other heads."""
    latent = SMALL | {"query_latent_dim": QUERY} | ({} if fold is None else {"fold_query": fold})
    report = _verified(_file(form, "gather", latent), "fsdp=2,tp=2")
    of_weights = 2 * 4 * HEADS // 2 * weights // 2
    of_queries = 2 * 4 * BATCH // 2 * LENGTH * QUERY * parts // 2
    of_latents = _latents(BATCH // 2 * LENGTH, 2, 2 if form == "expanded" else 1)
    assert _sent(report) == [{}, {"all-reduce": of_weights + of_latents + of_queries}]
    assert all(not made.differences for made in report.passes)


@pytest.mark.parametrize(
    ("form", "mesh", "refused"),
    [
        ("expanded", {"sp": 8}, False),
        ("expanded", {"sp": 4, "tp": 2}, False),
        ("expanded", {"sp": 16}, True),
        ("expanded", {"sp": 4, "tp": 4}, True),  # each device has two of the heads
        ("absorbed", {"sp": 8}, True),
    ],
)
def test_ulysses_splits_the_heads_of_the_form(form: str, mesh: dict[str, int], refused: bool) -> None:
    attend = LatentAttention("vanilla", **SMALL, form=form, mesh=mesh, sequence_parallel="ulysses")
    inner = attend.plan(*_shapes(), causal=True).inner
    codes = {reason.code for rejected in inner.rejected for reason in rejected.reasons}
    assert (inner.implementation is None, codes) == (refused, {"ulysses.kv_heads"} if refused else set())


def _shapes() -> list[Any]:
    sizes = SMALL | {"batch": BATCH, "q_len": LENGTH, "kv_len": LENGTH}
    return [jax.ShapeDtypeStruct(row.shape(sizes, "bthd"), "float32") for row in LATENT.required]


@pytest.mark.parametrize(
    ("strategy", "form", "sent", "other"),
    [
        ("gather", "expanded", TOKEN // 2, 4 * (LATENT_DIM + ROPE)),
        ("ring", "absorbed", 4 * (LATENT_DIM + ROPE), TOKEN // 2),
    ],
)
def test_a_note_says_what_the_other_form_would_send(strategy: str, form: str, sent: int, other: int) -> None:
    mesh = {"sp": 4, "tp": 2}
    attend = LatentAttention(
        "vanilla", **SMALL, form=form, mesh=mesh, sequence_parallel=strategy, ring_order="contiguous"
    )
    notes = attend.plan(*_shapes(), causal=True).inner.notes
    (values,) = (note.values for note in notes if isinstance(note, Note) and note.code == "latent.sent_keys")
    tokens = BATCH * LENGTH * 3 // 4
    assert (values["sent"], values["other_sent"]) == (sent * tokens, other * tokens)
    whole = LatentAttention("vanilla", **SMALL, form=form, mesh={"fsdp": 4, "tp": 2}).plan(*_shapes(), causal=True)
    assert "latent.sent_keys" not in {note.code for note in whole.inner.notes if isinstance(note, Note)}


@pytest.mark.parametrize(
    ("mesh", "mode", "sent"),
    [
        ({"sp": 4, "tp": 2}, "train", _weights(4, 2) + _latents(BATCH * LENGTH // 4, 2, 1)),
        ({"fsdp": 4}, "train", _weights(4, 1)),
        ({"tp": 2}, "train", _latents(BATCH * LENGTH, 2, 1)),
        ({"sp": 4, "tp": 2}, "prefill", None),
        (None, "train", None),
    ],
)
def test_a_note_says_what_the_gradients_of_projections_send(mesh: Any, mode: str, sent: int | None) -> None:
    attend = LatentAttention("vanilla", **SMALL, form="expanded", mesh=mesh, sequence_parallel="ulysses")
    notes = attend.plan(*_shapes(), causal=True, mode=mode).inner.notes
    found = [note.values["sent"] for note in notes if isinstance(note, Note) and note.code == "latent.gradients"]
    assert found == ([] if sent is None else [sent])


# -- a pod that isn't here ---------------------------------------------------------------------------------------------

KEYS = 2 * 128 * (192 + 128)  # bytes of a token's expanded key and value in bfloat16
OF_WEIGHTS = 2 * 128 * 512 * 256


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
@pytest.mark.parametrize(
    ("strategy", "mesh", "forward"),
    [
        ("gather", "fsdp=16,tp=4", {}),
        ("ulysses", "fsdp=16,sp=4", {"all-to-all": 2 * KEYS * 4 * 1024 * 3 // 4}),
        ("ring", "fsdp=16,sp=4", {"collective-permute": KEYS * 4 * 1024 * 3}),
    ],
)
def test_training_at_4k_on_64_chips(strategy: str, mesh: str, forward: dict[str, int]) -> None:
    """DeepSeek V3's heads, 64 sequences, compiled for a v5p."""
    file = _file("expanded", strategy, V3, "splash", batch=64, q_len=4096, dtype="bfloat16")
    file["metadata"] |= {"ring_order": "contiguous"} if strategy == "ring" else {}
    report = _verified(file, mesh, "v5p:4x4x4")
    first, both = _sent(report)
    assert first == forward
    if mesh == "fsdp=16,tp=4":  # this compiler adds both parts of the latents' gradients before it sums them
        weights, latents = 2 * OF_WEIGHTS // 4 * 15 // 16, 2 * 2 * 4 * 4096 * (512 + 64) * 3 // 4
    else:
        weights, latents = 2 * OF_WEIGHTS * 63 // 64, 0
    assert both["all-reduce"] == weights + latents
    assert report.passes[1].peak_bytes < 6 << 30
    assert all(kernel.name.startswith("attnops_splash") for kernel in report.passes[1].kernels)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu")
def test_training_at_128k_on_64_chips() -> None:
    """By heads: 128 expanded ones over 64 devices. Two passes in 1.5 GiB."""
    report = _verified(
        _file("expanded", "ulysses", V3, "splash", batch=1, q_len=131072, dtype="bfloat16"), "sp=64", "v5p:4x4x4"
    )
    first, both = _sent(report)
    exchanged = 2 * KEYS * 131072 // 64 * 63 // 64
    assert first == {"all-to-all": exchanged}
    assert both == {"all-to-all": 2 * exchanged, "all-reduce": 2 * OF_WEIGHTS * 63 // 64}
    assert report.passes[1].peak_bytes < 1.5 * (1 << 30)
