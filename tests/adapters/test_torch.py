"""scaled_dot_product_attention on torch tensors, against torch's own."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnops[torch]'")

from attnops import Attention, ConfigError, InputError, RefusedError  # noqa: E402
from attnops.adapters.torch import (  # noqa: E402
    ScaledDotProductAttention,
    scaled_dot_product_attention,
    scaled_dot_product_attention_for,
)
from attnops.errors import InputTypeError  # noqa: E402
from attnops.planning.notes import has_note  # noqa: E402

OWN = torch.nn.functional.scaled_dot_product_attention
PLAIN = {"operation": "vanilla"}
SAME = ((2, 3, 5, 8),) * 3
LONG = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4))


def _normal(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _results(function: Any, shapes: Any, dtype: Any, **call: Any) -> list[Any]:
    tensors = [_normal(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    mask = call.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        call["attn_mask"] = mask.clone().requires_grad_()
        tensors.append(call["attn_mask"])
    out = function(*tensors[:3], **call)
    (out.float() ** 2).sum().backward()
    return [out.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "call"),
    [
        (SAME, {}),
        (SAME, {"scale": 0.3, "is_causal": True}),
        (LONG, {"is_causal": True}),  # top-left: query i sees the keys up to i
        (((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 8)), {"is_causal": True}),
        (SAME, {"attn_mask": torch.rand(5, 5, generator=torch.Generator().manual_seed(3)) > 0.3}),
        (LONG, {"attn_mask": _normal(2, 1, 5, 7)}),
        (((5, 8), (6, 8), (6, 8)), {}),
        (((3, 5, 8), (3, 6, 8), (3, 6, 8)), {"attn_mask": _normal(3, 5, 6)}),
        (((2, 2, 3, 5, 8),) * 3, {"attn_mask": _normal(2, 1, 1, 5, 5)}),
        (((2, 3, 5, 8), (1, 3, 5, 8), (3, 5, 8)), {}),
        (((2, 1, 5, 8), (2, 3, 5, 8), (2, 1, 5, 8)), {}),
        (((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)), {"enable_gqa": True}),
    ],
)
def test_numbers_and_gradients_are_torchs_own(shapes: Any, call: dict[str, Any], dtype: Any) -> None:
    call = {n: x.to(dtype) if n == "attn_mask" and x.dtype != torch.bool else x for n, x in call.items()}
    ours = _results(scaled_dot_product_attention, shapes, dtype, **call)
    theirs = _results(OWN, shapes, dtype, **call)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert (got - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))
    with torch.no_grad():
        still = scaled_dot_product_attention(*(_normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)), **call)
    assert (still - ours[0]).abs().max() <= tolerance


def test_a_query_that_may_see_nothing_gives_0_there_and_here() -> None:
    query, mask = _normal(1, 1, 3, 4), torch.tensor([True, False, True])[:, None].expand(3, 3)
    for attn_mask in (mask, torch.where(mask, 0.0, -torch.inf)):
        for function in (OWN, scaled_dot_product_attention):
            x = query.clone().requires_grad_()
            out = function(x, x, x, attn_mask)
            assert not out[0, 0, 1].any()
            out.sum().backward()
            assert x.grad.isfinite().all()


def test_tensors_that_are_not_dense() -> None:
    """Transposed, sliced and expanded, as models make them."""
    wide = _normal(2, 5, 3, 24)
    query, key, value = (x.transpose(1, 2) for x in wide.split(8, dim=-1))
    mask = torch.ones(5, dtype=torch.bool).expand(5, 5)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, mask), OWN(query, key, value, mask))


def test_only_what_needs_a_gradient_gets_one() -> None:
    query, key, value = (_normal(1, 2, 4, 8, seed=i) for i in range(3))
    key.requires_grad_()
    wanted = torch.autograd.grad(OWN(query, key, value).square().sum(), key)[0]
    out = scaled_dot_product_attention(query, key, value, _normal(4, 4) * 0)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), key)[0], wanted, atol=1e-5, rtol=1e-5)
    assert not scaled_dot_product_attention(query, key.detach(), value).requires_grad


def test_what_is_changed_in_place_is_found() -> None:
    for change in (0, 1):
        query = _normal(1, 2, 4, 8).requires_grad_()
        inner = query * 1
        out = scaled_dot_product_attention(inner, inner, inner)
        (inner, out)[change].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    x = _normal(1, 1, 4, 8).requires_grad_()
    out = scaled_dot_product_attention(x, x, x)
    with pytest.raises(RefusedError, match=r"create_graph=True: .*one derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_model_trains_as_with_torchs_own() -> None:
    def losses(function: Any) -> list[float]:
        torch.manual_seed(0)
        project, out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 1)
        optimiser = torch.optim.SGD([*project.parameters(), *out.parameters()], lr=0.1)
        x, found = _normal(4, 6, 8), []
        for _ in range(4):
            q, k, v = project(x).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
            loss = (
                (out(function(q, k, v, is_causal=True).transpose(1, 2).flatten(2)) - x.sum(-1, keepdim=True))
                .square()
                .mean()
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    np.testing.assert_allclose(losses(scaled_dot_product_attention), losses(OWN), rtol=1e-5)


def test_dropout_follows_torchs_seed() -> None:
    x = _normal(1, 2, 16, 8)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    mean = torch.stack([scaled_dot_product_attention(x, x, x, dropout_p=0.5) for _ in range(300)]).mean(0)
    assert (mean - OWN(x, x, x)).abs().max() < 0.5
    with pytest.raises(InputError, match=r"dropout_prob=1\.0; wanted a probability in \[0, 1\)"):
        scaled_dot_product_attention(x, x, x, dropout_p=1.0)


def test_a_declaration() -> None:
    x, window = _normal(1, 2, 6, 8), {"kind": "sliding_window", "left": 1, "right": 1}
    function = scaled_dot_product_attention_for(PLAIN | {"call": {"mask": window}})
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
    torch.testing.assert_close(function(x, x, x), OWN(x, x, x, near))
    torch.testing.assert_close(function(x, x, x, is_causal=True), OWN(x, x, x, near.tril()))
    assert function.attention.plans[0].problem.mask.describe() == "window(left=1, right=1, offset=0)"
    assert function == scaled_dot_product_attention_for(Attention(PLAIN | {"call": {"mask": window}}))
    assert pickle.loads(pickle.dumps(function)) == function
    assert scaled_dot_product_attention_for(PLAIN | {"enabled": False}) is OWN
    with pytest.raises(ConfigError, match=r"softmax_scale: the declaration says 0.5, the call says 1.0"):
        scaled_dot_product_attention_for(PLAIN | {"call": {"softmax_scale": 0.5}})(x, x, x, scale=1.0)
    with pytest.raises(ConfigError, match="query_offset: the declaration says 2, the call says 0"):
        scaled_dot_product_attention_for(PLAIN | {"call": {"query_offset": 2}})(x, x, x, is_causal=True)


def test_on_a_mesh() -> None:
    x = _normal(4, 4, 8, 8).requires_grad_()
    function = scaled_dot_product_attention_for(PLAIN, mesh={"fsdp": 2, "tp": 2})
    out = function(x, x, x, is_causal=True)
    out.square().sum().backward()
    got, x.grad = x.grad, None
    OWN(x, x, x, is_causal=True).square().sum().backward()
    torch.testing.assert_close(got, x.grad, atol=1e-5, rtol=1e-5)
    assert function.attention.plans[0].problem.devices == 4


def test_the_plan_says_what_the_mask_is() -> None:
    x, function = _normal(1, 2, 6, 8), scaled_dot_product_attention_for(PLAIN)
    function(x, x, x, torch.ones(6, 6, dtype=torch.bool).tril())
    assert has_note(function.attention.plans[0].notes, "mask.array_structured")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True},
            "attn_mask with is_causal=True is an error, as",
        ),
        ({"query": np.ones((2, 3, 5, 8), np.float32)}, "query is a numpy.ndarray; wanted a plain dense torch.Tensor"),
        ({"query": _normal(2, 3, 5, 8).to_sparse()}, "wanted a plain dense torch.Tensor"),
        ({"query": _normal(2, 3, 5, 8).double()}, "query is torch.float64; wanted one of torch.float32"),
        ({"key": _normal(2, 3, 5, 8).half()}, "float32, torch.float16 and torch.float32; wanted one dtype"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.int32)}, "attn_mask is torch.int32; wanted one of torch.bool"),
        (
            {"attn_mask": torch.ones(4, 5)},
            r"attn_mask has shape \(4, 5\); wanted one that broadcasts to \(2, 3, 5, 5\)",
        ),
        ({"attn_mask": torch.ones(1, 2, 3, 5, 5)}, r"attn_mask has shape \(1, 2, 3, 5, 5\)"),
        ({"key": _normal(2, 3, 5, 4)}, r"key \(2, 3, 5, 4\).*wanted \[\.\.\., heads, q, dim\]"),
        ({"query": _normal(8)}, r"query \(8,\)"),
        ({"query": _normal(2, 6, 5, 8)}, "don't broadcast. Hint: grouped heads require enable_gqa=True"),
        ({"query": _normal(2, 4, 5, 8), "enable_gqa": True}, "a multiple of them as query heads"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    call = dict(zip(("query", "key", "value"), (_normal(*s) for s in SAME), strict=True)) | given
    with pytest.raises((InputError, InputTypeError), match=message):
        scaled_dot_product_attention(**call)


def test_two_arguments_are_keywords_as_in_torch() -> None:
    x = _normal(1, 1, 4, 8)
    for function in (OWN, ScaledDotProductAttention(Attention(PLAIN))):
        with pytest.raises(TypeError):
            function(x, x, x, None, 0.0, False, 0.5)


def test_two_functions_of_one_declaration_keep_their_own_plans() -> None:
    x = _normal(1, 1, 4, 8).requires_grad_()
    for _ in range(2):
        function = scaled_dot_product_attention_for(PLAIN)
        for _ in range(2):
            function(x, x, x)
        assert len(function.attention.plans) == 1


@pytest.mark.parametrize("mask", [None, "bool", "float", "one for all keys"])
def test_a_growing_cache_compiles_for_few_sizes(mask: str | None) -> None:
    """Queries of a step against 1 to 70 keys: three sizes, and torch's numbers."""
    for rounds in (True, False):
        function = scaled_dot_product_attention_for(PLAIN, round_lengths=rounds)
        counts = (2, 31, 32, 33, 64, 65, 70) if rounds else (2, 3, 5)
        if rounds and mask != "one for all keys":
            counts = (1, *counts)
        for keys in counts:
            query, key, value = _normal(2, 4, 1, 8), _normal(2, 2, keys, 8, seed=1), _normal(2, 2, keys, 4, seed=2)
            given = {
                None: None,
                "bool": (_normal(2, 1, 1, keys) > 0) | (torch.arange(keys) == 0),
                "float": _normal(4, 1, keys),
                "one for all keys": _normal(2, 4, 1, 1),
            }[mask]
            call: dict[str, Any] = {"attn_mask": given, "enable_gqa": True}
            torch.testing.assert_close(function(query, key, value, **call), OWN(query, key, value, **call))
        plans = function.attention.plans
        assert [plan.problem.kv_len for plan in plans] == ([32, 64, 128] if rounds else list(counts))
        said = [note for plan in plans for note in plan.notes if "keys are padded to" in note]
        assert len(said) == (3 if rounds else 0)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("keys", [40, 1500])
