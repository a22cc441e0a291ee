"""attnops' kernels in the interpreter that simulates a TPU's memory and cores: right, and free of races.

It fills fresh memory with NaN, executes a copy when it is waited for, and with `detect_races` reports accesses that nothing
orders. Two cores share the parallel dimensions of the grid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops import Causal, Mask
from attnops.masks import Lengths
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.kernels.operands import Operands
from attnops.operators.kernels.partial_attention import differentiable
from attnops.operators.splash import SplashConfig
from attnops.operators.splash.kernel import key_sums
from attnops.operators.splash.kernel.splash_attention import PartialSplash
from attnops.operators.splash.kernel.splash_blocks import SplashBlocks
from attnops.operators.splash.passes import blocks_of
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

LENGTH, HEADS, KV_HEADS, DIM = 300, 2, 1, 16  # three blocks of 128, the last of them short
FIELDS: dict[str, Any] = {
    **{
        name + unit: 128 for name in ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv") for unit in ("", "_compute")
    },
    "block_kv_compute_in": 128,
    "heads_per_tile": 1,
    **dict.fromkeys(("sum_by_product", "stationary_weights", "transposed_tiles"), False),
    "use_fused_bwd_kernel": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "apart": {"use_fused_bwd_kernel": False, "block_q_dq": 128, "block_kv_dq": 128, "block_kv_dq_compute": 128},
    "parts": {"block_kv_dkv_sums": 128},
    "short_part": {"block_kv_dkv_sums": 256},  # the second of two
    "pipelined": {
        "block_q": 256,
        "transposed_tiles": True,
        "products_ahead": 1,
        "block_q_dkv": 256,
        "products_ahead_dkv": 1,
        "stationary_weights": True,
    },
    "two_heads": {"heads_per_tile": 2},
    "int8": {},  # keys and values as they are and a scale for each
    "traced": {},  # lengths: the grid is as long as the tiles found on the device
}


@pytest.fixture(autouse=True)
def _gradients_of_keys_leave_in_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more than 1024 keys do: a buffer is used again."""
    monkeypatch.setattr(key_sums, "_ROWS", (128,))


PLAIN = pltpu.InterpretParams()
TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


def _case(
    way: str, batch: int
) -> tuple[Callable[..., Any], tuple[jax.Array, ...], Callable[[Any], Any], dict[str, np.ndarray]]:
    """(mask of lengths, arrays in bhtd with the output's gradient, blocks, the reference's output and gradients)."""
    rng = np.random.default_rng(3)
    shapes = [(batch, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    query, key, value, d_output = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    scale = np.linspace(0.01, 0.03, LENGTH, dtype=np.float32)  # of a key
    if way == "int8":
        key, value = (np.round(x * 40).astype(np.int8) for x in (key, value))
    lengths = np.array([70, LENGTH], np.int32)[:batch]
    rows, keys = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    visible = np.broadcast_to(keys <= rows, (batch, 1, LENGTH, LENGTH))

    def mask(lengths: jax.Array) -> Mask:
        return Causal(0) & Lengths(lengths) if way == "traced" else Causal(0)

    if way == "traced":
        visible = visible & (keys < lengths[:, None, None, None])
    given: dict[str, Any] = {"scale": 0.25, "mask": visible}
    scaled = scale[:, None, None].astype(np.float64) if way == "int8" else 1.0
    tensors = query, key * scaled, value * scaled
    made = reference_gradients(*tensors, d_output, **given) | {"output": reference_attention(*tensors, **given).output}
    terms = term_sizes(*tensors, d_output, **given)
    want = {name: (x, row_sizes(x, terms[name])) for name, x in made.items()}
    turned = tuple(jnp.asarray(x).swapaxes(1, 2) for x in (query, key, value, d_output))
    scales = jnp.broadcast_to(scale, (batch, KV_HEADS, LENGTH))
    return mask, (*turned, jnp.asarray(lengths), scales), lambda x: np.asarray(x.swapaxes(1, 2), np.float64), want


def _forward_and_gradients(way: str, interpret: pltpu.InterpretParams, batch: int = 2) -> None:
    """Run both passes and hold them against the reference."""
    mask, arrays, turned, want = _case(way, batch)
    blocks = blocks_of(SplashConfig(**FIELDS | WAYS[way]), SplashBlocks)

    @jax.jit
    def both(
        query: jax.Array, key: jax.Array, value: jax.Array, d_output: jax.Array, lengths: jax.Array, scales: jax.Array
    ) -> Any:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            scale = scales if key.dtype == jnp.int8 else None
            kernel = PartialSplash(0.25, None, blocks, "tpu", interpret=interpret, residual_checkpoint_name=None)
            operands = Operands(query, key, value, None, None, scale, scale)
            return differentiable(kernel, operands, LocalMask(mask(lengths), 0, LENGTH, LENGTH, 0), None)[0]

        output, pull = jax.vjp(attend, query, key, value)
        return output, *pull(d_output)

    got = jax.block_until_ready(both(*arrays))
    for name, x in zip(("output", "query", "key", "value"), got, strict=True):
        if x.dtype == jax.dtypes.float0:  # of integers
            continue
        assert row_error(turned(x), *want[name]) < 3e-5, name


def _races(run: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether races are reported: raised as of jax 0.12, before that printed."""
    capsys.readouterr()
    try:
        run()
    except Exception as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return "RACE DETECTED" in capsys.readouterr().out


SOMETIMES = [pytest.param(way, marks=[] if way == "fused" else [pytest.mark.slow]) for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("way", SOMETIMES)
def test_no_races_on_two_cores(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not _races(lambda: _forward_and_gradients(way, TWO_CORES), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_read_before_it_is_written(way: str) -> None:
    _forward_and_gradients(way, PLAIN)


def test_a_seeded_race_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Two cores add to one block: an axis that is said to be parallel, and isn't."""

    def add(x: Any, total: Any) -> None:
        total[...] += x[...]

    def summed(axis: Any) -> None:
        total = pl.pallas_call(
            add,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(axis,)),
            interpret=TWO_CORES,
        )
        jax.block_until_ready(jax.jit(total)(jnp.ones((32, 128))))

    assert _races(lambda: summed(pltpu.PARALLEL), capsys)
    assert not _races(lambda: summed(pltpu.ARBITRARY), capsys)


@pytest.fixture
def _retraced() -> Iterator[None]:
    """Kernels that a test changes are traced for it alone."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("_retraced")
def test_a_race_seeded_in_attnops_kernels_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batch rows, each on a core, whose keys' gradients both go to the first row."""
    leave = key_sums.KeySums.leave
    monkeypatch.setattr(key_sums.KeySums, "leave", lambda self, batch, *others: leave(self, batch * 0, *others))

    def ignoring_values() -> None:
        with contextlib.suppress(AssertionError):  # they are wrong, too
            _forward_and_gradients("fused", TWO_CORES)

    assert _races(ignoring_values, capsys)


@pytest.mark.usefixtures("_retraced")
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_buffer_is_not_filled_before_it_has_left(forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter executes a copy when it is waited for, so that a forgotten wait shows."""
    if forgotten:
        monkeypatch.setattr(key_sums, "pl", SimpleNamespace(**vars(pl) | {"when": lambda condition: lambda do: None}))
    wrong = pytest.raises(AssertionError, match="key") if forgotten else contextlib.nullcontext()
    with wrong:
        _forward_and_gradients("fused", PLAIN, batch=1)
