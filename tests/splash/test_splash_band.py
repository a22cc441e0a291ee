"""The band of keys that causal masks and windows leave, and what splash's kernels test of it: squares that its edge crosses."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops import Causal, Mask, OperationMetadata, OperationRegistry, Prefix, SlidingWindow
from attnops.operators.kernels.local_mask import LocalMask
from attnops.operators.splash.kernel.band import DiagonalBand, band_of
from attnops.operators.splash.kernel.schedule import kv_block_of, q_block_of, tile_schedule, variant_of

_bounds = st.one_of(st.none(), st.integers(-400, 400))
_sizes = st.sampled_from([128, 256, 384, 640, 1024])


@pytest.mark.slow
@given(least=_bounds, most=_bounds, rows=_sizes, keys=_sizes, distance=st.integers(-300, 300), across=st.booleans())
def test_hidden_keys_are_those_outside_the_bounds(
    least: int | None, most: int | None, rows: int, keys: int, distance: int, across: bool
) -> None:
    apart = np.arange(keys) - (distance + np.arange(rows))[:, None]
    seen = (apart >= (-np.inf if least is None else least)) & (apart <= (np.inf if most is None else most))
    x = np.arange(rows * keys, dtype=np.float32).reshape(rows, keys)
    wanted = np.where(seen, x, -np.inf)
    unit = jnp.asarray(x.T if across else x)
    found = np.asarray(DiagonalBand(least, most).hide(unit, distance, across))
    np.testing.assert_array_equal(found, wanted.T if across else wanted)


@pytest.mark.parametrize("across", [False, True])
def test_only_squares_at_the_edge_are_tested(across: bool) -> None:
    """Two squares of a causal unit of 256 x 256 lie on the diagonal, one is hidden, one visible."""
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    equations = jax.make_jaxpr(lambda x: DiagonalBand(None, 0).hide(x, 0, across))(x).jaxpr.eqns
    tested = [one.outvars[0].aval.shape for one in equations if one.primitive.name in ("le", "ge", "lt", "gt")]
    assert tested == [(128, 128)] * 2


@pytest.mark.parametrize(("rows", "keys", "tested"), [(512, 512, [(128, 128)] * 4), (512, 1024, [(512, 1024)])])
def test_a_large_unit_is_one_square(rows: int, keys: int, tested: list[tuple[int, int]]) -> None:
    x = jax.ShapeDtypeStruct((rows, keys), jnp.float32)
    equations = jax.make_jaxpr(lambda x: DiagonalBand(None, 0).hide(x, 0, False))(x).jaxpr.eqns
    assert [one.outvars[0].aval.shape for one in equations if one.primitive.name in ("le", "ge", "lt", "gt")] == tested


def test_a_unit_inside_the_bounds_is_untouched() -> None:
    x = jnp.ones((128, 256))
    assert DiagonalBand(-1000, 0).hide(x, 300, False) is x


@pytest.mark.parametrize("offset", [0, 5, 300])
def test_conjuncts_of_a_mask(offset: int) -> None:
    """The band is what causal masks and windows leave together; other conjuncts and unions stay."""
    rows, keys = np.arange(128)[:, None], np.arange(512)
    for mask in (
        Causal(offset), SlidingWindow(7, 3, offset=offset), Causal(offset) & SlidingWindow(9, offset=offset),
        Causal(1) & SlidingWindow(9, 2, offset=offset),
    ):  # fmt: skip
        band, others = band_of(mask)
        at = np.asarray(DiagonalBand(*band).hide(jnp.zeros((128, 512)), 0, False)) == 0
        np.testing.assert_array_equal(at, mask.test(rows, rows, keys))
        assert others.describe() == "full"
    others = Prefix(3) | SlidingWindow(4, offset=0)
    assert band_of(Causal(offset) & others) == (DiagonalBand(None, offset), others)
    assert band_of(Prefix(3) | Causal(offset)) == (DiagonalBand(), Prefix(3) | Causal(offset))


def test_an_offset_of_the_running_program_leaves_the_others_in_the_band() -> None:
    assert band_of(Causal() & SlidingWindow(9, offset=2)) == (DiagonalBand(2 - 9, 2), Causal())


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_test_squares_where_the_place_is_known(backward: bool) -> None:
    """Whole units only where it is the running program that knows how far rows are from keys."""
    config = {"interpret": True, "block_q": 256, "block_kv": 256}
    attend = OperationRegistry.create("splash", OperationMetadata(operation_configs={"splash": config}))
    x = jnp.zeros((1, 512, 1, 128))

    def loss(x: jax.Array, offset: jax.Array | None = None) -> jax.Array:
        return attend(x, x, x, mask=Causal(), query_offset=offset).attention_outputs.sum()

    function = jax.grad(loss) if backward else loss
    name = "attnops_splash_backward" if backward else "attnops_splash_forward"
    known, traced = jax.make_jaxpr(function)(x), jax.make_jaxpr(function)(x, jnp.int32(3))
    assert _largest_test(known.jaxpr, name) == 128 * 128
    assert _largest_test(traced.jaxpr, name) == 256 * 256


def _largest_test(jaxpr: Any, kernel: str, inside: bool = False) -> int:
    """The most weights that one comparison in a kernel tests."""
    most = 0
    for one in jaxpr.eqns:
        if inside and one.primitive.name in ("le", "ge", "lt", "gt"):
            most = max(most, one.outvars[0].aval.size)
        within = inside or (one.primitive.name == "pallas_call" and one.params["name"] == kernel)
        for inner in jax.extend.core.jaxprs_in_params(one.params):
            most = max(most, _largest_test(inner, kernel, within))
    return most


@pytest.mark.parametrize("starts", [(0, 0), (64, 0), (0, 96), (128, 64)])
@pytest.mark.parametrize(
    "mask", [Causal(0), Causal(10) & SlidingWindow(70, offset=10), SlidingWindow(40, 20, offset=0)]
)
def test_distances_of_bodies(mask: Mask, starts: tuple[int, int]) -> None:
    """Each is the first row less the first key of all the body's tiles, in the whole problem, or None."""
    block_q, block_kv = 64, 32
    local = LocalMask(mask, starts[0], 256, 256, None, starts[1])
    schedule = tile_schedule(local, block_q, block_kv, "q", subtile=(16, 16))
    found: dict[int, set[int]] = {}
    for word in np.asarray(schedule.words):
        apart = int(q_block_of(word)) * block_q + starts[0] - int(kv_block_of(word)) * block_kv - starts[1]
        found.setdefault(int(variant_of(word)), set()).add(apart)
    for number, distance in enumerate(schedule.distances, 1):
        assert distance == (found[number].pop() if len(found[number]) == 1 else None)


def test_starts_of_the_running_program_leave_no_distances() -> None:
    def bodies(start: jax.Array) -> jax.Array:
        schedule = tile_schedule(LocalMask(Causal(0), start, 64, 64, None), 16, 16, "q", subtile=(16, 16))
        assert set(schedule.distances) == {None}
        return schedule.words

    jax.jit(bodies).trace(jnp.int32(0))
