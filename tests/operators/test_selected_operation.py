"""The operation `selected`: outputs and gradients against the dense masked formula in float64, on meshes, and in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal, Chunked, LatentAttention, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.cli.app import main
from attnops.errors import RefusedError
from attnops.verify import reference_attention, reference_gradients

B, Q, KV, HEADS, KV_HEADS, DIM, VALUE, N = 2, 16, 24, 4, 2, 8, 6, 5
RNG = np.random.default_rng(3)
SELECTED = np.stack([[RNG.permutation(KV)[:N] for _ in range(Q)] for _ in range(B)]).astype(np.int32)
SELECTED[0, 2] = -1
SELECTED[1, 3, :2] = -1
CHOSEN = (SELECTED[..., None] == np.arange(KV)).any(2)
ROWS, KEYS = np.arange(Q)[:, None], np.arange(KV)[None]
IDS = (
    np.sort(RNG.integers(0, 3, (B, Q)), -1).astype(np.int32),
    np.sort(RNG.integers(0, 3, (B, KV)), -1).astype(np.int32),
)
LENGTHS, OFFSETS = np.array([24, 11], np.int32), np.array([8, 2], np.int32)
# What a call has besides, and what it then sees, bool [batch, q, kv].
CASES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "all": ({"causal": False}, np.ones((B, Q, KV), bool)),
    "causal": ({"causal": True, "query_offset": 8}, np.broadcast_to(KEYS <= ROWS + 8, (B, Q, KV))),
    "offsets": ({"causal": True, "query_offset": OFFSETS}, KEYS[None] <= ROWS[None] + OFFSETS[:, None, None]),
    "window": (
        {"mask": Causal(offset=8) & SlidingWindow(left=6, offset=8)},
        np.broadcast_to((KEYS <= ROWS + 8) & (KEYS >= ROWS + 2), (B, Q, KV)),
    ),
    "chunks": (
        {"mask": Causal(offset=8) & Chunked(8, offset=8)},
        np.broadcast_to((KEYS <= ROWS + 8) & (KEYS // 8 == (ROWS + 8) // 8), (B, Q, KV)),
    ),
    "segments": (
        {"causal": False, "q_segment_ids": IDS[0], "kv_segment_ids": IDS[1]}, IDS[0][..., None] == IDS[1][:, None]
    ),
    "lengths": (
        {"causal": False, "kv_lengths": LENGTHS}, np.broadcast_to(LENGTHS[:, None, None] > KEYS, (B, Q, KV))
    ),
}  # fmt: skip


def _arrays(seed: int = 0) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    shapes = (B, Q, HEADS, DIM), (B, KV, KV_HEADS, DIM), (B, KV, KV_HEADS, VALUE)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def _laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    return x.swapaxes(1, 2) if layout == "bhtd" else x


@pytest.mark.parametrize(
    ("name", "layout", "mesh", "config"),
    [
        ("all", "bthd", None, {}),
        ("causal", "bhtd", None, {"path": "tiles", "block_q": 8, "block_kv": 16}),
        ("offsets", "bthd", {"dp": 2, "sp": 2}, {"path": "gather", "block_q": 4}),
        ("window", "bthd", {"tp": 2, "sp": 2}, {}),
        ("chunks", "bhtd", {"sp": 2}, {"path": "tiles"}),
        ("segments", "bthd", {"fsdp": 2, "sp": 4}, {"path": "gather"}),
        ("lengths", "bhtd", {"dp": 2, "tp": 2}, {"path": "tiles"}),
    ],
)
def test_output_and_gradients(name: str, layout: str, mesh: Any, config: dict[str, Any]) -> None:
    call, seen = CASES[name]
    sinks = np.array([0.3, -1.0, 2.0, -4.0], np.float32)
    query, key, value = _arrays()
    attend = OperationRegistry.create("selected", OperationMetadata(mesh=mesh, operation_configs={"selected": config}))
    d_output = np.random.default_rng(9).standard_normal((B, Q, HEADS, VALUE)).astype(np.float32)

    def loss(arrays: dict[str, Any]) -> Any:
        qkv = (arrays[n] for n in ("query", "key", "value"))
        out = attend(
            *qkv,
            selected=SELECTED,
            softmax_aux=arrays["sinks"],
            logits_soft_cap=3.0,
            layout=layout,
            return_lse=True,
            **call,
        )
        return (out.attention_outputs * _laid_out(d_output, layout)).sum(), (out.attention_outputs, out.lse)

    tensors = dict(
        zip(("query", "key", "value"), (jnp.asarray(_laid_out(x, layout)) for x in (query, key, value)), strict=True)
    )
    gradients, (output, lse) = jax.jit(jax.grad(loss, has_aux=True))(tensors | {"sinks": jnp.asarray(sinks)})
    options = {"scale": DIM**-0.5, "mask": (seen & CHOSEN)[:, None], "soft_cap": 3.0, "sinks": sinks[:, None]}
    wanted = reference_attention(query, key, value, **options)
    np.testing.assert_allclose(_laid_out(np.asarray(output), layout), wanted.output, atol=6e-6, rtol=6e-6)
    np.testing.assert_allclose(np.asarray(lse), wanted.lse, atol=6e-6, rtol=6e-6)
    of = reference_gradients(query, key, value, d_output, None, **options)
    for tensor in ("query", "key", "value"):
        np.testing.assert_allclose(_laid_out(np.asarray(gradients[tensor]), layout), of[tensor], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("field", "value", "beside"), [
    ("path", "gather", {}), ("path", "tiles", {}), ("block_q", 4, {"path": "gather"}), ("block_kv", 8, {"path": "tiles"}),
])  # fmt: skip
def test_a_field_changes_what_is_lowered(field: str, value: Any, beside: dict[str, Any]) -> None:
    def lowered(config: dict[str, Any]) -> str:
        attend = OperationRegistry.create("selected", OperationMetadata(operation_configs={"selected": config}))
        return (
            jax.jit(lambda *x: attend(*x, selected=SELECTED, causal=False).attention_outputs)
            .lower(*_arrays())
            .as_text()
        )

    other = {"path": "tiles" if value == "gather" else "gather"} if field == "path" else beside
    assert lowered(beside | {field: value}) != lowered(other)


@pytest.mark.parametrize(
    ("call", "metadata", "code"),
    [
        ({"selected": None}, {}, "selected.positions"),
        ({}, {"runtime_softmax_dtype": "bfloat16"}, "selected.softmax_dtype"),
        ({"bias": np.zeros((1, 1, Q, KV), np.float32)}, {}, "feature.bias"),
        ({"mask": np.ones((1, 1, Q, KV), bool)}, {}, "feature.dense_mask"),
        ({"return_weights": True}, {}, "feature.return_weights"),
    ],
)
def test_refusals(call: dict[str, Any], metadata: dict[str, Any], code: str) -> None:
    attend = OperationRegistry.create("selected", OperationMetadata(**metadata))
    given = {"selected": SELECTED, "causal": False} | call
    plan = attend.plan(*_arrays(), **given)
    assert [reason.code for one in plan.rejected for reason in one.reasons] == [code]
    with pytest.raises(RefusedError, match=code):
        attend(*_arrays(), **given)


DECLARED: dict[str, Any] = {
    "batch": 2, "q_len": 16, "kv_len": 24, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "query_offset": 8,
    "operands": {"selected": [2, 16, 5]},
}  # fmt: skip
PACKED: dict[str, Any] = {
    "q_len": 16, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "layout": "thd", "segment_ids": 3, "dtype": "bfloat16",
    "operands": {"selected": [16, 5]},
}  # fmt: skip


def _file(folder: Path, call: dict[str, Any]) -> str:
    path = folder / "file.json"
    path.write_text(json.dumps({"operation": "selected", "call": call}))
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    return json.loads(shown.out)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (DECLARED | {"return_lse": True, "softmax_aux": [4], "kv_lengths": True, "kv_dtype": "int8"}, ("--mesh", "dp=2,tp=2")),
        (PACKED, ()),
    ],
    ids=["quantised_mesh", "packed"],
)  # fmt: skip
def test_a_declared_call_is_held_against_float64(
    call: dict[str, Any], options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = _json(capsys, "run", _file(tmp_path, call), "--check", "--repeats", "1", *options)
    assert [check["what"] for check in ran["checks"]] == (["output", "lse"] if "return_lse" in call else ["output"])
    assert all(check["passed"] for check in ran["checks"])


def test_the_check_reads_the_selection(tmp_path: Path) -> None:
    """An inputs file's output for another selection fails."""
    query, key, value = _arrays()
    other = np.roll(SELECTED, 1, axis=1)
    wrong = reference_attention(
        query, key, value, scale=DIM**-0.5, mask=((other[..., None] == np.arange(KV)).any(2))[:, None]
    ).output
    np.savez(
        tmp_path / "x.npz", query=query, key=key, value=value, selected=SELECTED, expected=wrong.astype(np.float32)
    )
    path = _file(tmp_path, {"causal": False})
    assert main(["run", path, "--inputs", str(tmp_path / "x.npz"), "--check", "--repeats", "1"]) == 1


