"""torchax tensors, which are JAX arrays, through the torch adapter, against torchax's own attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnops[torch]'")
try:  # torchax 0.0.13 with torch 2.13 fails inside its import, and not with an ImportError
    import torchax
    from torchax import interop
except (ImportError, AttributeError) as error:
    pytest.skip(f"no torchax that works with this torch: {error}", allow_module_level=True)

from attnops.adapters.torch import scaled_dot_product_attention_for  # noqa: E402
from attnops.errors import InputTypeError  # noqa: E402
from attnops.planning.notes import has_note  # noqa: E402

OWN = torch.nn.functional.scaled_dot_product_attention


def _numbers(*shape: int) -> Any:
    count = int(torch.tensor(shape).prod())
    return torch.arange(float(count)).sin().reshape(shape).to("jax")


def _close(got: Any, wanted: Any) -> bool:
    return abs((got - wanted).jax()).max() < 1e-5


def test_numbers_and_gradients_are_torchaxs_own() -> None:
    ours = scaled_dot_product_attention_for({"operation": "vanilla"})
    with torchax.default_env():
        found = []
        for function in (ours, OWN):
            query, bias = _numbers(2, 3, 5, 8).requires_grad_(), _numbers(5, 5).requires_grad_()
            out = function(query, query, query, attn_mask=bias)
            (out**2).sum().backward()
            found.append((out.detach(), query.grad, bias.grad))
        assert all(_close(got, wanted) for got, wanted in zip(*found, strict=True))


def test_under_jit_and_jaxs_gradient() -> None:
    ours = scaled_dot_product_attention_for({"operation": "vanilla"})
    with torchax.default_env():
        query = _numbers(2, 3, 5, 8)
        steps = [
            interop.jax_jit(interop.jax_value_and_grad(lambda q, f=f: (f(q, q, q, is_causal=True) ** 2).sum()))
            for f in (ours, OWN)
        ]
        (loss, gradient), (own_loss, own_gradient) = (step(query) for step in steps)
        assert _close(loss / own_loss, own_loss / own_loss)
        assert _close(gradient, own_gradient)
    assert ours.attention.plans[0].problem.mask.describe() == "causal(offset=0)"


def test_under_a_model_that_calls_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, env = scaled_dot_product_attention_for({"operation": "vanilla"}), torchax.default_env()
    with env:
        query, mask = _numbers(2, 3, 5, 8), torch.ones(5, 5, dtype=torch.bool, device="jax").tril()
        wanted = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
        monkeypatch.setattr(env, "_ops", dict(env._ops))
        env.override_op_definition(torch.nn.functional.scaled_dot_product_attention, ours)
        assert _close(torch.nn.functional.scaled_dot_product_attention(query, query, query, mask), wanted)
    assert has_note(ours.attention.plans[0].notes, "mask.array_structured")


def test_dropout_and_tensors_of_two_kinds() -> None:
    ours = scaled_dot_product_attention_for({"operation": "vanilla"})
    with torchax.default_env():
        query = _numbers(2, 3, 5, 8)
        one, two = (ours(query, query, query, dropout_p=0.5) for _ in range(2))
        assert not _close(one, two)
        with pytest.raises(InputTypeError, match="tensors of two kinds: query torchax, key torchax, value plain"):
            ours(query, query, torch.zeros(2, 3, 5, 8, device="cpu"))
