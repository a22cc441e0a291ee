"""Named axes: levanter's dot_product_attention with a declared attention, against haliax' own and float64."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # haliax 1.3 uses what equinox deprecated
    hax = pytest.importorskip("haliax", reason="pip install haliax")
    from haliax.nn.attention import dot_product_attention as own

from attnops import Attention, ConfigError, InputError
from attnops.adapters.haliax import dot_product_attention_for

# haliax' own products ask jax for what is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim:DeprecationWarning")
B, T, S, H, G, D = hax.make_axes(batch=2, position=5, key_position=6, kv_heads=2, group=3, head_size=8)
ORDERS = {
    "heads_last": (B, T, H, G),
    "heads_first": (B, H, G, T),
    "no_group": (B, T, H),
    "no_batch": (T, H),
    "one_head": (B, T),
}


def _arrays(order: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    shared = tuple(axis for axis in order if axis not in (T, G))
    return tuple(
        hax.random.normal(key, (*axes, D)) for key, axes in zip(keys, (order, (*shared, S), (S, *shared)), strict=True)
    )


def _same(got: Any, want: Any) -> None:
    assert [axis.name for axis in got.axes] == [axis.name for axis in want.rearrange(got.axes).axes]
    np.testing.assert_allclose(got.array, want.rearrange(got.axes).array, atol=2e-6)


@dataclass
class _Mask:
    """The fields of levanter's AttentionMask, with its meaning."""

    is_causal: bool = False
    causal_offset: Any = None
    explicit_mask: Any = None
    segment_ids: Any = None
    sliding_window: int | None = None

    def seen(self) -> Any:
        distance = hax.arange(T).broadcast_axis(S) - hax.arange(S).broadcast_axis(T)
        found = hax.ones((T, S), dtype=bool)
        if self.is_causal:
            found = found & (
                distance + (0 if self.causal_offset is None else self.causal_offset.broadcast_axis((T, S))) >= 0
            )
        if self.sliding_window is not None:
            found = found & (distance >= 0) & (distance < self.sliding_window)
        if self.explicit_mask is not None:
            found = found & self.explicit_mask
        if self.segment_ids is not None:
            found = found & (self.segment_ids[0].broadcast_axis(S) == self.segment_ids[1])
        return found


@pytest.mark.parametrize("order", ORDERS)
def test_outputs_and_gradients_are_haliax_own(order: str) -> None:
    arrays, attend = _arrays(ORDERS[order]), dot_product_attention_for("vanilla")
    _same(attend(T, S, D, *arrays), own(S, D, *arrays))

    def loss(function: Any) -> Any:
        return jax.grad(lambda arrays: (function(*arrays) ** 2).sum().scalar())(arrays)

    for got, want in zip(loss(lambda *x: attend(T, S, D, *x)), loss(lambda *x: own(S, D, *x)), strict=True):
        _same(got, want)


MASKS = {
    "causal": _Mask(is_causal=True),
    "offset": _Mask(is_causal=True, causal_offset=hax.named(jnp.array([1, 0], jnp.int32), B)),
    "window": _Mask(is_causal=True, sliding_window=2),
    "explicit": _Mask(explicit_mask=hax.named(jnp.tri(5, 6, 1, dtype=bool), (T, S))),
    "explicit_of_groups": _Mask(
        is_causal=True,
        explicit_mask=hax.named((jnp.arange(3 * 5 * 6) % 7 > 0).reshape(3, 5, 6).at[:, :, 0].set(True), (G, T, S)),
    ),
    "segments": _Mask(
        segment_ids=(
            hax.named(jnp.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]), (B, T)),
            hax.named(jnp.array([0, 0, 0, 1, 1, 1]), S),
        )
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_levanters_masks_mean_what_they_mean_there(name: str) -> None:
    arrays, mask = _arrays((B, T, H, G)), MASKS[name]
    attention = Attention("vanilla")
    _same(dot_product_attention_for(attention)(T, S, D, *arrays, mask=mask), own(S, D, *arrays, mask=mask.seen()))
    if name in ("causal", "window"):
        assert "dense_mask" not in attention.plans[0].problem.mask.describe()


def test_mask_bias_scale_cap_and_dtype() -> None:
    q, k, v = _arrays((B, T, H, G))
    attend = dot_product_attention_for("vanilla")
    bias = hax.random.normal(jax.random.key(7), (H, S))
    seen = hax.named(jnp.arange(6) < 4, S)
    _same(attend(T, S, D, q, k, v, mask=seen, bias=bias), own(S, D, q, k, v, mask=seen, bias=bias))
    _same(attend(T, S, D, q, k, v, scaling_factor=0.5), own(S, D, q * (0.5 * 8**0.5), k, v))
    capped = attend(T, S, D, q, k, v, logits_soft_cap=1.5, attention_dtype=jnp.float32)
    logits = hax.dot(q, k, axis=D) * 8**-0.5
    _same(capped, hax.dot(hax.nn.softmax(hax.tanh(logits / 1.5) * 1.5, axis=S), v, axis=S))


def test_dropout_keeps_the_mean() -> None:
    arrays, attend = _arrays((B, T, H)), dot_product_attention_for("vanilla")
    still = attend(T, S, D, *arrays, dropout=0.5)
    draw = jax.jit(lambda key: attend(T, S, D, *arrays, dropout=0.5, inference=False, prng=key).array)
    draws = np.stack([draw(key) for key in jax.random.split(jax.random.key(1), 400)])
    assert np.abs(draws[0] - draws[1]).max() > 1e-2
    assert np.abs(draws.mean(0) - still.array).mean() < np.abs(draws[0] - still.array).mean() / 5


def test_what_is_refused() -> None:
    q, k, v = arrays = _arrays((B, T, H))
    attend = dot_product_attention_for("vanilla")
    refused: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "flash_block_size=512", {"flash_block_size": 512}),
        (ConfigError, "use_flash=True", {"use_flash": True}),
        (ConfigError, "attention_dtype='bfloat16'", {"attention_dtype": jnp.bfloat16}),
        (ConfigError, "before the cap", {"bias": hax.zeros((T, S)), "logits_soft_cap": 2.0}),
        (InputError, "some of batch, key_position", {"mask": hax.ones((D,), dtype=bool)}),
        (InputError, "wanted a boolean haliax", {"mask": jnp.ones((5, 6), bool)}),
        (ConfigError, "unshifted", {"mask": _Mask(is_causal=True, causal_offset=1, sliding_window=2)}),
    ]
    for kind, match, call in refused:
        with pytest.raises(kind, match=match):
            attend(T, S, D, *arrays, **call)
    with pytest.raises(InputError, match="both 'position'"):
        attend(T, T, D, q, k.rename({S.name: T.name}), v.rename({S.name: T.name}))
    with pytest.raises(InputError, match="isn't among"):
        attend(S, S, D, *arrays)
    with pytest.raises(InputError, match=r"query is .*; wanted a haliax\.NamedArray"):
        attend(T, S, D, q.array, k, v)
    with pytest.raises(ConfigError, match="enabled"):
        dot_product_attention_for({"operation": "vanilla", "enabled": False})
