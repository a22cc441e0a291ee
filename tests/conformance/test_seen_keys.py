"""Which keys some query sees, as the kernels find it; and the reference, which sees no others."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops import (
    Causal,
    Dense,
    Full,
    Mask,
    MaskFunction,
    OperationMetadata,
    SegmentIds,
    SlidingWindow,
    register_mask_function,
)
from attnops.authoring import LocalCall, LocalOutput, Operation, implementation
from attnops.masks import Lengths
from attnops.operators.kernels import seen_keys as module
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.seen_keys import seen_keys
from attnops.operators.vanilla import VanillaConfig
from attnops.planning import ALL_FEATURES
from attnops.verify import reference_attention, reference_gradients

from . import harness
from .hidden_keys import BATCH, HEADS, KINDS, KV, KV_IDS, LENGTHS, OFFSETS, Q

POISONS = [(name, number) for name in ("key", "value") for number in (np.nan, np.inf)]


# Kinds of which only a test of each pair tells, if starts are traced.
IN_PAIRS = (
    "lengths_and_chunks", "segment_ids", "segments_and_causal", "positions", "dense", "blocks_of_heads", "chosen_blocks",
    "dynamic_or",
)  # fmt: skip
SLOW = pytest.mark.slow
WAYS = [
    pytest.param(
        kind,
        traced,
        in_tiles,
        marks=[] if (traced and in_tiles and kind in IN_PAIRS) or not (traced or in_tiles) else SLOW,
    )
    for kind in KINDS
    for traced in (False, True)
    for in_tiles in (False, True)
]


@pytest.mark.parametrize(("kind", "traced", "in_tiles"), WAYS)
def test_seen_keys(kind: str, traced: bool, in_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the mask written out: where the starts are known and where they aren't; with NaN in a key, and without."""
    call, visible = KINDS[kind]
    if in_tiles:
        monkeypatch.setattr(module, "_AT_ONCE", 1)
    mask = _joined(call)
    visible = np.broadcast_to(visible, (BATCH, HEADS, Q, KV))
    want = visible.reshape(BATCH, 4, 2, Q, KV).any((2, 3))

    def find(mask: Mask, starts: Any, offset: Any, key: Any) -> Any:
        local = LocalMask(mask, starts, Q, KV, offset, starts)
        return seen_keys(local, 4, (key, None))

    offset = call.get("query_offset", 0)
    dirty, clean = np.full((BATCH, KV, 4, 1), np.nan, np.float32), np.ones((BATCH, KV, 4, 1), np.float32)
    for key, finite in ((dirty, False), (clean, True)):
        if traced:
            found = jax.jit(find)(mask, jnp.int32(0), jnp.asarray(offset, jnp.int32).reshape(-1), key)
        else:
            found = find(mask, 0, offset if isinstance(offset, int) else jnp.asarray(offset), key)
        found = np.ones((1, 1, KV), bool) if found is None else np.asarray(found.keys)
        found = np.broadcast_to(found, want.shape)
        assert (found == want).all() or (finite and found.all())


def _joined(call: dict[str, Any]) -> Mask:
    mask = call.get("mask", Full())
    mask = Dense(mask) if isinstance(mask, np.ndarray) else mask
    mask = mask & Causal() if call.get("causal") else mask
    if "q_segment_ids" in call:
        mask = mask & SegmentIds(call["q_segment_ids"], call["kv_segment_ids"])
    mask = mask & Lengths(call["kv_lengths"]) if "kv_lengths" in call else mask
    return mask & ~Lengths(call["kv_starts"]) if "kv_starts" in call else mask


@register_mask_function("hidden_keys_self")
def _self(position: Any, key: Any) -> Any:
    return (key == position) | (position % 7 == 3)


CLEAN = {
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & SlidingWindow(9)},
    "mask_function": {"mask": MaskFunction("hidden_keys_self")},
    "own_ids": {"mask": Causal(), "q_segment_ids": KV_IDS},
    "later": {"mask": Causal(), "query_offset": 5},
}
HIDING = {
    "lengths": {"mask": Causal(), "kv_lengths": LENGTHS},
    "two_ids": {"mask": Causal(), "q_segment_ids": KV_IDS, "kv_segment_ids": KV_IDS},
    "earlier": {"mask": Causal(), "query_offset": -5},
    "own_ids_but_not_itself": {"mask": Causal(offset=-1), "q_segment_ids": KV_IDS},
    "offsets": {"mask": Causal(), "query_offset": OFFSETS},
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [*CLEAN, *HIDING])
def test_masks_without_hidden_keys_are_known(name: str, size: int) -> None:
    """Where each key has a query that sees it, no kernel asks which ones have, whether the sequence is split or not."""
    mesh = jax.make_mesh((size,), ("sp",), axis_types=(AxisType.Auto,))
    attend = _Told(OperationMetadata(mesh=mesh))
    x = jax.ShapeDtypeStruct((BATCH, KV, 2, 16), jnp.float32)
    call = (CLEAN | HIDING)[name]
    _Told.asked.clear()
    jax.eval_shape(lambda q, k, v: attend(q, k, v, **call).attention_outputs, x, x, x)
    assert _Told.asked == [name in HIDING]


