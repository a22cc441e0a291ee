"""diffusers' models on a declared attention, against torch's own ("native"): tiny random weights, a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnops[diffusers]'")
diffusers = pytest.importorskip("diffusers", reason="pip install 'attnops[diffusers]'")

from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn  # noqa: E402

from attnops import Attention, ConfigError, InputError  # noqa: E402
from attnops.adapters.diffusers import attention_for, register  # noqa: E402
from attnops.errors import InputTypeError, UnknownNameError  # noqa: E402
from attnops.verify import reference_attention  # noqa: E402

# diffusers' own, of this torch and this machine.
pytestmark = pytest.mark.filterwarnings("default")
register()


def _noise(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    call = {
        "hidden_states": _noise(2, 16, 4), "encoder_hidden_states": _noise(2, 5, 32), "pooled_projections": _noise(2, 32),
        "img_ids": _noise(16, 3), "txt_ids": _noise(5, 3), "timestep": torch.tensor([1.0, 2.0]),
    }  # fmt: skip
    return model, call


def _wan() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    call = {
        "hidden_states": _noise(1, 4, 2, 8, 8),
        "encoder_hidden_states": _noise(1, 6, 16),
        "timestep": torch.tensor([3]),
    }
    return model, call


def _qwen() -> tuple[Any, dict[str, Any]]:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 5:] = False
    call = {
        "hidden_states": _noise(2, 16, 16), "encoder_hidden_states": _noise(2, 7, 16), "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 1.0]), "img_shapes": [(1, 4, 4)] * 2,
    }  # fmt: skip
    return model, call


FAMILIES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {"flux": _flux, "wan": _wan, "qwen": _qwen}


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    """set_attention_backend changes what is active for all models; each test begins with diffusers' own."""
    with attention_backend("native"):
        yield


def _step(model: Any, call: dict[str, Any]) -> tuple[Any, list[Any]]:
    model.zero_grad()
    out = model(**call).sample
    out.square().mean().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_as_on_torchs_own(family: str) -> None:
    torch.manual_seed(0)
    model, call = FAMILIES[family]()
    wanted, gradients = _step(model, call)
    attention = Attention("vanilla")
    model.set_attention_backend(register(attention))
    assert attention.plans == ()
    got, ours = _step(model, call)
    assert attention.plans
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert len(ours) == len(gradients)
    most = max(float(x.abs().max()) for x in gradients)
    for x, y in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * most)
    with attention_backend("native"):
        model.set_attention_backend("native")
        np.testing.assert_array_equal(model(**call).sample.detach(), wanted)


Q, K = _noise(2, 5, 4, 8), _noise(2, 7, 2, 8, seed=1)
V = _noise(2, 7, 2, 8, seed=2)


KEYS = np.arange(7)[None] < np.array([[3], [7]])


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ({}, {}),
        ({"is_causal": True, "scale": 0.7}, {"mask": np.tri(5, 7, dtype=bool), "scale": 0.7}),
        ({"attn_mask": torch.tensor(KEYS)}, {"mask": KEYS[:, None, None]}),
        ({"attn_mask": _noise(2, 1, 5, 7, seed=3)}, {"bias": _noise(2, 1, 5, 7, seed=3).numpy()}),
        ({"attn_mask": _noise(2, 7, seed=3)}, {"bias": _noise(2, 7, seed=3).numpy()[:, None, None]}),
        ({"attn_mask": _noise(5, 7, seed=3)}, {"bias": _noise(5, 7, seed=3).numpy()[None, None]}),
    ],
)
@pytest.mark.parametrize("rounded", [False, True])
def test_a_call_is_the_references(call: dict[str, Any], wanted: dict[str, Any], rounded: bool) -> None:
    name = register("vanilla", name="attnops-call", round_lengths=rounded)
    got = dispatch_attention_fn(Q, K, V, enable_gqa=True, backend=name, **call)
    want = reference_attention(Q.numpy(), K.numpy(), V.numpy(), **{"scale": 8**-0.5, **wanted}).output
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_dropout_is_torchs_seed() -> None:
    torch.manual_seed(5)
    first = dispatch_attention_fn(Q, Q, Q, dropout_p=0.5, backend="attnops")
    second = dispatch_attention_fn(Q, Q, Q, dropout_p=0.5, backend="attnops")
    torch.manual_seed(5)
    assert (first != second).any()
    np.testing.assert_array_equal(dispatch_attention_fn(Q, Q, Q, dropout_p=0.5, backend="attnops"), first)


def test_names(tmp_path: Any) -> None:
    file = tmp_path / "Attention.json"
    file.write_text('{"operation": "vanilla"}')
    assert register(file) == f"attnops:{file}".lower()
    with attention_backend(register(file, name="mine")):
        dispatch_attention_fn(Q, Q, Q)
    for name in ("native", "flash", "Mine", "", 3):
        with pytest.raises(ConfigError, match="lower-case"):
            register("vanilla", name=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'set_attention_backend\("native"\)'):
        register({"operation": "vanilla", "enabled": False})
    with pytest.raises(UnknownNameError):
        register("vanila")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"attention_kwargs": {"return_lse": True}}, ConfigError, "returns only its output"),
        ({"parallel_config": object()}, ConfigError, "sequence_parallel"),
        ({"attention_kwargs": {"window_size": (3, 0)}}, ConfigError, "call.sliding_window"),
        ({"attention_kwargs": {"deterministic": True}}, ConfigError, "of other backends"),
        ({"query": Q[0]}, InputError, "wanted .batch, length, heads, dim"),
        ({"query": Q.double()}, InputTypeError, "float64"),
        ({"query": Q.bfloat16()}, InputTypeError, "wanted one dtype"),
        ({"enable_gqa": False}, InputError, "enable_gqa=True"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True}, InputError, "include the causal mask"),
        ({"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, InputError, "mask has shape"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"query": Q, "key": K, "value": V, "enable_gqa": True, "backend": "attnops", **given}
    with pytest.raises(error, match=message):
        dispatch_attention_fn(**call)


def test_functions_of_equal_declarations_are_equal() -> None:
    assert attention_for("vanilla") == attention_for("vanilla") != attention_for("vanilla", round_lengths=True)
    assert "attention_for" in repr(attention_for("vanilla"))