def test_rounded_calls_of_few_and_of_many_bytes(keys: int, dtype: torch.dtype, error: float) -> None:
    """Few bytes are padded and returned by NumPy, many by torch."""
    query, key, value = (
        x.to(dtype) for x in (_normal(2, 4, 1, 8), _normal(2, 4, keys, 8, seed=1), _normal(2, 4, keys, 8))
    )
    mask = torch.arange(keys)[None] % 3 == 0
    found = scaled_dot_product_attention_for(PLAIN)(query, key, value, attn_mask=mask)
    wanted = OWN(*(x.double() for x in (query, key, value)), attn_mask=mask)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=error, rtol=error)
    found += 1  # the caller's own memory


def test_the_gradient_of_a_rounded_bias_has_its_own_length() -> None:
    shapes, bias = ((1, 2, 1, 8), (1, 2, 7, 8), (1, 2, 7, 8)), [_normal(1, 2, 1, 7).requires_grad_() for _ in range(2)]
    for function, x in zip((scaled_dot_product_attention_for(PLAIN), OWN), bias, strict=True):
        function(*(_normal(*shape) for shape in shapes), attn_mask=x).sum().backward()
    torch.testing.assert_close(bias[0].grad, bias[1].grad, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_call_whose_keys_are_rounded_are_torchs_own() -> None:
    shapes = ((2, 3, 2, 8), (2, 3, 7, 8), (2, 3, 7, 4))
    function = scaled_dot_product_attention_for(PLAIN)
    for call in ({}, {"attn_mask": _normal(2, 1, 2, 7)}):
        for got, wanted in zip(*(_results(f, shapes, torch.float32, **call) for f in (function, OWN)), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert [plan.problem.kv_len for plan in function.attention.plans] == [32, 32]


def test_what_is_never_rounded() -> None:
    query, keys = _normal(1, 2, 1, 8), _normal(1, 2, 5, 8)
    same = scaled_dot_product_attention_for(PLAIN)
    same(keys, keys, keys)
    assert same.attention.plans[0].problem.kv_len == 5
    wants = scaled_dot_product_attention_for(PLAIN | {"call": {"kv_lengths": True}})
    with pytest.raises(InputError, match=r"call.kv_lengths is declared, but the call has no kv_lengths"):
        wants(query, keys, keys)
    late = scaled_dot_product_attention_for(PLAIN | {"call": {"causal": True}})  # a step, which stands at the end
    torch.testing.assert_close(late(query, keys, keys), OWN(query, keys, keys))