class _Told(Operation):
    """Notes what its mask says of hidden keys."""

    name = "hidden_keys_told"
    config = VanillaConfig
    asked: ClassVar[list[bool]] = []

    @implementation(consumes=ALL_FEATURES, tolerance={})
    def forward_native(self, call: LocalCall) -> LocalOutput:
        """Return the query."""
        self.asked.append(call.mask.hides_keys)
        return LocalOutput(call.query)


@pytest.mark.parametrize("hides", [False, pytest.param(True, marks=SLOW)], ids=["causal", "later"])
@pytest.mark.parametrize(
    "which", ["splash.forward_tpu", "flash_attn2.forward_cuda", "vanilla.forward_native blockwise"]
)
def test_a_mask_without_hidden_keys_adds_nothing(which: str, hides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a call and its gradient is what it would be if nothing were asked about keys."""
    attend, offset = harness.RUNNABLE[which].make("bfloat16"), -128 if hides else 0
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)

    def program() -> str:
        def loss(*tensors: Any) -> Any:
            output = attend(*tensors, mask=Causal(), query_offset=offset).attention_outputs
            return output.astype(jnp.float32).sum()

        jax.clear_caches()
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).as_text()

    asked = program()
    for name in ("vanilla.kernel.blockwise", "splash.kernel.splash_attention", "flash.kernel.flash_attention"):
        monkeypatch.setattr(importlib.import_module(f"attnops.operators.{name}"), "seen_keys", lambda *_: None)
    assert (asked != program()) is hides
    jax.clear_caches()


# -- the definition ----------------------------------------------------------------------------------------------------


def test_reference_sees_only_what_is_visible() -> None:
    """Pair by pair: a NaN that some queries see reaches these and no others."""
    rng = np.random.default_rng(2)
    query, d_output = rng.standard_normal((2, 2, 5, 4, 8))
    key, value = rng.standard_normal((2, 2, 6, 2, 8))
    mask = np.arange(6) <= np.arange(5)[:, None]  # the last key is hidden from all
    mask = np.broadcast_to(mask, (2, 4, 5, 6)).copy()
    mask[0, :, 4] = False
    d_lse = np.where(mask.any(-1), 1.0, 0.0)
    call = {"scale": 0.3, "mask": mask, "soft_cap": 2.0}
    want, gradients = (
        reference_attention(query, key, value, **call), reference_gradients(query, key, value, d_output, d_lse, **call)
    )  # fmt: skip
    for name, number in POISONS:
        dirty = {"key": key.copy(), "value": value.copy()}
        dirty[name][:, 5] = number
        got = reference_attention(query, **dirty, **call)
        for part in got._fields:
            np.testing.assert_array_equal(getattr(got, part), getattr(want, part))
        for part, gradient in reference_gradients(query, **dirty, d_output=d_output, d_lse=d_lse, **call).items():
            np.testing.assert_array_equal(gradient, gradients[part])
        dirty[name][:, 3] = number  # rows 3 and 4 see it
        got, of_query = (
            reference_attention(query, **dirty, **call).output,
            reference_gradients(query, **dirty, d_output=d_output, d_lse=d_lse, **call)["query"],
        )
        np.testing.assert_array_equal(got[:, :3], want.output[:, :3])
        np.testing.assert_array_equal(of_query[:, :3], gradients["query"][:, :3])
        if np.isnan(number):  # a soft cap makes a number of an infinity
            assert np.isnan(got[:, 3]).all()
            assert np.isnan(of_query[:, 3]).all()
        assert (got[0, 4] == 0).all()
    dead = np.where(np.arange(5)[:, None, None] == 4, np.nan, query)  # a query that sees nothing in batch row 0
    found = reference_gradients(dead, key, value, d_output, d_lse, **call)
    np.testing.assert_array_equal(found["key"][0], gradients["key"][0])
