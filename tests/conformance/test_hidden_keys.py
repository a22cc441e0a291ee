"""Keys that no query sees may hold anything: NaN and infinities in them, or in their values, reach no output and no gradient.

Each call runs with NaN and with infinities in the hidden keys and in the hidden values. The reference has zeros there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import AxisType

from attnops.operators.kernels import seen_keys

from . import cases, harness
from .hidden_keys import BATCH, HEADS, KINDS, KV, RNG, Q

ADDED = RNG.standard_normal((BATCH, HEADS, Q, KV)).astype(np.float32)
SINKS = RNG.standard_normal(HEADS).astype(np.float32)
# Arguments of the call, of the reference, and which get a gradient.
EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, {}, ()),
    "soft_cap": ({"logits_soft_cap": 1.5}, {"soft_cap": 1.5}, ()),
    "bias": ({"bias": ADDED}, {"bias": ADDED}, ("bias",)),
    "sinks": ({"softmax_aux": SINKS}, {"sinks": SINKS}, ("softmax_aux",)),
    "lse": ({"return_lse": True}, {}, ()),
}
OF_THE_EXTERNAL = {
    "causal",
    "causal_later",
    "window",
    "chunked",
    "prefix",
    "kv_lengths",
    "segment_ids",
    "segments_and_causal",
}
POISONS = [(name, number) for name in ("key", "value") for number in (np.nan, np.inf)]


def _case(kind: str, extra: str, group: int) -> cases.Case:
    call, visible = KINDS[kind]
    more, reference, differentiate = EXTRAS[extra]
    return cases.Case(
        kind, frozenset(), call | more, np.broadcast_to(visible, (BATCH, HEADS, Q, KV)), dict(reference), differentiate,
        Q, KV, HEADS, HEADS // group, BATCH,
    )  # fmt: skip


def _hidden(case: cases.Case) -> np.ndarray:
    """bool [batch, kv, kv heads]: keys that no query of a group sees."""
    by_group = case.mask.reshape(case.batch, case.kv_heads, -1, case.q_len, case.kv_len)
    return ~by_group.any(axis=(2, 3)).swapaxes(1, 2)


def _filled(tensors: harness.Tensors, name: str, hidden: np.ndarray, number: float) -> harness.Tensors:
    """The tensors with a number in a tensor's hidden rows."""
    return tensors._replace(**{name: np.where(hidden[..., None], np.float32(number), getattr(tensors, name))})


def _program(attend: Any, case: cases.Case, d_output: Any, d_lse: Any, layout: str) -> Callable[[Any], harness.Result]:
    """Runs query, key and value through a call and its gradient, compiled once."""
    masking = {n: jnp.asarray(x) for n, x in case.call.items() if isinstance(x, np.ndarray)}
    static = {n: x for n, x in case.call.items() if n not in masking}
    smooth = {n: masking.pop(n) for n in case.differentiate}

    @jax.jit
    def program(inputs: dict[str, Any], masking: dict[str, Any]) -> Any:
        def loss(inputs: dict[str, Any]) -> Any:
            call = inputs | masking
            q, k, v = (call.pop(n) for n in ("query", "key", "value"))
            result = attend(q, k, v, layout=layout, **call, **static)
            total = (result.attention_outputs.astype(jnp.float32) * d_output).sum()
            total += 0 if d_lse is None else (result.lse * d_lse).sum()
            return total, (result.attention_outputs, result.lse)

        return jax.grad(loss, has_aux=True)(inputs)

    def run(tensors: list[Any]) -> harness.Result:
        named = {n: jnp.asarray(x) for n, x in zip(("query", "key", "value"), tensors, strict=True)}
        gradients, (output, lse) = program(named | smooth, masking)
        made = {
            n: harness.from_layout(g, layout) if n in named else np.asarray(g, np.float64) for n, g in gradients.items()
        }
        lse = None if lse is None else np.asarray(lse, np.float64)
        return harness.Result(harness.from_layout(output, layout), None, lse, made, {}, output.dtype)

    return run


def _check(implementation: harness.Implementation, attend: Any, case: cases.Case, layout: str, dtype: str) -> None:
    hidden, tensors = _hidden(case), harness.draw(case, dtype)
    assert hidden.any()
    want = harness.expect(case, _filled(_filled(tensors, "key", hidden, 0), "value", hidden, 0))
    published = implementation.capability.tolerance[dtype]
    run = _program(attend, case, harness.to_layout(tensors.d_output, layout), tensors.d_lse, layout)
    for name, number in POISONS:
        filled = _filled(tensors, name, hidden, number)
        got = run(harness.handed_over(case, filled, dtype, layout))
        harness.agree(got, want, published.forward, published.backward)
        for tensor in ("key", "value"):
            assert (got.gradients[tensor][hidden] == 0).all(), (name, number, tensor)


