"""Mask functions that can't be called, that ask for values, or that answer for many pairs at once: errors that name them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import MaskFunction, OperationRegistry, register_mask_function
from attnops.errors import MaskError

QUERY = np.ones((1, 8, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x > 0, r"takes \(x\), .*called with two arguments"),
        (lambda x, j, k: x > j, r"takes \(x, j, k\)"),
        (lambda x, *, j: x > j, "takes"),
        (7, "is an int"),
        ("x > j", "is a str"),
    ],
)
def test_functions_that_take_other_arguments(function, message):
    with pytest.raises(MaskError, match=f"mask function 'test_args' .*{message}.*; wanted fn"):
        register_mask_function("test_args", override=True)(function)


def _loop(x, j):
    seen = np.array([[bool(a >= b) for b in np.ravel(j)] for a in np.ravel(x)])
    return seen.reshape(np.broadcast_shapes(x.shape, j.shape))


FAULTY = {
    "test_bool": (lambda x, j: bool(x > j), "asks for the value of an array"),
    "test_and": (lambda x, j: x > j and j > 2, "asks for the value of an array"),
    "test_raises": (lambda x, j: x.nothing > j, "raised AttributeError: .*nothing"),
    "test_reduced": (lambda x, j: (x > j).all(), "wanted one that broadcasts to .*: compare element by element"),
    "test_constant": (lambda x, j: True, "returned a bool; wanted an array of bool|wanted one that broadcasts to"),
    "test_numbers": (lambda x, j: x - j, "returned an array of int32; wanted an array of bool"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_functions_are_named(name):
    """On the host, in the block map, and where the positions are traced; in a plan, a call and a call under jit."""
    function, message = FAULTY[name]
    register_mask_function(name, override=True)(function)
    mask, wanted = MaskFunction(name), f"mask function '{name}' .*({message})"
    with pytest.raises(MaskError, match=wanted):
        mask.materialise(slice(0, 4), slice(0, 6))
    with pytest.raises(MaskError, match=wanted):
        mask.live_blocks(2, 2, q_len=4, kv_len=4)
    with pytest.raises(MaskError, match=wanted):
        jax.jit(lambda offset: mask.materialise(slice(0, 4), slice(0, 6), query_offset=offset))(jnp.int32(1))
    operation = OperationRegistry.get("vanilla")()
    with pytest.raises(MaskError, match=wanted):
        operation(QUERY, QUERY, QUERY, mask=mask)
    with pytest.raises(MaskError, match=wanted):
        jax.jit(lambda offset: operation(QUERY, QUERY, QUERY, mask=mask, query_offset=offset).attention_outputs)(
            jnp.zeros((1,), jnp.int32)
        )


def test_a_loop_over_values_works_on_the_host_alone():
    register_mask_function("test_loop", override=True)(_loop)
    mask = MaskFunction("test_loop")
    assert mask.materialise(slice(0, 3), slice(0, 3))[0, 0].tolist() == np.tri(3, dtype=bool).tolist()
    with pytest.raises(MaskError, match=r"'test_loop' raised Tracer.*asks for the value"):
        jax.jit(lambda offset: mask.materialise(slice(0, 3), slice(0, 3), query_offset=offset))(jnp.int32(0))


def test_functions_of_one_side():
    """Of keys alone, or of positions alone: as good as any."""
    register_mask_function("test_keys", override=True)(lambda x, j: j < 2)
    register_mask_function("test_queries", override=True)(lambda x, j: x > 0)
    output = OperationRegistry.get("vanilla")()(
        QUERY, QUERY, QUERY, mask=MaskFunction("test_keys") & MaskFunction("test_queries")
    ).attention_outputs
    assert np.asarray(output[0, :, 0, 0]).tolist() == [0.0] + [1.0] * 7
    assert attnops.MaskFunction("test_keys").live_blocks(4, 4, q_len=8, kv_len=8).tolist() == [[1, 0], [1, 0]]
