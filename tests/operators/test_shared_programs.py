"""Equal operations are one program: planned, traced, lowered and compiled once, whoever made them."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Attention, Causal, Full, InputError, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.errors import InputTypeError
from attnops.operators import Operation
from attnops.operators.choices.bounded_cache import BoundedCache
from attnops.operators.vanilla.kernel import blockwise
from attnops.sharding import virtual_mesh
from attnops.verify import reference_attention

LAYERS = 6
X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 4)), jnp.float32)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def _counting() -> tuple[type, list[Any]]:
    """An operation of its own class, and the problems that its method was traced for."""
    traces: list[Any] = []
    vanilla: Any = OperationRegistry.get("vanilla")

    class Counting(vanilla):
        name = "counting"

        def forward_native(self, call: Any) -> Any:
            traces.append(call.problem)
            return super().forward_native(call)

        forward_native.capability = vanilla.capability("forward_native")  # type: ignore[attr-defined]

    return Counting, traces


def test_an_object_a_layer_is_traced_once() -> None:
    operation, traces = _counting()
    for _ in range(LAYERS):
        operation(OperationMetadata(softmax_scale=0.3))(X, X, X)
    assert len(traces) == 1
    operation(OperationMetadata(softmax_scale=0.4))(X, X, X)
    assert len(traces) == 2


@pytest.mark.parametrize("strategy", ["auto", "ring", "ulysses"])
def test_a_gradient_traces_each_pass_of_a_kernel_once(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        made = getattr(blockwise, name)

        def count(*arguments: Any) -> Any:
            passes.append(name)
            return made(*arguments)

        return count

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(blockwise, name, counted(name))
    mesh = None if strategy == "auto" else virtual_mesh({"sp": 2})
    config = {"vanilla": {"path": "blockwise", "block_q": 16, "block_kv": 16}}
    attend = OperationRegistry.create(
        "vanilla", OperationMetadata(mesh=mesh, sequence_parallel=strategy, operation_configs=config)
    )
    x = jax.ShapeDtypeStruct((1, 72, 2, 4), jnp.float32)  # of no other test: what has been traced before isn't traced
    jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, mask=Full()).attention_outputs.sum(), (0, 1, 2))).trace(x, x, x)
    assert passes == ["_forward", "_backward"]


def _vanilla_made() -> Any:
    return OperationRegistry.create("vanilla", OperationMetadata(softmax_scale=0.3))


def _attention_made() -> Any:
    return Attention({"operation": "vanilla", "metadata": {"softmax_scale": 0.3}})


@pytest.mark.parametrize("make", [_vanilla_made, _attention_made], ids=["operation", "Attention"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_layers_share_one_function_of_the_program(make: Callable[[], Any], gradient: bool) -> None:
    shared = _vanilla_made()

    def lowered(layer: Callable[[], Any], layers: int) -> str:
        def model(x: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = layer()(x, x, x).attention_outputs
            return (x**2).sum()

        return jax.jit(jax.grad(model) if gradient else model).lower(SHAPE).as_text()

    ours, alone = lowered(make, LAYERS), lowered(lambda: shared, 1)
    functions = [len(re.findall(r"func\.func", text)) for text in (ours, alone)]
    assert functions[0] == functions[1]
    assert ours == lowered(lambda: shared, LAYERS)


def test_equal_by_class_and_metadata() -> None:
    vanilla, splash = (OperationRegistry.get(name) for name in ("vanilla", "splash"))
    first, second = (vanilla(OperationMetadata(softmax_scale=0.5)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != vanilla(OperationMetadata(softmax_scale=0.25))
    assert first != splash(first.metadata)
    assert first != "vanilla"
    assert len({first, second}) == 1


@pytest.mark.parametrize(
    "name", [n for n in OperationRegistry.names() if issubclass(OperationRegistry.get(n), Operation)]
)
def test_a_warm_operation_is_copied_and_pickled(name: str) -> None:
    attend = OperationRegistry.create(name)
    own = {"selected": jnp.zeros((X.shape[0], X.shape[1], 1), jnp.int32)} if name == "selected" else {}
    out = attend(X, X, X, **own).attention_outputs
    for other in (pickle.loads(pickle.dumps(attend)), copy.copy(attend), copy.deepcopy(attend)):
        assert other == attend
        assert (other(X, X, X, **own).attention_outputs == out).all()


def test_branches_may_have_other_masks() -> None:
    attend = OperationRegistry.create("vanilla")
    masks = (Causal(), SlidingWindow(left=2))

    @jax.jit
    def either(first: jax.Array, x: jax.Array) -> Any:
        return jax.lax.cond(first, *(lambda x, m=m: attend(x, x, x, mask=m, return_lse=True) for m in masks), x)

    for first, mask in zip((True, False), masks, strict=True):
        out = either(first, X)
        want = reference_attention(
            *(np.asarray(X, np.float64),) * 3, scale=0.5, mask=mask.materialise(slice(0, 8), slice(0, 8))
        )
        np.testing.assert_allclose(out.attention_outputs, want.output, atol=1e-6)
        np.testing.assert_allclose(out.lse, want.lse, atol=1e-6)


def test_the_plan_is_told_outside_the_tree() -> None:
    attend = OperationRegistry.create("vanilla")
    out = attend(X, X, X, return_lse=True)
    assert out.plan.implementation == "vanilla.forward_native"
    assert len(jax.tree.leaves(out)) == 2
    told = []

    @jax.jit
    def inside(x: jax.Array) -> Any:
        result = attend(x, x, x)
        told.append(result.plan)
        return result

    assert inside(X).plan is None
    assert told == [attend.plan(X, X, X)]
    jax.tree.map(jnp.add, out, attend(X, X, X, mask=Full(), return_lse=True))  # one structure, whatever was planned


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_checks_do_not_depend_on_what_was_called_before(warm: bool) -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata(softmax_scale=0.125))
    if warm:
        attend(X, X, X)
    with pytest.raises(InputTypeError, match="no values to attend with"):
        attend(X, SHAPE, X)

    meshed = OperationRegistry.create("vanilla", OperationMetadata(mesh={"tp": 2}, softmax_scale=0.125))
    on_devices = meshed.metadata.replace(mesh=virtual_mesh({"tp": 2}))
    meshed = OperationRegistry.create("vanilla", on_devices)
    if warm:
        meshed(X, X, X)
    with jax.set_mesh(virtual_mesh({"other": 4})), pytest.raises(InputError, match="the context's"):
        meshed(X, X, X)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_turning_on_64_bits_is_seen_by_a_warm_operation(kind: Callable[..., Any]) -> None:
    attend = OperationRegistry.create("vanilla", OperationMetadata(softmax_scale=0.375))
    with jax.enable_x64(True):
        wide = kind(np.asarray(X, np.float64))
    # One and the same array object, before and after.
    assert attend(wide, wide, wide).attention_outputs.dtype == jnp.float32
    with jax.enable_x64(True):
        assert attend(wide, wide, wide).attention_outputs.dtype == jnp.float64
    assert attend(wide, wide, wide).attention_outputs.dtype == jnp.float32


def test_recent_forgets_what_is_unused_and_nothing_else() -> None:
    kept: BoundedCache[int] = BoundedCache(4)
    for number in range(1, 100):
        kept.put(number, number)
        assert kept.find(1) == 1  # in use all the time
        assert len(kept) <= 8
        recent = range(max(1, number - 3), number + 1)
        assert [kept.find(n) for n in recent if n == number] == [number]
    assert kept.find(50) is None


def test_declarations_share_too() -> None:
    operation, traces = _counting()
    OperationRegistry.register(operation)
    try:
        text = json.dumps({"operation": "counting", "call": {"causal": True}})
        for _ in range(LAYERS):
            Attention(json.loads(text))(X, X, X)
        assert len(traces) == 1
    finally:
        OperationRegistry.unregister("counting")
