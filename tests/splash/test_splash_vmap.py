"""Splash under jax.vmap: numbers against the reference, and TPU programs. Gradients that a kernel writes by DMA can't be mapped
by Pallas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from attnops import Causal, OperationMetadata, OperationRegistry, SegmentIds
from attnops.operators.call.base import Operation
from attnops.verify import reference_gradients
from attnops.verify.closeness import row_error, row_sizes, term_sizes

CALLS, LENGTH, HEADS, KV_HEADS, DIM = 3, 200, 4, 2, 16
RNG = np.random.default_rng(0)
TENSORS = [RNG.standard_normal((CALLS, 1, LENGTH, n, DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS)]
D_OUTPUT = RNG.standard_normal((CALLS, 1, LENGTH, HEADS, DIM)).astype(np.float32)
EXTRA: dict[str, np.ndarray] = {
    "softmax_aux": RNG.standard_normal((CALLS, HEADS)).astype(np.float32),
    "bias": RNG.standard_normal((CALLS, 1, HEADS, LENGTH, LENGTH)).astype(np.float32),
    "ids": np.sort(RNG.integers(0, 4, (CALLS, 1, LENGTH)), axis=-1).astype(np.int32),
}
CASES = {"plain": (), "sinks": ("softmax_aux",), "bias": ("bias",), "segments": ("ids",)}
FORMS: dict[str, dict[str, Any]] = {
    "fused": {},
    "parts": {"block_kv_dkv": 128, "block_kv_dkv_sums": 128},
    "apart": {"use_fused_bwd_kernel": False},
}


def _attend(form: str, **metadata: Any) -> Operation:
    config = FORMS[form] if metadata else FORMS[form] | {"interpret": True}
    configs = {"splash": config}
    return OperationRegistry.create(
        "splash", OperationMetadata(operation_configs=configs, fallback="error", **metadata)
    )


def _loss(attend: Operation, names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Of one call: tensors, the output's gradient, and what the case has besides."""

    def loss(q: Any, k: Any, v: Any, d_output: Any, *extra: Any) -> jax.Array:
        given = dict(zip(names, extra, strict=True))
        ids = given.pop("ids", None)
        mask = Causal() if ids is None else Causal() & SegmentIds(ids, ids)
        return (attend(q, k, v, mask=mask, **given).attention_outputs * d_output).sum()

    return loss


def _wanted(call: int, names: tuple[str, ...], shared_key: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each gradient of a call by the reference, with its rows' sizes."""
    visible = np.tril(np.ones((LENGTH, LENGTH), bool))[None, None]
    if "ids" in names:
        ids = EXTRA["ids"][call]
        visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
    given: dict[str, Any] = {"scale": DIM**-0.5, "mask": visible}
    if "softmax_aux" in names:
        given["sinks"] = EXTRA["softmax_aux"][call]
    if "bias" in names:
        given["bias"] = EXTRA["bias"][call]
    q, k, v = (x[call] for x in TENSORS)
    arrays = (q, TENSORS[1][0] if shared_key else k, v, D_OUTPUT[call])
    made, terms = reference_gradients(*arrays, **given), term_sizes(*arrays, **given)
    return {name: (x, row_sizes(x, terms.get(name))) for name, x in made.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_mapped_gradients_are_those_of_each_call(case: str, form: str) -> None:
    names = CASES[case]
    extra = [EXTRA[name] for name in names]
    of = tuple(range(3)) + tuple(4 + i for i, name in enumerate(names) if name != "ids")
    got = jax.jit(jax.vmap(jax.grad(_loss(_attend(form), names), of)))(*TENSORS, D_OUTPUT, *extra)
    for call in range(CALLS):
        wanted = _wanted(call, names, shared_key=False)
        found = dict(zip(("query", "key", "value", *(n for n in names if n != "ids")), got, strict=True))
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            assert row_error(np.asarray(x[call]), *wanted[name]) < 3e-5, name


@pytest.mark.slow
def test_a_key_shared_by_all_calls_gets_the_sum_of_their_gradients() -> None:
    q, k, v = TENSORS
    loss = _loss(_attend("fused"), ())

    def summed(key: jax.Array) -> jax.Array:
        return jax.vmap(loss, in_axes=(0, None, 0, 0))(q, key, v, D_OUTPUT).sum()

    got = np.asarray(jax.jit(jax.grad(summed))(k[0]))
    wanted = [_wanted(call, (), shared_key=True)["key"] for call in range(CALLS)]
    total, sizes = (sum(x[i] for x in wanted) for i in (0, 1))
    assert row_error(got, np.asarray(total), np.asarray(sizes)) < 3e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("nested", [False, True])
def test_mapped_gradients_lower_for_a_tpu(case: str, form: str, nested: bool) -> None:
    names, loss = CASES[case], _loss(_attend(form, backend="tpu"), CASES[case])
    mapped = jax.vmap(jax.grad(loss, (0, 1, 2)))
    lead = (2, CALLS) if nested else (CALLS,)
    arrays = [
        jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype)
        for x in (*TENSORS, D_OUTPUT, *(EXTRA[name] for name in names))
    ]
    program = jax.export.export(jax.jit(jax.vmap(mapped) if nested else mapped), platforms=("tpu",))(*arrays)
    assert program.mlir_module().count("tpu_custom_call") >= 2


def test_calls_that_differ_in_nothing_but_the_batch_are_one_kernel() -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*TENSORS, D_OUTPUT)]
    mapped = jax.jit(jax.vmap(jax.grad(_loss(_attend("fused", backend="tpu"), ()), (0, 1, 2))))
    text = jax.export.export(mapped, platforms=("tpu",))(*shapes).mlir_module()
    assert "stablehlo.while" not in text
    assert text.count("tpu_custom_call") == 2


@pytest.mark.parametrize("form", ["fused", "apart"])
def test_sinks_are_mapped_where_the_mask_is_traced_and_is_not(form: str) -> None:
    """A grid of a traced size. Also nested: the inner map is over the queries alone."""
    attend, lengths = _attend(form), np.array([90], np.int32)

    def loss(sinks: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array, n: jax.Array) -> jax.Array:
        made = attend(q, k, v, mask=Causal(), kv_lengths=n, query_offset=0, softmax_aux=sinks)
        return (made.attention_outputs * d).sum()

    _, k, v = (x[0] for x in TENSORS)
    sinks = EXTRA["softmax_aux"][:2]
    over_queries = jax.vmap(jax.grad(loss, (0, 1)), (None, 0, None, None, 0, None))
    run = jax.jit(jax.vmap(over_queries, (0, None, None, None, None, None)))
    d_sinks, d_query = run(sinks, TENSORS[0][:2], k, v, D_OUTPUT[:2], lengths)
    visible = np.tril(np.ones((LENGTH, LENGTH), bool)) & (np.arange(LENGTH) < lengths[0])
    for outer in range(2):
        for inner in range(2):
            arrays = TENSORS[0][inner], k, v, D_OUTPUT[inner]
            given: dict[str, Any] = {"scale": DIM**-0.5, "mask": visible[None, None], "sinks": sinks[outer]}
            made, terms = reference_gradients(*arrays, **given), term_sizes(*arrays, **given)
            for name, x in (("softmax_aux", d_sinks), ("query", d_query)):
                sizes = row_sizes(made[name], terms.get(name))
                assert row_error(np.asarray(x[outer, inner]), made[name], sizes) < 3e-5, name
