"""Run a case through an implementation, forward and backward, and through the float64 reference."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.authoring import Operation
from attnops.operators.flash.kernel.tokamax_attention import installed_version
from attnops.planning import METHODS
from attnops.verify import reference_attention, reference_gradients
from attnops.verify.closeness import lse_size, row_error, row_sizes, term_sizes

from .cases import DIM, Case, in_layout

ON_CUDA = os.environ.get("ATTNOPS_TEST_PLATFORM") == "cuda"


class Implementation(NamedTuple):
    """An implementation and how to get it to run on this machine."""

    operation: str
    method: str
    config: dict[str, Any] | None = None
    backend: str = "cuda" if ON_CUDA else "cpu"

    @property
    def capability(self):
        operation = OperationRegistry.get(self.operation)
        config = None if self.config is None else operation.config(**self.config)
        return operation.implementation(self.method, config).capability

    def make(self, dtype: str, mesh: Any = None, **changes: Any) -> Any:
        configs = {} if self.config is None else {self.operation: self.config}
        metadata = OperationMetadata(
            runtime_dtype=dtype, mesh=mesh, operation_configs=configs, fallback="error", backend=self.backend, **changes
        )
        return OperationRegistry.create(self.operation, metadata)


# How a platform's own kernel gets to run on this machine. Blocks of 128, so that lengths of 150 take two of them.
INTERPRETED = {
    "splash.forward_tpu": {"interpret": True, "block_q": 128, "block_kv": 128},
    "flash_attn2.forward_cuda": {"interpret": True, **{f"block_{n}": 64 for n in ("q", "kv", "q_dq", "kv_dkv")}},
}
# splash's tiles held the other way, in units that overlap.
PIPELINED = {
    "splash.forward_tpu pipelined": Implementation(
        "splash",
        "forward_tpu",
        {
            "interpret": True,
            "block_q": 256,
            "block_q_compute": 128,
            "block_kv": 128,
            "transposed_tiles": True,
            "products_ahead": 1,
            "block_q_dkv_compute": 128,
            "products_ahead_dkv": 1,
            "stationary_weights": True,
        },
    )
}
# Two tiles for a length of 80, in one place after the other. test_mosaic.py runs it, where jax's interpreter can.
HOPPER = Implementation(
    "flash_attn2",
    "forward_hopper",
    {
        "interpret": True,
        "kernel": "mosaic",
        "block_q": 128,
        "block_q_dkv": 64,
        "block_q_dq": 128,
        **dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), 64),
        **dict.fromkeys(("num_stages", "num_stages_dkv", "num_stages_dq"), 1),
    },
)
BLACKWELL = Implementation(
    "flash_attn2",
    "forward_blackwell",
    {
        "interpret": True, "kernel": "blackwell", "block_q": 256, "block_kv": 64, "num_stages": 1,
        "block_q_dkv": 64, "num_stages_dkv": 2, "block_kv_dq": 64, "num_stages_dq": 2,
    },
)  # fmt: skip
MOSAIC = {"hopper": HOPPER, "blackwell": BLACKWELL}
# What can't run here, or only in part: test_refusals.py and test_mosaic.py ask these what they declare.
DECLARED_ONLY = {
    "flash_attn2.forward_hopper": HOPPER,
    "flash_attn2.forward_blackwell": BLACKWELL,
    "sdpa.forward_cuda": Implementation("sdpa", "forward_cuda", backend="cuda"),
    "selected.forward_native": Implementation(
        "selected", "forward_native"
    ),  # test_selected_operation.py passes its positions
    "splash.forward_rocm": Implementation("splash", "forward_rocm", backend="rocm"),
}

# forward_native's other ways, which so short sequences don't take by themselves. 150 rows are three blocks of 56.
PATHS = {
    "vanilla.forward_native blockwise": Implementation(
        "vanilla", "forward_native", {"path": "blockwise", "block_q": 56, "block_kv": 64}
    ),
    "vanilla.forward_native decode": Implementation("vanilla", "forward_native", {"path": "decode", "block_kv": 64}),
    "vanilla.forward_native decode_rows": Implementation(
        "vanilla", "forward_native", {"path": "decode_rows", "block_kv": 64}
    ),
}
# splash's other kernels.
KERNELS = {
    f"splash.forward_tpu {kernel}": Implementation(
        "splash", "forward_tpu", {"kernel": kernel, "interpret": True, "block_q": 128, "block_kv": 128}
    )
    for kernel in ("jax", "tokamax")
} | {
    "flash_attn2.forward_cuda tokamax": Implementation(
        "flash_attn2", "forward_cuda", {"kernel": "tokamax", "interpret": True}
    )
}
NEEDS_TOKAMAX = pytest.mark.skipif(find_spec("tokamax") is None, reason="pip install 'attnops[tokamax]'")
NEEDS_TOKAMAX_GPU = pytest.mark.skipif(
    (installed_version() or ()) < (0, 0, 17), reason="pip install 'attnops[tokamax]' with Python 3.12 or later"
)


def needed(which: str) -> list[pytest.MarkDecorator]:
    """Marks that skip an implementation whose library isn't here."""
    if not which.endswith(" tokamax"):
        return []
    return [NEEDS_TOKAMAX_GPU if which.startswith("flash") else NEEDS_TOKAMAX]


