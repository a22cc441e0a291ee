"""The band of keys that causal masks and windows leave, and what splash's kernels test of it: squares that its edge crosses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnops import Causal, Mask, Prefix, SlidingWindow
from attnops.operators.kernels.splash.band import Band, band_of
from attnops.operators.kernels.splash.schedule import body_of, kv_block_of, q_block_of, tile_schedule
from attnops.operators.local_mask import LocalMask

_bounds = st.one_of(st.none(), st.integers(-400, 400))
_sizes = st.sampled_from([16, 48, 128, 256])


@given(least=_bounds, most=_bounds, rows=_sizes, keys=_sizes, distance=st.integers(-300, 300), across=st.booleans())
def test_hidden_keys_are_those_outside_the_bounds(
    least: int | None, most: int | None, rows: int, keys: int, distance: int, across: bool
) -> None:
    apart = np.arange(keys) - (distance + np.arange(rows))[:, None]
    seen = (apart >= (-np.inf if least is None else least)) & (apart <= (np.inf if most is None else most))
    x = np.arange(rows * keys, dtype=np.float32).reshape(rows, keys)
    wanted = np.where(seen, x, -np.inf)
    unit = jnp.asarray(x.T if across else x)
    found = np.asarray(Band(least, most).hide(unit, distance, across))
    np.testing.assert_array_equal(found, wanted.T if across else wanted)


@pytest.mark.parametrize("across", [False, True])
def test_only_squares_at_the_edge_are_tested(across: bool) -> None:
    """Two squares of a causal unit of 256 x 256 lie on the diagonal, one is hidden, one visible."""
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    equations = jax.make_jaxpr(lambda x: Band(None, 0).hide(x, 0, across))(x).jaxpr.eqns
    tested = [one.outvars[0].aval.shape for one in equations if one.primitive.name in ("le", "ge", "lt", "gt")]
    assert tested == [(128, 128)] * 2


def test_a_unit_inside_the_bounds_is_untouched() -> None:
    x = jnp.ones((128, 256))
    assert Band(-1000, 0).hide(x, 300, False) is x


@pytest.mark.parametrize("offset", [0, 5, 300])
def test_conjuncts_of_a_mask(offset: int) -> None:
    """The band is what causal masks and windows leave together; other conjuncts and unions stay."""
    rows, keys = np.arange(40)[:, None], np.arange(400)
    for mask in (
        Causal(), Causal(2), SlidingWindow(7, 3), Causal() & SlidingWindow(9), Causal(1) & SlidingWindow(9, 2, offset=4),
    ):  # fmt: skip
        band, others = band_of(mask, offset)
        at = np.asarray(Band(*band).hide(jnp.zeros((40, 400)), 0, False)) == 0
        np.testing.assert_array_equal(at, mask.test(rows, rows + offset, keys))
        assert others.describe() == "full"
    mask = Causal() & (Prefix(3) | SlidingWindow(4))
    assert band_of(mask, offset) == (Band(None, offset), Prefix(3) | SlidingWindow(4))
    assert band_of(Prefix(3) | Causal(), offset) == (Band(), Prefix(3) | Causal())


def test_an_offset_of_the_running_program_leaves_the_others_in_the_band() -> None:
    assert band_of(Causal() & SlidingWindow(9, offset=2), None) == (Band(2 - 9, 2), Causal())


@pytest.mark.parametrize("starts", [(0, 0), (64, 0), (0, 96), (128, 64)])
@pytest.mark.parametrize(
    "mask", [Causal(0), Causal(10) & SlidingWindow(70, offset=10), SlidingWindow(40, 20, offset=0)]
)
def test_distances_of_bodies(mask: Mask, starts: tuple[int, int]) -> None:
    """Each is the first row less the first key of all the body's tiles, in the whole problem, or None."""
    block_q, block_kv = 64, 32
    local = LocalMask(mask, starts[0], 256, 256, None, starts[1])
    visits = tile_schedule(local, block_q, block_kv, "q", unit=(16, 16))
    found: dict[int, set[int]] = {}
    for word in np.asarray(visits.words):
        apart = int(q_block_of(word)) * block_q + starts[0] - int(kv_block_of(word)) * block_kv - starts[1]
        found.setdefault(int(body_of(word)), set()).add(apart)
    for number, distance in enumerate(visits.distances, 1):
        assert distance == (found[number].pop() if len(found[number]) == 1 else None)


def test_starts_of_the_running_program_leave_no_distances() -> None:
    def bodies(start: jax.Array) -> jax.Array:
        visits = tile_schedule(LocalMask(Causal(0), start, 64, 64, None), 16, 16, "q", unit=(16, 16))
        assert set(visits.distances) == {None}
        return visits.words

    jax.jit(bodies).trace(jnp.int32(0))