# -- on one device -----------------------------------------------------------------------------------------------------

ROUTES = sorted(set(harness.RUNNABLE) - {"sdpa.forward_cuda"})
SLOW_KINDS = {"kv_lengths", "two_windows", "no_window", "not_dense", "lengths_and_chunks", "causal_later", "prefix_or"}
DTYPES = ("float32", "bfloat16", "float16")


def _can(which: str, kind: str, extra: str, dtype: str) -> bool:
    implementation = harness.RUNNABLE[which]
    external = which.endswith((" jax", " tokamax"))
    if dtype not in implementation.capability.tolerance or (external and kind not in OF_THE_EXTERNAL):
        return False
    asked = {"soft_cap": "logits_soft_cap", "lse": "return_lse"}.get(extra, extra)
    needs = {} if extra == "plain" else {asked}
    return not (external and extra in ("bias", "lse")) and set(needs) <= implementation.capability.consumes


def _product() -> list[tuple[str, str, str, str, str, int]]:
    """(implementation, kind of mask, beside it, layout, dtype, query heads per kv head)."""
    every = itertools.product(ROUTES, KINDS, EXTRAS, ("bthd", "bhtd"), DTYPES, (1, 2))
    return [row for row in every if _can(*row[:3], row[4])]


PRODUCT = _product()


def _often() -> set[tuple[str, str, str, str, str, int]]:
    """Lengths and another kind for each implementation, by turns; a kind of another library's kernel is enough."""
    found = set()
    kinds = [kind for kind in KINDS if kind not in SLOW_KINDS]
    for n, which in enumerate(ROUTES):
        for i, kind in enumerate(("kv_lengths", kinds[5 * n % len(kinds)])):
            own = [row for row in PRODUCT if row[:2] == (which, kind) and row[4] == "float32"]
            found |= {own[(7 * n + 3 * i) % len(own)]} if own and (i == 0 or "." in which.split()[-1]) else set()
    return found


OFTEN = _often()


def _marks(row: tuple[Any, ...]) -> list[pytest.MarkDecorator]:
    slow = [] if row in OFTEN else [pytest.mark.slow]
    return [*slow, *harness.needed(row[0])]


@pytest.mark.parametrize(
    ("which", "kind", "extra", "layout", "dtype", "group"),
    [
        pytest.param(*row, marks=_marks(row), id="-".join(map(str, row)))
        for row in covering(PRODUCT, 2, [row for row in PRODUCT if row in OFTEN])
    ],
)
def test_hidden_keys_reach_nothing(which: str, kind: str, extra: str, layout: str, dtype: str, group: int) -> None:
    implementation = harness.RUNNABLE[which]
    _check(implementation, implementation.make(dtype), _case(kind, extra, group), layout, dtype)


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        ("splash.forward_tpu", "segment_ids"),
        *(
            pytest.param(which, kind, marks=pytest.mark.slow)
            for which in ("splash.forward_tpu pipelined", "flash_attn2.forward_cuda", *harness.PATHS)
            for kind in ("segment_ids", "dense", "blocks_of_heads")
            if which in ROUTES
        ),
    ],
)
def test_pairs_of_few_queries(which: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tested whether a number isn't finite or not. What is traced is kept by the call, of which this is no part."""
    jax.clear_caches()
    monkeypatch.setattr(seen_keys, "_FEW", 1 << 10)
    implementation = harness.RUNNABLE[which]
    attend, case = implementation.make("float32"), _case(kind, "bias", 2)
    _check(implementation, attend, case, "bhtd", "float32")
    tensors, published = harness.draw(case, "float32"), implementation.capability.tolerance["float32"]
    got = harness.run(attend, case, tensors, "float32", "bhtd")
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)
    jax.clear_caches()


FOLDED = harness.Implementation(
    "flash_attn2",
    "forward_cuda",
    {"interpret": not harness.ON_CUDA, "fold": True, "block_q": 128, "block_kv": 64, "kv_splits": 2},
)


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in ("dense", *SLOW_KINDS)),
    ],
)
def test_heads_folded_into_rows(kind: str) -> None:
    """The GPU kernel's way with few queries, whose rows are those of a group's heads; and with keys in several parts."""
    _check(FOLDED, FOLDED.make("float32"), _case(kind, "plain", 2), "bthd", "float32")


# -- packed, quantised, and over devices -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which",
    [
        "vanilla.forward_native blockwise",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("splash.forward_tpu", "flash_attn2.forward_cuda")),
    ],
)
def test_packed(which: str) -> None:
    case = _case("segments_and_causal", "plain", 2)
    case.batch, case.mask = 1, case.mask[1:2]
    case.call |= {name: case.call[name][1] for name in ("q_segment_ids", "kv_segment_ids")}
    implementation = harness.RUNNABLE[which]
    _check(implementation, implementation.make("float32"), case, "thd", "float32")


