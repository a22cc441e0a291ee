"""What a long call adds to a program's text: instructions that don't depend on the length, and no constants as long as it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Causal, Chunked, Mask, OperationMetadata, OperationRegistry, Prefix, SlidingWindow
from attnops.operators.kernels.local_mask import LocalMask

MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(left=127),
    "chunked": Causal() & Chunked(100),
    "prefix_or_causal": Prefix(64) | Causal(),
}
# An operation, and vanilla's path where it has one.
ROUTES = {
    "sdpa": ("sdpa", {}),
    "vanilla": ("vanilla", {}),
    "plain": ("vanilla", {"path": "plain"}),
    "blockwise": ("vanilla", {"path": "blockwise"}),
    "decode": ("vanilla", {"path": "decode"}),
    "decode_rows": ("vanilla", {"path": "decode_rows"}),
    "splash": ("splash", {}),
    "ring": ("ring", {}),
    "ulysses": ("ulysses", {}),
}
MODES = ("train", "prefill", "insert", "decode")
LENGTHS = (4096, 16384)
MOST = 100_000  # bytes; jax.nn's causal attention has 5,200 forward and 9,500 with its gradient


def _lowered(route: str, mask: Mask, length: int, mode: str, gradient: bool) -> Any:
    operation, config = ROUTES[route]
    metadata = OperationMetadata(
        operation_configs={operation: config} if config else {}, fallback="allow", backend="cpu"
    )
    attend = OperationRegistry.create(operation, metadata)

    def forward(q, k, v):
        return attend(q, k, v, mask=mask, mode=mode).attention_outputs

    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    one = jax.ShapeDtypeStruct((1, 1, 2, 16), jnp.float32)
    program = jax.grad(lambda *x: forward(*x).sum(), (0, 1, 2)) if gradient else forward
    return jax.jit(program).lower(one if mode == "decode" else x, x, x)


def _cases() -> list[Any]:
    """All, most of them slow; quick: every route, mask and mode once or more."""
    quick = {(route, n % len(MASKS), n // 2 % len(MODES), 0) for n, route in enumerate(ROUTES)}
    found = []
    for route, (m, mask), (d, mode), (n, length) in itertools.product(
        ROUTES, enumerate(MASKS), enumerate(MODES), enumerate(LENGTHS)
    ):
        marks = () if (route, m, d, n) in quick else pytest.mark.slow
        found.append(pytest.param(route, mask, mode, length, marks=marks, id=f"{route}-{mask}-{mode}-{length}"))
    return found


@pytest.mark.parametrize(("route", "mask", "mode", "length"), _cases())
def test_text_is_short(route: str, mask: str, mode: str, length: int) -> None:
    gradient = mode == "train"
    text = _lowered(route, MASKS[mask], length, mode, gradient).as_text()
    assert len(text) < MOST
    assert max(map(len, text.splitlines())) < 20_000  # no constant of a number for each key


@pytest.mark.parametrize("route", ["sdpa", "plain", "blockwise", "decode", "decode_rows"])
def test_text_of_a_gradient_is_short(route: str) -> None:
    text = _lowered(route, MASKS["window"], 4096, "train", True).as_text()
    assert len(text) < MOST


@pytest.mark.parametrize("route", ["sdpa", "plain"])
def test_compiled_program_holds_no_mask(route: str) -> None:
    """XLA makes no constant of what it could compute beforehand."""
    program = _lowered(route, MASKS["chunked"], 2048, "train", False).compile()
    constants = [line for line in program.as_text().splitlines() if " constant(" in line]
    assert constants
    sizes = [
        np.prod([int(n) for n in dims.split(",") if n])
        for line in constants
        for dims in re.findall(r"\[([\d,]*)\]", line)
    ]
    assert max(sizes) <= 2048
    assert program.memory_analysis().generated_code_size_in_bytes < 1 << 20


def test_a_layer_more_is_a_call_more() -> None:
    """Equal calls share a kernel's passes, whichever operation makes them; the text of jax.nn grows by all of it."""

    def text(layers: int) -> str:
        def loss(q, k, v):
            for _ in range(layers):
                attend = OperationRegistry.create("vanilla", OperationMetadata())
                q = attend(q, k, v, mask=Causal()).attention_outputs
            return q.sum()

        x = jax.ShapeDtypeStruct((2, 1024, 2, 16), jnp.float32)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).as_text()

    one, three = text(1), text(3)
    assert three.count("stablehlo.dot_general") == one.count("stablehlo.dot_general")
    assert len(three) < 1.25 * len(one)


@pytest.mark.parametrize("q_len", [4, 40], ids=["constant", "made"])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_both_ways_to_a_mask_agree(mask: Mask, q_len: int, offset: int) -> None:
    """A mask that is a constant, and one that the program makes, against the definition."""
    keys = slice(3, 23)
    local = LocalMask(mask, 7, q_len, 24, offset)
    found = jax.jit(lambda: jnp.asarray(local.array(keys)))()
    assert isinstance(local.array(keys), np.ndarray) == (q_len == 4)
    want = mask.materialise(slice(7, 7 + q_len), keys, query_offset=offset)
    np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)


@pytest.mark.parametrize(
    ("mask", "sizes", "all_see"),
    [
        (Causal(0), (32, 32), True),
        (Causal(-1), (32, 32), False),
        (SlidingWindow(4, 0, offset=0), (32, 32), True),
        (SlidingWindow(4, 0, offset=0), (40, 32), False),
        (~Causal(0), (32, 32), False),
        (Prefix(0), (4, 4), False),
    ],
)
def test_rows_that_see_nothing_are_known(mask: Mask, sizes: tuple[int, int], all_see: bool) -> None:
    local = LocalMask(mask, 0, *sizes, None)
    visible = mask.materialise(slice(0, sizes[0]), slice(0, sizes[1]))
    assert visible.any(-1).all() == all_see
    assert local.all_rows_see == all_see
