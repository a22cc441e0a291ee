"""Latent attention whose queries are made of latents too: numbers and gradients, how the projections are multiplied, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import AttnOpsError, ConfigError, Declaration, InputError, KVCache, LatentAttention
from attnops.cli.app import main
from attnops.operators.paged_cache import RaggedBatch, init
from attnops.sharding import PartitionAxis

B, Q, HEADS, NOPE, ROPE, VALUE, LATENT, QUERY = 2, 12, 4, 16, 8, 12, 32, 20
SIZES = {"heads": HEADS, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "latent_dim": LATENT}
SIZES["query_latent_dim"] = QUERY
NAMES = ("query_latent", "latent", "rope_key", "w_uk", "w_uv", "w_uq", "q_cos", "q_sin")


def _arrays(batch: int = B, rows: int = 1) -> dict[str, np.ndarray]:
    """rows: of the rotations."""
    rng = np.random.default_rng(3)
    sizes = (
        (batch, Q, QUERY), (batch, Q, LATENT), (batch, Q, ROPE), (LATENT, HEADS, NOPE), (LATENT, HEADS, VALUE),
        (QUERY, HEADS, NOPE + ROPE),
    )  # fmt: skip
    made = {
        name: rng.standard_normal(size) / (5 if "w_" in name else 1) for name, size in zip(NAMES, sizes, strict=False)
    }
    angles = np.arange(Q)[:, None] * 0.7 ** np.arange(ROPE // 2) + np.arange(rows)[:, None, None]
    return {
        name: x.astype(np.float32) for name, x in (made | {"q_cos": np.cos(angles), "q_sin": np.sin(angles)}).items()
    }


def _formula(arrays: Any, pairs: str, xp: Any = np) -> Any:
    """Output [batch, q, heads, value] of causal attention by the definition. A pair is a complex number."""
    query = xp.einsum("bql,lhd->bqhd", arrays["query_latent"], arrays["w_uq"])
    nope, rope = query[..., :NOPE], query[..., NOPE:]
    re = np.arange(0, ROPE, 2) if pairs == "interleaved" else np.arange(ROPE // 2)
    im = re + (1 if pairs == "interleaved" else ROPE // 2)
    cos, sin, key = arrays["q_cos"][:, :, None], arrays["q_sin"][:, :, None], arrays["rope_key"]
    logits = xp.einsum("bqhr,bkr->bhqk", rope[..., re] * cos - rope[..., im] * sin, key[..., re])
    logits = logits + xp.einsum("bqhr,bkr->bhqk", rope[..., re] * sin + rope[..., im] * cos, key[..., im])
    logits = logits + xp.einsum("bqhn,bkhn->bhqk", nope, xp.einsum("bkc,chn->bkhn", arrays["latent"], arrays["w_uk"]))
    logits = xp.where(np.tri(Q, dtype=bool)[None, None], logits / (NOPE + ROPE) ** 0.5, -1e30)
    weights = xp.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return xp.einsum("bhqk,bkhv->bqhv", weights, xp.einsum("bkc,chv->bkhv", arrays["latent"], arrays["w_uv"]))


def _call(attend: LatentAttention, arrays: Any, **options: Any) -> Any:
    positional = (arrays[name] for name in ("latent", "rope_key", "w_uk", "w_uv"))
    made_of = {name: arrays[name] for name in ("query_latent", "w_uq", "q_cos", "q_sin")}
    return attend(None, None, *positional, **made_of, **options)


def _plan(attend: LatentAttention, arrays: Any, **options: Any) -> Any:
    return _call(attend.plan, arrays, **options)  # type: ignore[arg-type]


def _wide(arrays: Any) -> dict[str, np.ndarray]:
    return {name: x.astype(np.float64) for name, x in arrays.items()}


WAYS = [{"form": "expanded"}, {"form": "absorbed", "fold_query": False}, {"form": "absorbed", "fold_query": True}]


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("way", WAYS)
def test_output_and_gradients_are_those_of_the_formula(way: dict[str, Any], pairs: str) -> None:
    attend, arrays = LatentAttention("vanilla", **SIZES, **way, rope_pairs=pairs), _arrays(rows=B)
    direction = np.random.default_rng(1).standard_normal((B, Q, HEADS, VALUE))

    def loss(arrays: Any) -> Any:
        output = _call(attend, arrays, causal=True).attention_outputs
        return (output * direction.astype(np.float32)).sum(), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    np.testing.assert_allclose(output, _formula(_wide(arrays), pairs), rtol=0, atol=2e-5)
    with jax.enable_x64(True):
        exact = jax.grad(lambda arrays: (_formula(arrays, pairs, jnp) * direction).sum())(
            jax.tree.map(jnp.asarray, _wide(arrays))
        )
    for name in NAMES:
        wanted = np.asarray(exact[name]) * (name not in ("q_cos", "q_sin"))  # positions are no parameters
        np.testing.assert_allclose(gradients[name], wanted, rtol=0, atol=1e-5 * np.abs(exact[name]).max(), err_msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["bhtd", "thd"])
def test_layouts(way: dict[str, Any], layout: str) -> None:
    """No array but the output has heads and tokens both, so layouts differ in the output and in the batch."""
    arrays = _arrays(batch=1 if layout == "thd" else B)
    given = {name: x[0] if layout == "thd" and "w_" not in name else x for name, x in arrays.items()}
    ids = {} if layout == "bhtd" else dict.fromkeys(("q_segment_ids", "kv_segment_ids"), np.zeros(Q, np.int32))
    found = _call(LatentAttention("vanilla", **SIZES, **way), given, causal=True, layout=layout, **ids)
    output = np.asarray(found.attention_outputs)
    output = output.swapaxes(1, 2) if layout == "bhtd" else output[None]
    np.testing.assert_allclose(output, _formula(_wide(arrays), "halves"), rtol=0, atol=2e-5)


@pytest.mark.parametrize("fold", [False, True])
def test_the_tpu_kernel(fold: bool) -> None:
    attend = LatentAttention("splash", **SIZES, form="absorbed", fold_query=fold, platform="tpu", interpret=True)
    assert _plan(attend, _arrays(), causal=True).inner.implementation == "splash.forward_tpu"
    output = jax.jit(lambda arrays: _call(attend, arrays, causal=True).attention_outputs)(_arrays())
    np.testing.assert_allclose(output, _formula(_wide(_arrays()), "halves"), rtol=0, atol=2e-5)


# -- how projections are multiplied --------------------------------------------------------------------------------------


def _sized(q_len: int, sizes: tuple[int, int, int, int], mode: str = "prefill", **fields: Any) -> Any:
    """The plan of sizes (heads, nope, latent, latent of queries)."""
    heads, nope, latent, query = sizes
    attend = LatentAttention(
        "vanilla", heads=heads, nope_dim=nope, rope_dim=64, value_dim=nope, latent_dim=latent, query_latent_dim=query,
        **fields,
    )  # fmt: skip
    shapes = {
        "query_latent": (1, q_len, query), "w_uq": (query, heads, nope + 64), "q_cos": (1, q_len, 32), "q_sin": (1, q_len, 32),
        "latent": (1, q_len, latent), "rope_key": (1, q_len, 64), "w_uk": (latent, heads, nope), "w_uv": (latent, heads, nope),
    }  # fmt: skip
    return _plan(attend, {n: jax.ShapeDtypeStruct(s, "bfloat16") for n, s in shapes.items()}, causal=False, mode=mode)


V3 = (128, 128, 512, 1536)
NARROW = (8, 256, 64, 64)  # latents that are narrower than heads


def test_what_costs_less_is_done() -> None:
    for plan, tokens, (heads, nope, latent, query) in (
        (_sized(4096, V3, form="absorbed"), 4096, V3),
        (_sized(4096, NARROW, form="absorbed"), 4096, NARROW),
        (_sized(1, NARROW, form="absorbed"), 1, NARROW),
    ):
        work = plan.choice.query.work
        # A query through nope_dim numbers, or through one weight, which is made first; a multiply-add is two operations.
        assert work[False].flops == 2 * tokens * heads * (query * nope + nope * latent)
        assert work[True].flops == 2 * heads * query * latent * (nope + tokens)
        # Both weights are read; two bytes for what is written between two products, and read again.
        weights = heads * nope * (query + latent)
        assert work[False].moved_bytes == 2 * (weights + 2 * tokens * heads * nope)
        assert work[True].moved_bytes == 2 * (weights + 2 * heads * query * latent)
    assert not _sized(4096, V3, form="absorbed").choice.folded
    assert _sized(4096, NARROW, form="absorbed").choice.folded
    assert not _sized(1, NARROW, form="absorbed").choice.folded
    assert _sized(4096, NARROW, form="absorbed").to_dict()["fold_query"] is True
    assert _sized(64, NARROW, "train", form="absorbed").choice.query.work[True].flops == 3 * 2 * 8 * 64 * 64 * (
        256 + 64
    )


def test_a_declared_way_and_notes() -> None:
    declared = _sized(4096, V3, form="absorbed", fold_query=True)
    assert declared.choice.folded
    assert declared.choice.query.declared
    # 512 * 1536 * (128 + 4096) against 4096 * 128 * (1536 + 512) operations, of a device with 10 to a byte.
    assert declared.choice.query.ratio < 0.35
    found = {note.code: note.values for note in declared.inner.notes if hasattr(note, "code")}
    assert found["latent.query"]["chosen"] == "declared"
    expanded = _sized(4096, V3, fold_query=True)
    assert expanded.form == "expanded"
    assert not expanded.choice.folded
    assert "latent.query_not_folded" in {note.code for note in expanded.inner.notes if hasattr(note, "code")}
    undeclared = _sized(4096, V3)
    assert not [
        note for note in undeclared.inner.notes if hasattr(note, "code") and note.code.startswith("latent.query")
    ]


def test_the_forms_count_the_queries_products() -> None:
    """Expanded: one product of 1536 by 192; absorbed: that, and the one by 512."""
    plan, sizes = _sized(64, V3), 128 * 64
    values = 2 * sizes * 512 * (128 + 128)  # keys and values of 64 tokens, or queries and outputs
    assert plan.choice.work["expanded"].flops == values + 2 * sizes * 1536 * 192 + 2 * sizes * 64 * (192 + 128)
    assert plan.choice.work["absorbed"].flops == values + 2 * sizes * 1536 * 192 + 2 * sizes * 64 * (576 + 512)


# -- meshes, pages, files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_specs_and_numbers_on_a_mesh(way: dict[str, Any]) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    axis = PartitionAxis(batch_axis="dp", head_axis="tp", sequence_axis="sp", query_sequence_axis="sp")
    attend, arrays = LatentAttention("vanilla", **SIZES, **way, mesh=mesh, partition_axis=axis), _arrays()
    plan = _plan(attend, arrays, causal=True)
    found = {name: [*plan.specs[name]] for name in ("query_latent", "w_uq", "q_cos")}
    assert found == {"query_latent": ["dp", "sp", None], "w_uq": [None, "tp", None], "q_cos": [None, "sp", None]}
    assert {"q_nope", "q_rope"}.isdisjoint(plan.specs)
    decode = _plan(attend, {n: x[:, -1:] if n in ("query_latent", "q_cos", "q_sin") else x for n, x in arrays.items()},
                   causal=False, mode="autoregressive")  # fmt: skip
    assert [*decode.specs["query_latent"]] == ["dp", None, None]
    shardings = plan.named_shardings()
    placed = {name: jax.device_put(x, shardings[name]) for name, x in arrays.items()}
    output = jax.jit(lambda x: _call(attend, x, causal=True).attention_outputs)(placed)
    np.testing.assert_allclose(output, _formula(_wide(arrays), "halves"), rtol=0, atol=2e-5)


FIELDS: dict[str, Any] = {
    "layers": 1, "kind": "latent", "head_dim": LATENT + ROPE, "value_dim": LATENT, "dtype": "float32", "page_size": 4,
    "pages": 8, "max_sequences": 2, "max_length": 16,
}  # fmt: skip


@pytest.mark.parametrize("fold", [None, True])
def test_chunks_over_pages(fold: bool | None) -> None:
    arrays, cache = _arrays(batch=1), KVCache(**FIELDS)
    served, state = LatentAttention("paged", **SIZES, fold_query=fold), init(cache)
    tokens = {name: x if "w_" in name else x[0] for name, x in arrays.items()}
    outputs = []
    for start, stop in ((0, 7), (7, 8), (8, Q)):
        part = {name: x if "w_" in name else x[start:stop] for name, x in tokens.items()}
        table = [[6, 3, 2][: -(-stop // 4)]]
        batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, stop - start], kv_lens=[stop], page_table=table)
        made = _call(served, part, state=state, layer=0, batch=batch)
        outputs.append(made.attention_outputs)
        state = made.state
        (note,) = (note for note in made.plan.notes if getattr(note, "code", "") == "latent.query")
        assert (note.values["chosen"] == "declared") == (fold is not None)
    np.testing.assert_allclose(np.concatenate(outputs), _formula(_wide(arrays), "halves")[0], rtol=0, atol=2e-5)


def test_a_step_writes_without_queries() -> None:
    tokens, cache = {n: x if "w_" in n else x[0] for n, x in _arrays(batch=1).items()}, KVCache(**FIELDS)
    served = LatentAttention("paged", **SIZES)
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=[0, Q], kv_lens=[Q], page_table=[[6, 3, 2]])
    without = tokens | dict.fromkeys(("query_latent", "q_cos", "q_sin"))
    written = _call(served, without, state=init(cache), layer=0, batch=batch, mode="insert")
    assert written.attention_outputs is None
    read = _call(
        served, tokens | dict.fromkeys(("latent", "rope_key")), state=written.state, layer=0, batch=batch, update="none"
    )
    np.testing.assert_allclose(
        read.attention_outputs, _formula(_wide(_arrays(batch=1)), "halves")[0], rtol=0, atol=2e-5
    )
    with pytest.raises(InputError, match="query_latent is given without q_cos"):
        _call(served, tokens | {"q_cos": None}, state=init(cache), layer=0, batch=batch)
    with pytest.raises(InputError, match="without w_uq"):
        _call(served, tokens | {"w_uq": None}, state=init(cache), layer=0, batch=batch)


def test_a_file_is_the_declaration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attend = LatentAttention(
        "vanilla", **SIZES, form="absorbed", fold_query=True, rope_pairs="interleaved", causal=True
    )
    path = tmp_path / "latent.json"
    path.write_text(attend.declared().to_json())
    assert LatentAttention(path) == attend
    latent = json.loads(path.read_text())["latent"]
    assert (latent["query_latent_dim"], latent["fold_query"], latent["rope_pairs"]) == (QUERY, True, "interleaved")
    path.write_text(json.dumps({"operation": "vanilla", "latent": latent, "call": {"q_len": 64, "causal": True}}))
    assert main(["plan", str(path), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(
        "projections of queries and keys are multiplied with each other first, declared" in note for note in notes
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"query_latent_dim": 0},
        {"rope_dim": 7},
        {"query_latent_dim": None, "fold_query": True},
        {"query_latent_dim": None, "rope_pairs": "halves"},
        {"rope_pairs": "pairs"},
        {"fold_query": 1},
        {"form": "expanded", "fold_query": False},
    ],
)
def test_declarations_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Declaration.from_dict({"operation": "vanilla", "latent": SIZES | fields})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_cos": None}, "q_cos is None"),
        (
            {"query_latent": np.zeros((B, Q, QUERY + 1), np.float32)},
            r"query_latent has shape \(2, 12, 21\); wanted \(2, 12, 20\)",
        ),
        ({"q_sin": np.zeros((1, Q, ROPE), np.float32)}, r"q_sin has shape \(1, 12, 8\); wanted \(2, 12, 4\)"),
        ({"w_uq": np.zeros((QUERY, HEADS, NOPE), np.float32)}, r"w_uq has shape .*; wanted \(20, 4, 24\)"),
        ({"w_uq": np.zeros((QUERY, HEADS, NOPE + ROPE), np.int8)}, "w_uq is int8"),
    ],
)
def test_arrays_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _call(LatentAttention("vanilla", **SIZES), _arrays() | change)


def test_queries_are_given_one_way() -> None:
    arrays = _arrays()
    given = np.zeros((B, Q, HEADS, NOPE), np.float32), np.zeros((B, Q, HEADS, ROPE), np.float32)
    rest = [arrays[name] for name in ("latent", "rope_key", "w_uk", "w_uv")]
    with pytest.raises(InputError, match="q_nope is given beside query_latent_dim=20"):
        LatentAttention("vanilla", **SIZES)(*given, *rest)
    sizes = {name: size for name, size in SIZES.items() if name != "query_latent_dim"}
    with pytest.raises(InputError, match="query_latent_dim isn't declared"):
        LatentAttention("vanilla", **sizes)(*given, *rest, w_uq=arrays["w_uq"])
    with pytest.raises(AttnOpsError):
        LatentAttention("vanilla", **sizes, fold_query=True)