def _discover() -> dict[str, Implementation]:
    """Every implementation of every registered operation, once: a method borrowed from another operation is its."""
    found: dict[str, Implementation] = {}
    seen: set[int] = set()
    first = ("vanilla", "splash")  # whose methods others borrow
    for operation in (*first, *(n for n in OperationRegistry.names() if n not in first)):
        if not issubclass(OperationRegistry.get(operation), Operation):
            continue  # attends to pages: tests/serving
        for method in OperationRegistry.get(operation).declared_methods():
            name, which = f"{operation}.{method}", OperationRegistry.get(operation)
            capability = which.capability(method)
            platform = next((p for p, methods in METHODS.items() if method in methods), "")
            if id(capability) in seen or which.config_elsewhere(platform) is not None:
                continue
            seen.add(id(capability))
            if name in DECLARED_ONLY:
                continue
            here = method in ("forward_native", "forward_cpu")
            assert here or name in INTERPRETED, f"say in INTERPRETED or DECLARED_ONLY how {name} is tried on a CPU"
            found[name] = Implementation(operation, method, INTERPRETED.get(name))
    return found | PATHS | PIPELINED | KERNELS


_OF_CUDA = {
    **{f"vanilla.forward_native{way}": Implementation("vanilla", "forward_native", config) for way, config in (
        ("", None), (" blockwise", PATHS["vanilla.forward_native blockwise"].config),
        (" decode", PATHS["vanilla.forward_native decode"].config),
    )},
    "sdpa.forward_cuda": DECLARED_ONLY["sdpa.forward_cuda"],
    "flash_attn2.forward_cuda": Implementation("flash_attn2", "forward_cuda"),
    "flash_attn2.forward_cuda small": Implementation(
        "flash_attn2", "forward_cuda", INTERPRETED["flash_attn2.forward_cuda"] | {"interpret": False}
    ),
}  # fmt: skip
RUNNABLE = _OF_CUDA if ON_CUDA else _discover()


