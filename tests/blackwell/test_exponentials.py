"""Exponentials by products: as close to 2**x as float32 is, 0 for hidden keys, and what is no number stays none."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attnops.operators.mosaic.kernel.exponentials import exp2


def _both(x: np.ndarray, by_products: int) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(exp2(jnp.asarray(x), by_products)), np.exp2(x.astype(np.float64))


@pytest.mark.parametrize("by_products", [8, 64])
def test_close_to_what_float64_gives(by_products: int) -> None:
    x = np.linspace(-125, 1, 64 * 1000, dtype=np.float32).reshape(1000, 64)
    found, want = (some[:, -by_products:] for some in _both(x, by_products))
    assert np.abs(found / want - 1).max() < 3e-7


def test_whole_numbers_are_exact() -> None:
    x = -np.arange(126, dtype=np.float32)[None]
    found, want = _both(x, x.shape[1])
    assert (found == want).all()


def test_of_hidden_and_far_keys_is_0() -> None:
    x = np.asarray([[-np.inf, -1e30, -1000.0, -127.5]], np.float32)
    assert (_both(x, 4)[0] == 0).all()


def test_no_number_stays_none() -> None:
    assert np.isnan(_both(np.asarray([[np.nan, np.nan]], np.float32), 1)[0]).all()
