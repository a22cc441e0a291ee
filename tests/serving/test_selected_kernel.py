"""Tokens that name their keys in the TPU kernel of paged attention, in Pallas' interpreter, against the float64 reference."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from covering import covering
from jax.sharding import AbstractMesh, AxisType
from paged_batches import KINDS, PagedCase
from paged_kernel_runs import LAYOUTS, fits, laid_out, run
from test_selected_pages import selected_keys

from attnops import InputError, KVCache, OperationMetadata, OperationRegistry
from attnops.operators.kernels.pages.tpu import PageArrays, paged_attention_tpu, selected
from attnops.operators.kernels.pages.tpu.selected import Chosen
from attnops.operators.paged.tpu_kernel import tpu_call

INT8 = {"quantised": "int8", "scale": "token_head"}
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": (9, 0), "sinks": True},
    {"window": (4, 3), "causal": False, "cap": 3.0},
    {"chunk": 10, "page": 24},
    {"tree": 8, "sinks": True, "page": 16},
    {"spans": True, "prefix": 9, "window": (3, 0)},
    {"dtype": "bfloat16", "cap": 3.0, "sinks": True, "page": 16},
    *({"quantised": q, "scale": s, "page": 32} for q in ("int8", "float8_e4m3fn") for s in ("tensor", "head", "token_head")),
    {"dtype": "bfloat16", "quantised": "int8", "scale": "token_head", "page": 40, "window": (9, 0)},
    {"page": 3},
)  # fmt: skip
QUICK = (
    ("latent", PagedCase("mixed", (18, 1), (72, 64), latent=True, window=(9, 0), cap=3.0, sinks=True, page=16)),
    ("latent", PagedCase("speculate", (16, 1), (40, 32), latent=True, **INT8, rope="bfloat16", page=64)),
    ("split", PagedCase("decode", (16, 2), dtype="bfloat16", sinks=True)),
    ("heads", PagedCase("mixed", (9, 3), tree=12, **INT8, page=24)),
    ("joined", PagedCase("speculate", dims=(48, 32), chunk=10, page=16)),
    ("packed", PagedCase("mixed", (8, 4), quantised="float8_e5m2", scale="head", spans=True, window=(3, 0))),
    ("interleaved", PagedCase("decode", (8, 4), (128, 128), **INT8, page=16)),
)
EVERY = [
    *((layout, PagedCase(kind, heads, (dim, dim), **FEATURES[n])) for layout, kind, heads, dim, n in covering(
        itertools.product(LAYOUTS, KINDS, ((9, 3), (16, 2), (5, 1), (8, 4)), (64, 128), range(len(FEATURES))), 2)),
    *(("latent", PagedCase(kind, (heads, 1), dims, latent=True, **FEATURES[n])) for kind, heads, dims, n in covering(
        itertools.product(KINDS, (5, 32), ((576, 512), (40, 32)), range(len(FEATURES))), 2)),
    *(("latent", PagedCase(kind, (16, 1), (72, 64), latent=True, quantised=quantised, scale=scale, rope=rope, page=page))
      for kind, quantised, scale, rope, page in covering(itertools.product(
          KINDS, ("int8", "float8_e4m3fn"), ("head", "token_head"), ("bfloat16", "float32"), (8, 12, 64)), 2)),
]  # fmt: skip


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.name


def _check(layout: str, case: PagedCase, count: int, *, other: Any = None, **more: Any) -> None:
    """A call against the reference. other: what the pages hold where no token of a sequence chose a key."""
    arrays = batches.make(case)
    arrays["selected"] = chosen = selected_keys(case, arrays, count)
    want = batches.expect(case, arrays)
    if other is not None:
        for s in range(int(arrays["num_seqs"][0])):
            first, last = arrays["cu_q_lens"][s : s + 2]
            for j in set(range(int(arrays["kv_lens"][s]))) - set(chosen[first:last].ravel().tolist()):
                for name in ("key_pages", "value_pages"):
                    arrays[name][arrays["page_table"][s, j // case.page], j % case.page] = other
    batches.agree(case, run(case, arrays, layout, **more), want)


@pytest.mark.parametrize(("layout", "case"), QUICK, ids=_name)
def test_agrees_with_the_reference(layout: str, case: PagedCase) -> None:
    _check(layout, case, 9)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "case"), [x for x in EVERY if x not in QUICK and fits(*x)], ids=_name)
@pytest.mark.parametrize("count", [1, 30])
def test_agrees_with_the_reference_in_every_feature(layout: str, case: PagedCase, count: int) -> None:
    _check(layout, case, count)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (3, 3), (32, 5)])
@pytest.mark.parametrize(("layout", "page"), [("latent", 8), ("latent", 24), ("split", 8), ("heads", 12)])
def test_agrees_with_any_sizes(layout: str, page: int, sizes: tuple[int, int]) -> None:
    latent = layout == "latent"
    heads, dims = ((6, 1), (40, 32)) if latent else ((6, 2), (64, 64))
    case = PagedCase("mixed", heads, dims, latent=latent, page=page)
    _check(layout, case, 25, pages_per_block=sizes[0], buffers=sizes[1])


@pytest.mark.parametrize("other", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("latent", PagedCase("mixed", (6, 1), (40, 32), latent=True, page=16)),
        pytest.param("joined", PagedCase("mixed", (8, 2), dtype="bfloat16", page=24), marks=pytest.mark.slow),
        *(
            pytest.param(layout, PagedCase(kind, (8, 2), quantised="float8_e5m2", scale=scale, page=32), marks=pytest.mark.slow)
            for layout, kind, scale in (("heads", "decode", "head"), ("split", "speculate", "token_head"))
        ),
    ],
    ids=_name,
)  # fmt: skip
def test_tokens_that_nobody_chose_may_hold_anything(layout: str, case: PagedCase, other: float) -> None:
    """Though they are fetched with their neighbours."""
    _check(layout, case, 7, other=other)


def test_a_value_that_is_infinite_stays_so() -> None:
    """Where a token chose it, and only there."""
    case = PagedCase("decode", dims=(128, 128), page=16)
    arrays = batches.make(case)
    arrays["selected"] = np.full((len(arrays["query"]), 4), -1, np.int32)
    arrays["selected"][:5] = np.arange(4)
    call = jax.jit(lambda x: paged_attention_tpu(**x, **case.call, layout="joined", max_q_len=1, interpret=True)[0])
    plain = np.asarray(call(laid_out(arrays, "joined")))
    first = arrays["page_table"][1, 0]  # of the sequence of 40 tokens
    arrays["value_pages"][first, 2, 0, 5], arrays["value_pages"][first, 9, 0, 6] = np.inf, np.nan
    found = np.asarray(call(laid_out(arrays, "joined")))
    assert np.isposinf(found[1, :3, 5]).all()  # of the first kv head
    rest = np.ones(found.shape, bool)
    rest[1, :3, 5] = False
    assert (found[rest] == plain[rest]).all()


def test_a_key_that_comes_twice_is_one() -> None:
    case = PagedCase("mixed", (6, 1), (40, 32), latent=True)
    arrays = batches.make(case)
    chosen = selected_keys(case, arrays, 6)
    arrays["selected"] = np.concatenate([chosen, chosen[:, ::-1]], axis=1)
    batches.agree(case, run(case, arrays, "latent"), batches.expect(case, arrays))


class _OneBitOff(Chosen):
    def _bits(self, place: jax.Array, keys: int, first: Any) -> jax.Array:
        return super()._bits(place, keys, first) | (place == 3)


class _NextItems(Chosen):
    def id(self, number: Any, at: Any) -> Any:
        return self.next[0, at]


@pytest.mark.parametrize("wrong", [_OneBitOff, _NextItems])
def test_a_wrong_kernel_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnops.operators.kernels.pages.tpu.pages.Chosen", wrong)
    with pytest.raises(AssertionError):
        _check("latent", PagedCase("mixed", (6, 1), (40, 32), latent=True, page=16), 9)


def test_a_piece_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = selected._pieces
    monkeypatch.setattr(selected, "_pieces", lambda *x: made(*x)._replace(counts=jnp.maximum(made(*x).counts - 1, 0)))
    with pytest.raises(AssertionError):
        _check("split", PagedCase("mixed"), 9)


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"selected": np.zeros((3, 2), np.int32)}, {}, r"selected has the shape \(3, 2\)"),
        ({"selected": np.zeros((42, 70000), np.int32)}, {}, "places of 70000 keys of two tokens"),
        (
            {"selected": np.zeros((42, 1), np.int32)},
            {"rows": PageArrays(np.zeros(1))},
            "rows are given beside selected",
        ),
        ({}, {"rows": PageArrays(np.zeros(1)), "page_stride": 2}, "rows are given beside page_stride"),
    ],
)
def test_says_what_does_not_fit(change: dict[str, Any], more: dict[str, Any], message: str) -> None:
    arrays = laid_out(batches.make(PagedCase("mixed")), "heads")
    tokens = len(arrays["query"])
    change = {n: x if len(x) == 3 else x[:1].repeat(tokens, axis=0) for n, x in change.items()}
    with pytest.raises(InputError, match=message):
        jax.eval_shape(lambda: paged_attention_tpu(**arrays, **change, **PagedCase().call, **more, layout="heads"))


# -- in plans ----------------------------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "layers": 1, "kv_heads": 1, "head_dim": 576, "page_size": 64, "pages": 64, "max_sequences": 4, "max_length": 1024
}  # fmt: skip
LATENTS = FIELDS | {"kind": "latent", "value_dim": 512}


def _plan(count: int, fields: dict[str, Any] = LATENTS, metadata: dict[str, Any] = {}, **step: Any) -> Any:  # noqa: B006
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    declared = OperationMetadata(**{"platform": "tpu", "fallback": "allow", "softmax_scale": 0.1} | metadata)
    key = shape(8, 1, 576)
    value = None if "kind" in fields else key
    return OperationRegistry.create("paged", declared).plan(
        shape(8, 16, 576), key, value, cache=KVCache(**fields), selected=shape(8, count, dtype=jnp.int32), **step
    )


def test_a_plan_says_what_is_fetched_at_most() -> None:
    plan = _plan(128)
    assert plan.implementation == "paged.forward_tpu"
    (found,) = (note.values for note in plan.notes if note.code == "paged.selected_pieces")
    # Pieces of 8 tokens in rows of 640 numbers. Two tokens' rows, twice, have 128 pieces and the bits of these, of the pieces
    # of another block and of two words more; 7 words are a token's unit.
    words = -(-(128 + 128 * 8 // 32 + 128 * 8 // 32 + 2) // 128) * 128
    assert found == {"tokens": 8, "size": 8 * 128 * 8 * 640 * 2, "scalars": 4 * (4 * words + 8 * 7)}


@pytest.mark.parametrize(
    ("count", "fields", "code"), [(16, FIELDS, "paged.page_rows"), (70000, LATENTS, "paged.selected_smem")]
)
def test_reasons_against_the_kernel(count: int, fields: dict[str, Any], code: str) -> None:
    plan = _plan(count, fields)
    assert plan.implementation == "paged.forward_native"
    assert [{x.code for x in r.reasons} for r in plan.rejected] == [{code}]


def test_rows_are_written_first_beside_selected_keys() -> None:
    plan = _plan(16, update="fused", max_q_len=1)
    assert plan.implementation == "paged.forward_tpu"
    assert [note.code for note in plan.notes if note.field == "update"] == ["paged.fused_spans"]
    assert not tpu_call(plan.problem, plan.problem.config)[1].writes


def test_the_specs_and_sizes_are_a_devices_own() -> None:
    plan = _plan(
        16,
        LATENTS | {"pages_axis": "dp"},
        {"mesh": AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)},
        max_q_len=1,
    )
    (spec,) = (x for x in plan.tensors if x.tensor == "selected")
    assert (tuple(spec.spec), spec.local_shape) == (("dp", None), (4, 16))
    geometry, _ = tpu_call(plan.problem, plan.problem.config)
    assert (geometry.tokens, geometry.heads, geometry.selected) == (4, 4, 16)


def test_only_the_kernel_has_sizes_to_search() -> None:
    plan = _plan(16)
    assert set(plan.runs.tuned_fields(plan.problem, plan.placement)) == {"pages_per_block"}
    plan = _plan(16, metadata={"platform": "cpu", "operation_configs": {"paged": {"pages_per_block": 2}}})
    assert plan.runs.tuned_fields(plan.problem, plan.placement) == ()
    assert [n.values["fields"] for n in plan.notes if n.code == "config.unread"] == [["pages_per_block"]]
