"""Latent attention: both forms against the plain formula in float64, their choice, specs, files and wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import (
    Attention,
    AttnOpsError,
    Causal,
    ConfigError,
    Declaration,
    InputError,
    LatentAttention,
    SlidingWindow,
)
from attnops.errors import InputTypeError
from attnops.sharding import PartitionAxis

B, Q, HEADS, NOPE, ROPE, VALUE, LATENT = 2, 24, 4, 16, 8, 12, 32
SIZES = {"heads": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "latent_dim": LATENT}
FORMS = ("expanded", "absorbed")


def _arrays(q_len: int = Q, kv_len: int = Q, batch: int = B, dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = (
        (batch, q_len, HEADS, NOPE), (batch, q_len, HEADS, ROPE), (batch, kv_len, LATENT), (batch, kv_len, ROPE),
        (LATENT, HEADS, NOPE), (LATENT, HEADS, VALUE),
    )  # fmt: skip
    return tuple(
        (rng.standard_normal(shape) / (1 if n < 4 else LATENT**0.5)).astype(dtype) for n, shape in enumerate(shapes)
    )


def _formula(arrays: Any, seen: np.ndarray, cap: float | None = None, xp: Any = np) -> Any:
    """Output [batch, q, heads, value] by the definition, in the dtype of the arrays. seen: bool [batch | 1, q, kv]."""
    q_nope, q_rope, latent, rope_key, w_uk, w_uv = arrays
    logits = xp.einsum("bqhn,bkhn->bhqk", q_nope, xp.einsum("bkc,chn->bkhn", latent, w_uk))
    logits = (logits + xp.einsum("bqhr,bkr->bhqk", q_rope, rope_key)) / (NOPE + ROPE) ** 0.5
    logits = logits if cap is None else cap * xp.tanh(logits / cap)
    logits = xp.where(seen[:, None], logits, -1e30)
    weights = xp.exp(xp.where(seen[:, None], logits - logits.max(-1, keepdims=True), -xp.inf))
    weights = weights / weights.sum(-1, keepdims=True)
    return xp.einsum("bhqk,bkhv->bqhv", weights, xp.einsum("bkc,chv->bkhv", latent, w_uv))


def _causal(q_len: int, kv_len: int, offset: int = 0, left: int | None = None) -> np.ndarray:
    q, kv = np.arange(q_len)[:, None] + offset, np.arange(kv_len)
    return ((kv <= q) & (True if left is None else kv >= q - left))[None]


def _close(got: Any, wanted: np.ndarray, most: float) -> None:
    """Row by row: the largest error of a row, as a part of its size."""
    got = np.asarray(got, np.float64)
    size = np.maximum(np.abs(wanted).max(-1), np.sqrt((wanted**2).mean()))
    assert (np.abs(got - wanted).max(-1) / size).max() < most


SEGMENTS = np.repeat([[0] * 10 + [1] * 14], B, 0).astype(np.int32)
CALLS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "causal": ({"mask": Causal()}, _causal(Q, Q)),
    "window": ({"mask": Causal() & SlidingWindow(left=5)}, _causal(Q, Q, left=5)),
    "ids": (
        {"causal": True, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
        _causal(Q, Q) & (SEGMENTS[:, :, None] == SEGMENTS[:, None]),
    ),
    "full": ({"causal": False}, np.ones((1, Q, Q), bool)),
}
PATHS = {
    "plain": ("vanilla", {"path": "plain"}),
    "blockwise": ("vanilla", {"path": "blockwise", "block_q": 8, "block_kv": 16}),
    "splash": ("splash", {"platform": "tpu", "interpret": True}),
    "flash": ("flash_attn2", {"platform": "cuda", "interpret": True}),
    "ring": ("ring", {"mesh": {"sp": 2}}),
    "zigzag": ("ring", {"mesh": {"sp": 2}, "ring_order": "zigzag"}),
}


TRIANGULAR = ("causal", "window", "ids")  # the masks that a zigzag ring takes


def _attention(path: str, form: str | None) -> LatentAttention:
    name, keywords = PATHS[path]
    return LatentAttention(name, **SIZES, **({} if form is None else {"form": form}), **keywords)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
def test_output_and_gradients_are_those_of_the_formula(path: str, form: str, call: str) -> None:
    attend, (options, seen), arrays = _attention(path, form), CALLS[call], _arrays()
    if path == "zigzag" and call not in TRIANGULAR:
        with pytest.raises(AttnOpsError, match=r"ring\.zigzag"):
            attend(*arrays, **options)
        return
    direction = np.random.default_rng(1).standard_normal((B, Q, HEADS, VALUE))

    def loss(arrays: Any) -> Any:
        output = attend(*arrays, **options).attention_outputs
        return (output * direction.astype(np.float32)).sum(), output

    with jax.enable_x64(False):
        gradients, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    _close(output, _formula([x.astype(np.float64) for x in arrays], seen), 1e-5)
    with jax.enable_x64(True):
        exact = jax.grad(lambda arrays: (_formula(arrays, seen, xp=jnp) * direction).sum())(
            tuple(jnp.asarray(x, jnp.float64) for x in arrays)
        )
    for got, wanted in zip(gradients, exact, strict=True):
        _close(got, np.asarray(wanted), 1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["bhtd", "thd"])
def test_layouts(form: str, layout: str) -> None:
    batch = 1 if layout == "thd" else B
    arrays = _arrays(batch=batch)
    wanted = _formula([x.astype(np.float64) for x in arrays], _causal(Q, Q))
    given = [x[0] if n < 4 else x for n, x in enumerate(arrays)] if batch == 1 else [*arrays]
    if layout == "bhtd":
        given[:2] = [x.swapaxes(1, 2) for x in given[:2]]
    ids = {} if layout == "bhtd" else dict.fromkeys(("q_segment_ids", "kv_segment_ids"), np.zeros(Q, np.int32))
    output = np.asarray(_attention("plain", form)(*given, layout=layout, causal=True, **ids).attention_outputs)
    _close(output.swapaxes(1, 2) if layout == "bhtd" else output[None], wanted, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_decode_with_lengths_a_cap_and_the_log_sum_exp(form: str) -> None:
    arrays, lengths = _arrays(q_len=1, kv_len=40), np.asarray([40, 17], np.int32)
    seen = np.arange(40)[None, None] < lengths[:, None, None]
    attend = LatentAttention("vanilla", **SIZES, form=form, logits_soft_cap=3.0)
    output = attend(*arrays, causal=False, kv_lengths=lengths, return_lse=True, mode="autoregressive")
    _close(output.attention_outputs, _formula([x.astype(np.float64) for x in arrays], seen, cap=3.0), 1e-5)
    assert output.plan is not None
    assert output.plan.implementation == "vanilla.forward_native"
    assert "latent.form" in {note.code for note in output.plan.notes if hasattr(note, "code")}
    assert output.lse is not None
    assert output.lse.shape == (B, HEADS, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["keyword", "call", "metadata", "file"])
def test_a_declared_scale_counts(form: str, where: str) -> None:
    arrays, scale = _arrays(), 0.1
    file: dict[str, Any] = {"operation": "vanilla", "latent": SIZES | {"form": form}}
    file |= {"metadata": {"softmax_scale": scale}} if where == "metadata" else {}
    file |= {"call": {"softmax_scale": scale}} if where == "file" else {}
    attend = LatentAttention(file)
    if where == "keyword":
        attend = LatentAttention("vanilla", **SIZES, form=form, softmax_scale=scale)
    call = {"softmax_scale": scale} if where == "call" else {}
    # A scale of s is that of queries that are multiplied by s * sqrt(24).
    scaled = [x * (scale * (NOPE + ROPE) ** 0.5) if n < 2 else x for n, x in enumerate(arrays)]
    wanted = _formula([x.astype(np.float64) for x in scaled], _causal(Q, Q))
    _close(attend(*arrays, **call).attention_outputs, wanted, 1e-5)
    if where in ("metadata", "file"):
        declared = Declaration.from_dict(file).of_form(form)  # type: ignore[arg-type]
        inner = Attention(declared, mesh=None).plan(*(jax.ShapeDtypeStruct((1, 8, *s), "float32") for s in {
            "expanded": ((4, 24), (4, 24), (4, 12)), "absorbed": ((4, 40), (1, 40), (1, 32))
        }[form]))  # fmt: skip
        assert inner.problem.softmax_scale == scale


# -- the choice ----------------------------------------------------------------------------------------------------------


def _v3(q_len: int, kv_len: int, **keywords: Any) -> Any:
    sizes = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512}
    attend = LatentAttention("vanilla", **sizes, **keywords)
    shapes = (
        (1, q_len, 128, 128), (1, q_len, 128, 64), (1, kv_len, 512), (1, kv_len, 64), (512, 128, 128), (512, 128, 128),
    )  # fmt: skip
    return attend.plan(*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes), causal=False, mode="prefill")


def test_work_is_counted() -> None:
    plan = _v3(4096, 4096)
    # Projections of 4096 latents, 128 heads: 2 * 4096 * 128 * 512 * 256; logits and values: 2 * 4096^2 * 128 * (192 + 128).
    assert plan.choice.work["expanded"].flops == 2 * 4096 * 128 * 512 * 256 + 2 * 4096**2 * 128 * 320
    assert plan.choice.work["absorbed"].flops == 2 * 4096 * 128 * 512 * 256 + 2 * 4096**2 * 128 * (576 + 512)
    assert (plan.choice.work["expanded"].cached_bytes, plan.choice.work["absorbed"].cached_bytes) == (81920, 1152)
    assert (plan.form, plan.choice.declared) == ("expanded", False)
    causal = LatentAttention("vanilla", **SIZES).plan(*_arrays(), causal=True).choice.work["expanded"]
    full = LatentAttention("vanilla", **SIZES).plan(*_arrays(), causal=False).choice.work["expanded"]
    # 3 * 2 * 2 * 24 * 4 * 32 * 28 of the projections and their gradients; 300 of 576 pairs are visible.
    projections = 3 * 2 * B * Q * HEADS * LATENT * (NOPE + VALUE)
    assert (causal.flops - projections) / (full.flops - projections) == 300 / 576


def test_symbolic_sizes_are_refused() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct((batch, *x.shape[1:]) if n < 4 else x.shape, x.dtype) for n, x in enumerate(_arrays())
    ]
    with pytest.raises(InputError, match="batch is known only by name"):
        LatentAttention("vanilla", **SIZES).plan(*shapes, causal=True)


def test_the_cheaper_form_runs() -> None:
    assert _v3(1, 4096).form == _v3(8, 65536).form == "absorbed"
    assert _v3(4096, 4096).form == _v3(32768, 32768).form == "expanded"
    declared = _v3(1, 4096, form="expanded")
    assert (declared.form, declared.choice.declared) == ("expanded", True)
    assert declared.choice.ratio < 1 / 50
    assert _v3(1, 4096).choice.ratio > 50
    assert declared.inner.problem.kv_heads == 128
    assert _v3(1, 4096).inner.problem.kv_heads == 1
    assert json.loads(json.dumps(declared.to_dict()))["form"] == "expanded"
    assert "absorbed" in declared.explain()


# -- meshes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_specs_and_numbers_on_a_mesh(form: str) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    axis = PartitionAxis(batch_axis="dp", head_axis="tp", sequence_axis="sp")
    attend = LatentAttention("vanilla", **SIZES, form=form, mesh=mesh, partition_axis=axis)
    arrays = _arrays()
    plan = attend.plan(*arrays, causal=True)
    assert next(iter(plan.specs["latent"])) == "dp"
    assert "tp" not in str(plan.specs["latent"])
    assert [*plan.specs["w_uk"]] == [None, "tp", None]
    shardings = plan.named_shardings()
    placed = [jax.device_put(x, shardings[name]) for x, name in zip(arrays, plan.specs, strict=True)]
    output = jax.jit(lambda *x: attend(*x, causal=True).attention_outputs)(*placed)
    _close(output, _formula([x.astype(np.float64) for x in arrays], _causal(Q, Q)), 1e-5)
    assert output.sharding.is_equivalent_to(shardings["output"], 4)


# -- files and wrong input ---------------------------------------------------------------------------------------------


def test_a_file_is_the_declaration(tmp_path: Path) -> None:
    attend = LatentAttention("vanilla", **SIZES, form="absorbed", block_kv=64, causal=True)
    path = tmp_path / "latent.json"
    path.write_text(attend.declared().to_json())
    again = LatentAttention(path)
    assert again == attend
    assert hash(again) == hash(attend)
    assert LatentAttention(attend.declared()) == attend
    assert again != LatentAttention("vanilla", **SIZES, block_kv=64, causal=True)
    assert again.declared() == Declaration.load(path)
    assert attnops.LatentAttention is LatentAttention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": (B, Q, HEADS, NOPE + 1)}, r"q_nope has shape \(2, 24, 4, 17\); wanted \(2, 24, 4, 16\)"),
        ({"latent": (B, Q, LATENT, 1)}, "latent has shape"),
        ({"rope_key": (B, Q - 1, ROPE)}, r"rope_key has shape \(2, 23, 8\); wanted \(2, 24, 8\)"),
        ({"w_uv": (LATENT, VALUE, HEADS)}, r"w_uv has shape .*latent_dim, heads, value_dim"),
    ],
)
def test_shapes_are_checked(change: dict[str, tuple[int, ...]], message: str) -> None:
    names = ("q_nope", "q_rope", "latent", "rope_key", "w_uk", "w_uv")
    arrays = dict(zip(names, _arrays(), strict=True)) | {k: np.zeros(s, np.float32) for k, s in change.items()}
    with pytest.raises(InputError, match=message):
        LatentAttention("vanilla", **SIZES)(*arrays.values())


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("q_rope", "bfloat16", "q_nope is float32 and q_rope bfloat16"),
        ("rope_key", "float16", "latent is float32 and rope_key float16"),
        ("latent", "int8", "latent is int8; wanted a float dtype"),
    ],
)
def test_dtypes_are_checked(name: str, dtype: str, message: str) -> None:
    names = ("q_nope", "q_rope", "latent", "rope_key", "w_uk", "w_uv")
    arrays = dict(zip(names, _arrays(), strict=True))
    arrays[name] = arrays[name].astype(jnp.dtype(dtype))
    with pytest.raises(InputError, match=message):
        LatentAttention("vanilla", **SIZES)(*arrays.values())


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_used_in_the_dtype_of_what_they_multiply(form: str) -> None:
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in _arrays()]
    mixed = [*rounded[:4], *(x.astype(jnp.float32) for x in rounded[4:])]
    outputs = [_attention("plain", form)(*x, causal=True).attention_outputs for x in (rounded, mixed)]
    assert outputs[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in outputs))
    _close(outputs[0], _formula([np.asarray(x, np.float64) for x in rounded], _causal(Q, Q)), 0.03)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LatentAttention("vanilla", heads=4), ConfigError),
        *(
            (lambda heads=heads: LatentAttention("vanilla", **SIZES | {"heads": heads}), ConfigError)
            for heads in (0, True, "4", 4.0, 2**40)
        ),
        (lambda: LatentAttention("vanilla", **SIZES, form="both"), ConfigError),
        (lambda: LatentAttention("vanilla", **SIZES, block=3), InputTypeError),
        (lambda: LatentAttention("vanila", **SIZES), AttnOpsError),
        (lambda: LatentAttention(3), ConfigError),
        (lambda: LatentAttention({"operation": "vanilla"}), ConfigError),
        (lambda: LatentAttention({"operation": "paged", "latent": SIZES | {"form": "expanded"}}), ConfigError),
        (lambda: LatentAttention("paged", **SIZES, form="expanded"), ConfigError),
        (lambda: LatentAttention("paged", **SIZES)(*_arrays()), InputError),
        (lambda: LatentAttention({"operation": "vanilla", "latent": SIZES, "call": {"head_dim": 8}}), ConfigError),
        (lambda: LatentAttention({"operation": "vanilla", "latent": SIZES | {"head": 8}}), ConfigError),
        (lambda: Attention({"operation": "vanilla", "latent": SIZES}), ConfigError),
        (lambda: LatentAttention("vanilla", **SIZES)(*_arrays(), layout="btd"), InputError),
        (lambda: LatentAttention("vanilla", **SIZES)(None, *_arrays()[1:]), InputError),
    ],
)
def test_wrong_declarations_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()