def test_a_declared_call_is_planned_and_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, DECLARED)
    plan = _json(capsys, "plan", path, "--mesh", "fsdp=2,sp=2")
    assert plan["tensors"]["selected"]["device_shape"] == [1, 8, 5]
    (report,) = _json(capsys, "verify", path, "--mesh", "sp=2")
    assert all(one["differences"] == [] for one in report["passes"])
    assert (
        report["passes"][0]["flops"] == 2 * 2 * 16 * 5 * 4 * (8 + 8) / 2
    )  # two products of 2 * 16 * 5 pairs; two devices
    page = tmp_path / "report.html"
    assert main(["report", path, "--output", str(page)]) == 0
    assert "selected" in page.read_text()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("mesh", [None, {"dp": 2, "tp": 2}])
def test_latents_of_selected_keys(form: str, mesh: Any) -> None:
    """As in DeepSeek V3.2: a formula of each head's keys and values, in float64, and its gradients."""
    nope, rope, latent = 8, 4, 12
    sizes = {"heads": HEADS, "nope_dim": nope, "rope_dim": rope, "value_dim": VALUE, "latent_dim": latent}
    random = np.random.default_rng(5)
    shapes = (
        (B, Q, HEADS, nope), (B, Q, HEADS, rope), (B, Q, latent), (B, Q, rope), (latent, HEADS, nope), (latent, HEADS, VALUE)
    )  # fmt: skip
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    weights = random.standard_normal((B, Q, HEADS, VALUE)).astype(np.float32)
    chosen = np.stack([[random.permutation(Q)[:N] for _ in range(Q)] for _ in range(B)]).astype(np.int32)
    seen = (chosen[..., None] == np.arange(Q)).any(2) & np.tri(Q, dtype=bool)
    attend = LatentAttention("selected", **sizes, form=form, mesh=mesh)

    def run(*arrays: Any) -> jax.Array:
        output: jax.Array = attend(*arrays, causal=True, selected=chosen).attention_outputs
        return output

    def formula(*arrays: Any) -> jax.Array:
        q_nope, q_rope, latents, shared, w_uk, w_uv = arrays
        logits = jnp.einsum("bqhd,bkc,chd->bhqk", q_nope, latents, w_uk) + jnp.einsum("bqhd,bkd->bhqk", q_rope, shared)
        logits = jnp.where(seen[:, None], logits * (nope + rope) ** -0.5, -np.inf)
        peak = jnp.max(logits, -1, keepdims=True, initial=-1e30)
        parts = jnp.exp(logits - peak)
        parts = parts / jnp.maximum(parts.sum(-1, keepdims=True), 1e-300)
        return jnp.einsum("bhqk,bkc,chv->bqhv", parts, latents, w_uv)

    output = run(*arrays)
    gradients = jax.grad(lambda *a: (run(*a) * weights).sum(), argnums=tuple(range(6)))(*arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        wanted = np.asarray(formula(*wide))
        every = jax.grad(lambda *a: (formula(*a) * weights.astype(np.float64)).sum(), argnums=tuple(range(6)))(*wide)
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)
    for found, want in zip(gradients, every, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())