class Tensors(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_output: np.ndarray
    d_lse: np.ndarray | None


def draw(case: Case, dtype: str, dim: int = DIM, seed: int = 11) -> Tensors:
    """Normal values, rounded to the dtype, so that the reference sees what the implementation sees.

    A quantised key or value is without its scale here.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float32)

    def tensor(name: str, *shape: int) -> np.ndarray:
        x = normal(*shape)
        if name not in case.quantised:
            return x
        whole = np.clip(np.round(40 * x), -127, 127) if case.quantised[name] == "int8" else x
        return whole.astype(case.dtype_of(name, dtype)).astype(np.float32)

    b, t, s, h, k = case.batch, case.q_len, case.kv_len, case.heads, case.kv_heads
    d_lse = rng.standard_normal((b, h, t)).astype(np.float32) if case.call.get("return_lse") else None
    return Tensors(
        normal(b, t, h, dim),
        tensor("key", b, s, k, dim),
        tensor("value", b, s, k, case.value_dim),
        normal(b, t, h, case.value_dim),
        d_lse,
    )


to_layout = in_layout


def handed_over(case: Case, tensors: Tensors, dtype: str, layout: str) -> list[np.ndarray]:
    """Query, key and value as the call takes them."""
    names = ("query", "key", "value")
    return [to_layout(getattr(tensors, n), layout).astype(case.dtype_of(n, dtype)) for n in names]


def from_layout(x: Any, layout: str) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x if layout == "bthd" else x.swapaxes(1, 2) if layout == "bhtd" else x[None]


def _batched(x: Any, layout: str) -> np.ndarray | None:
    return None if x is None else np.asarray(x, np.float64)[None] if layout == "thd" else np.asarray(x, np.float64)


class Result(NamedTuple):
    output: np.ndarray
    weights: np.ndarray | None
    lse: np.ndarray | None
    gradients: dict[str, np.ndarray]
    rounded: dict[str, Any] | None = None  # gradients that have an fp8 dtype
    dtype: Any = np.float32  # of the output and its tensors' gradients
    sizes: dict[str, np.ndarray] | None = None  # of the reference: the roots of sums of squared terms


def run(attend: Any, case: Case, tensors: Tensors, dtype: str, layout: str, placed: Any = None) -> Result:
    """Forward and gradients of sum(output * d_output) + sum(lse * d_lse), in one compiled program."""
    names = ("query", "key", "value")
    arrays = {n: jnp.asarray(x) for n, x in zip(names, handed_over(case, tensors, dtype, layout), strict=True)}
    traced = {n: jnp.asarray(v) for n, v in case.call.items() if isinstance(v, np.ndarray)}
    static = {n: v for n, v in case.call.items() if not isinstance(v, np.ndarray)}
    mask = traced.pop("mask", None) if "mask" in traced else static.pop("mask", None)
    d_output = to_layout(tensors.d_output, layout)
    smooth = {n: traced.pop(n) for n in case.differentiate}
    if placed is not None:
        arrays = placed(arrays)
    for name in names:  # integers have no gradient
        if arrays[name].dtype == jnp.int8:
            traced[name] = arrays.pop(name)

    @jax.jit
    def program(inputs: dict[str, Any], others: dict[str, Any], mask: Any) -> Any:
        def loss(inputs: dict[str, Any]) -> Any:
            call = inputs | others
            q, k, v = (call.pop(n) for n in ("query", "key", "value"))
            result = attend(q, k, v, layout=layout, mask=mask, **call, **static)
            total = (result.attention_outputs.astype(jnp.float32) * d_output).sum()
            if tensors.d_lse is not None:
                d_lse = tensors.d_lse if layout != "thd" else tensors.d_lse[0]
                total += (
                    result.lse * d_lse
                ).sum()  # also of -inf: whatever comes back for such a row, its gradient is 0
            return total, (result.attention_outputs, result.attention_weights, result.lse)

        return jax.grad(loss, has_aux=True)(inputs)

    gradients, (output, weights, lse) = program(arrays | smooth, traced, mask)
    return Result(
        from_layout(output, layout),
        _batched(weights, layout),
        _batched(lse, layout),
        {
            n: from_layout(g, layout) if n in (*names, *case.scales) else np.asarray(g, np.float64)
            for n, g in gradients.items()
        },
        {n: g.dtype for n, g in gradients.items() if g.dtype.itemsize == 1},
        output.dtype,
    )


def expect(case: Case, tensors: Tensors, dim: int = DIM, **more: Any) -> Result:
    """The same from the reference."""
    arguments = {"scale": dim**-0.5, "mask": case.mask, **case.reference, **more}
    scales = {n: np.asarray(case.scales.get(f"{n}_scale", 1.0), np.float64) for n in ("key", "value")}
    qkv = (tensors.query, tensors.key * scales["key"], tensors.value * scales["value"])
    out = reference_attention(*qkv, **arguments)
    d_lse = None if tensors.d_lse is None else np.where(np.isfinite(out.lse), tensors.d_lse, 0)
    gradients = reference_gradients(*qkv, tensors.d_output, d_lse, **arguments)
    sizes = term_sizes(*qkv, tensors.d_output, d_lse, **arguments)
    for name, scale in scales.items():
        of_scale, size_of_scale = (x[name] * getattr(tensors, name) for x in (gradients, sizes))
        if scale.ndim:
            alone = tuple(i for i, n in enumerate(scale.shape) if n == 1)
            gradients[f"{name}_scale"] = of_scale.sum(axis=alone, keepdims=True)
            sizes[f"{name}_scale"] = np.sqrt((size_of_scale**2).sum(axis=alone, keepdims=True))
        gradients[name], sizes[name] = gradients[name] * scale, sizes[name] * scale
    return Result(out.output, out.weights, out.lse, gradients, sizes=sizes)


def agree(got: Result, want: Result, forward: float, backward: float, shards: bool = False) -> None:
    """Assert that everything agrees within the published tolerance, row by row (attnops.verify.closeness).

    An fp8 gradient is also rounded to fp8; of `shards`, each device's share of it is, and they may be larger than their sum.
    """
    terms = want.sizes or {}
    _close("output", got.output, want.output, row_sizes(want.output, terms["output"]), forward, got.dtype)
    if got.weights is not None:
        _close("weights", got.weights, want.weights, row_sizes(want.weights), forward)
    if got.lse is not None:
        assert (np.isneginf(got.lse) == np.isneginf(want.lse)).all()
        finite = np.isfinite(want.lse)
        _close("lse", got.lse[finite], want.lse[finite], lse_size(want.lse[finite]), forward)
    for name, gradient in got.gradients.items():
        expected = want.gradients[name]
        # Of sinks there is one number a head, and heads have nothing to do with one another.
        alone = (x[..., None] if name == "softmax_aux" else x for x in (gradient, expected, terms[name]))
        gradient, expected, size = alone
        sizes, rounded = row_sizes(expected, size), (got.rounded or {}).get(name)
        _close(f"gradient of {name}", gradient, expected, sizes, backward, got.dtype, rounded, shards)


def _close(
    what: str,
    got: np.ndarray,
    want: np.ndarray,
    sizes: np.ndarray,
    tolerance: float,
    dtype: Any = np.float32,
    rounded: Any = None,
    shards: bool = False,
) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, reference {want.shape}"
    assert np.isfinite(got).all(), f"{what} has NaN or infinity"
    if rounded is not None and shards:
        tolerance = 2 * float(jnp.finfo(rounded).eps)
        # The shares of eight devices at most, each rounded to a multiple of fp8's smallest number.
        step = 8 * 0.5 * float(jnp.finfo(rounded).smallest_subnormal)
        got = got + np.clip(want - got, -step, step)
    elif rounded is not None:  # half a step of fp8 beside the tolerance
        step = np.maximum(float(jnp.finfo(rounded).eps) * np.abs(want), float(jnp.finfo(rounded).smallest_subnormal))
        step *= 0.5 + tolerance
        got = got + np.clip(want - got, -step, step)
    error = row_error(got, want, sizes, dtype)
    assert error <= tolerance, f"{what}: error {error:.2e} of a row's size, tolerance {tolerance:.1e}"
