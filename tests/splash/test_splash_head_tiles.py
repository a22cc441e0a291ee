"""Tiles that several heads share, and several such tiles: each head has its own visibility, scales and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Blocks, Full, Mask
from attnops.masks import Lengths
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.operands import Operands
from attnops.operators.kernels.partial_attention import differentiable
from attnops.operators.splash import SplashConfig
from attnops.operators.splash.kernel.key_sums import leaving_rows
from attnops.operators.splash.kernel.splash_attention import PartialSplash
from attnops.operators.splash.kernel.splash_blocks import SplashBlocks
from attnops.operators.splash.passes import blocks_of
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

BATCH, Q_LEN, KV_LEN, HEADS, DIM = 2, 200, 500, 4, 16
RNG = np.random.default_rng(2)
# Heads 0 and 2 see nothing in some tiles or at all, so heads of a tile differ in every way.
LAYOUT = RNG.random((HEADS, 2, 4)) < 0.5
LAYOUT[0], LAYOUT[2, :, 1:], LAYOUT[1, 0], LAYOUT[3, :, 3] = False, False, True, True
LENGTHS = np.array([KV_LEN, 90], np.int32)  # the second row's list of tiles is shorter
SIZES = dict.fromkeys(("block_q", "block_q_dkv"), 256) | dict.fromkeys(("block_kv", "block_kv_dkv"), 256)
UNITS = {f"{name}_compute": 128 for name in SIZES}
FIELDS: dict[str, Any] = {
    **SIZES,
    **UNITS,
    "block_kv_compute_in": 128,
    "heads_per_tile": 2,
    **dict.fromkeys(("sum_by_product", "stationary_weights", "transposed_tiles"), False),
    "use_fused_bwd_kernel": True,
}
APART = {"use_fused_bwd_kernel": False, "block_q_dq": 256, "block_kv_dq": 256, "block_kv_dq_compute": 128}
PIPELINED = {"transposed_tiles": True, "products_ahead": 2, "products_ahead_dkv": 1, "stationary_weights": True}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pipelined": PIPELINED,
    "parts": {"block_kv_dkv_sums": 256},
    "apart": APART,
}
QUICK = {
    *(("blocks", 4, "pipelined"), ("blocks", 2, "plain"), ("blocks", 4, "parts")),
    *(("int8", 4, "pipelined"), ("lengths", 4, "plain")),
}


def _mask(kind: str) -> tuple[Mask, np.ndarray]:
    """The mask, and what it lets be seen."""
    if kind == "blocks":
        return Blocks(LAYOUT, 128, 128), LAYOUT.repeat(128, 1).repeat(128, 2)[None, :, :Q_LEN, :KV_LEN]
    if kind == "lengths":
        return Lengths(jnp.asarray(LENGTHS)), np.arange(KV_LEN) < LENGTHS[:, None, None, None]
    return Full(), np.ones((1, 1, 1, KV_LEN), bool)


@pytest.mark.parametrize(
    ("kind", "kv_heads", "form"),
    [
        pytest.param(*key, marks=[] if key in QUICK else [pytest.mark.slow])
        for key in itertools.product(("blocks", "lengths", "int8"), (4, 2, 1), FORMS)
    ],
)
def test_heads_of_a_tile(kind: str, kv_heads: int, form: str) -> None:
    mask, visible = _mask(kind)
    shapes = [(BATCH, n, heads, DIM) for n, heads in ((Q_LEN, HEADS), (KV_LEN, kv_heads), (KV_LEN, kv_heads))]
    query, key, value = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    d_output = RNG.standard_normal(shapes[0]).astype(np.float32)
    scale, tensors = None, (query, key, value)
    if kind == "int8":
        key, value = (np.round(x * 40).astype(np.int8) for x in (key, value))
        scale = RNG.uniform(0.01, 0.03, (BATCH, kv_heads, KV_LEN)).astype(np.float32)
        by_row = scale.swapaxes(1, 2)[..., None].astype(np.float64)
        tensors = query, key * by_row, value * by_row
    blocks = blocks_of(SplashConfig(**FIELDS | FORMS[form]), SplashBlocks)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        scales = None if scale is None else jnp.asarray(scale)
        kernel = PartialSplash(0.25, None, blocks, "tpu", interpret=True, residual_checkpoint_name=None)
        operands = Operands(query, key, value, None, None, scales, scales)
        return differentiable(kernel, operands, LocalMask(mask, 0, Q_LEN, KV_LEN, 0), None)[0]

    turned = [jnp.asarray(x).swapaxes(1, 2) for x in (query, key, value, d_output)]
    output, pull = jax.vjp(jax.jit(attend), *turned[:3])
    got = dict(zip(("output", "query", "key", "value"), (output, *jax.jit(pull)(turned[3])), strict=True))
    given: dict[str, Any] = {"scale": 0.25, "mask": visible}
    wanted = reference_gradients(*tensors, d_output, **given)
    wanted["output"] = reference_attention(*tensors, **given).output
    terms = term_sizes(*tensors, d_output, **given)
    for name, x in got.items():
        if x.dtype != jax.dtypes.float0:  # that of integers
            found = np.asarray(x.swapaxes(1, 2), np.float64)
            assert row_error(found, wanted[name], row_sizes(wanted[name], terms[name])) < 3e-5, name


@pytest.mark.parametrize(
    ("rows", "first", "wanted"),
    [(2048, 0, 512), (768, 0, 256), (384, 0, 128), (512, 256, 256), (1024, 384, 128), (256, 768, 256)],
)
def test_rows_that_leave_together_divide_a_part_and_where_it_begins(rows: int, first: int, wanted: int) -> None:
    """Otherwise a copy's address isn't the multiple that the compiler is told, which no interpreter notices."""
    assert leaving_rows(rows, first) == wanted