QUANTISED = {
    "vanilla.forward_native": "kv_lengths",
    "vanilla.forward_native blockwise": "segment_ids",
    "splash.forward_tpu": "kv_starts",
    "splash.forward_tpu pipelined": "segment_ids",
    "flash_attn2.forward_cuda": "kv_lengths",
}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "which", [pytest.param(w, marks=[] if n == 1 else [pytest.mark.slow]) for n, w in enumerate(QUANTISED)]
)
def test_hidden_scales_and_quantised_keys(which: str, dtype: str) -> None:
    """The scales of hidden keys too, whose gradients are 0."""
    implementation, case = harness.RUNNABLE[which], _case(QUANTISED[which], "plain", 2)
    hidden, tensors = _hidden(case), ("key", "value")
    case.quantised = dict.fromkeys(tensors, dtype)
    case.scales = {f"{n}_scale": RNG.uniform(0.01, 0.03, hidden.shape)[..., None].astype(np.float32) for n in tensors}
    case.differentiate = tuple(case.scales)
    drawn = harness.draw(case, "float32")
    clean = {n: np.where(hidden[..., None], 0, x).astype(np.float32) for n, x in case.scales.items()}
    zeros = {n: np.where(hidden[..., None], np.float32(0), getattr(drawn, n)) for n in tensors}
    want = harness.expect(replace(case, scales=clean), drawn._replace(**zeros))
    case.scales = {n: np.where(hidden[..., None], np.float32(np.nan), x) for n, x in clean.items()}
    case.call |= {name: harness.to_layout(x, "bhtd") for name, x in case.scales.items()}
    dirty = {n: np.where(hidden[..., None], np.float32(np.nan), x) for n, x in zeros.items()}
    got = harness.run(
        implementation.make("float32"), case, drawn._replace(**(zeros if dtype == "int8" else dirty)), "float32", "bhtd"
    )
    published = implementation.capability.tolerance["float32"]
    harness.agree(got, want, published.forward, published.backward)
    for name, gradient in got.gradients.items():
        if name != "query":
            assert (gradient[hidden] == 0).all(), name


MESH = {"fsdp": 2, "tp": 2, "sp": 2}
STRATEGIES = {
    "gather": {},
    "ring": {"ring_order": "contiguous"},
    "zigzag": {"sequence_parallel": "ring", "scan_ring_attention": True},
    "ulysses": {},
}
NATIVE, SPLASH, FLASH = "vanilla.forward_native", "splash.forward_tpu", "flash_attn2.forward_cuda"
SPLIT = [
    (which, strategy, kind)
    for which, strategy, kind in itertools.product((NATIVE, SPLASH, FLASH), STRATEGIES, KINDS)
    if kind not in ("not_dense", "two_windows", "no_window")
]
SPLIT_OFTEN = {
    (NATIVE, "ring", "kv_lengths"),
    (SPLASH, "gather", "segments_and_causal"),
    (FLASH, "zigzag", "kv_starts"),
    (NATIVE, "ulysses", "dense"),
}


@pytest.mark.parametrize(
    ("which", "strategy", "kind"),
    [
        pytest.param(*key, marks=[] if key in SPLIT_OFTEN else [pytest.mark.slow], id="-".join(key))
        for key in covering(SPLIT, 2, [key for key in SPLIT if key in SPLIT_OFTEN])
    ],
)
def test_over_devices(which: str, strategy: str, kind: str) -> None:
    """A key that no query of this device sees may be one that another device's queries see."""
    implementation = harness.RUNNABLE[which]
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    attend = implementation.make("float32", mesh, **{"sequence_parallel": strategy} | STRATEGIES[strategy])
    _check(implementation, attend, _case(kind, "plain", 2), "bthd", "float32")


@pytest.mark.parametrize("which", [NATIVE, pytest.param(FLASH, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["kv_starts", pytest.param("segment_ids", marks=pytest.mark.slow)])
def test_keys_that_stay_split(which: str, kind: str) -> None:
    """A few queries, whose outputs are merged over the devices that hold the keys."""
    case, implementation = _case(kind, "plain", 2), harness.RUNNABLE[which]
    case.q_len, case.mask = 4, case.mask[:, :, :4]
    case.call |= {"mode": "insert"} | {n: x[:, :4] for n, x in case.call.items() if n == "q_segment_ids"}
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    attend = implementation.make("float32", mesh)
    tensors = harness.handed_over(case, harness.draw(case, "float32"), "float32", "bthd")
    assert attend.plan(*tensors, **case.call).placement.sequence.strategy == "split_kv"
    _check(implementation, attend, case, "bthd", "float32")
