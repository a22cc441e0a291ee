"""Registered mask functions in kernels: what a kernel can't compile is refused in the plan, what it can is computed right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_operation import every_operation

from attnops import Attention, Causal, MaskFunction, RefusedError, register_mask_function
from attnops.verify import reference_attention
from attnops.verify.topology import described_mesh

N = 8
TABLE = np.tril(np.ones((N, N), bool))
TABLE[3, 1] = TABLE[6, 2] = False
FIVE, TRUE, SHIFT = jnp.int32(5), jnp.bool_(True), np.int64(1)
Q, K, V = (jax.random.normal(jax.random.key(n), (1, 40, heads, 16)) for n, heads in enumerate((4, 2, 2)))


def _named(function: Any) -> MaskFunction:
    register_mask_function("rules_tested", override=True)(function)
    return MaskFunction("rules_tested")


@jax.jit
def _under_jit(x: Any, j: Any) -> Any:
    return x % FIVE >= j % FIVE


BEYOND = {
    "table": (lambda x, j: jnp.asarray(TABLE)[x % N, j % N], "array", r"holds bool\[8,8\]"),
    "one entry": (lambda x, j: x - j < jnp.array([[5]]), "array", r"holds int32\[1,1\]"),
    "under jit": (_under_jit, "array", r"holds int32\[\]"),
    "computed table": (lambda x, j: jnp.arange(N)[x % N] >= j % N, "operation", "uses gather"),
    "order": (lambda x, j: jnp.sort(x, axis=-1) >= j, "operation", "uses sort"),
    "host": (lambda x, j: np.isin(np.asarray(x) - j, (0, 3)), "operation", "can't be traced.*TracerArrayConversion"),
}
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "splash": ("splash", {"interpret": True}),
    "flash": ("flash_attn2", {"interpret": True}),
    "borrowed": ("splash", {"interpret": True, "kernel": "jax"}),
    "ring": ("ring", {"interpret": True, "mesh": {"sp": 2}}),
}


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_kernel_cannot_compile_is_refused(kernel: str, name: str) -> None:
    function, kind, told = BEYOND[name]
    operation, config = KERNELS[kernel]
    mask = Causal() & _named(function)
    plan = Attention(operation, **config).plan(Q, K, V, mask=mask)
    assert plan.kind == "fallback"
    (reason,) = (reason for one in plan.rejected for reason in one.reasons)
    assert reason.code == f"{'flash' if kernel == 'flash' else 'splash'}.mask_function_{kind}"
    assert reason.field == "mask"
    with pytest.raises(RefusedError, match=f"mask function 'rules_tested' {told}"):
        Attention(operation, fallback="error", **config)(Q, K, V, mask=mask)


def test_a_table_runs_in_plain_xla() -> None:
    """A tree of drafts: the mask is right wherever the fallback runs, and under jit of the caller."""
    mask = Causal() & _named(lambda x, j: jnp.asarray(TABLE)[x % N, j % N])
    attend = Attention("splash", interpret=True, fallback="allow")
    at = np.arange(40)
    seen = np.tril(np.ones((40, 40), bool)) & TABLE[at[:, None] % N, at % N]
    wanted = reference_attention(*map(np.asarray, (Q, K, V)), scale=0.25, mask=seen[None, None]).output
    np.testing.assert_allclose(jax.jit(lambda q: attend(q, K, V, mask=mask).attention_outputs)(Q), wanted, atol=2e-6)


NUMBERS = {
    "held": lambda x, j: (x % FIVE >= j % FIVE) & TRUE,
    "numpy": lambda x, j: x >> SHIFT >= j >> SHIFT,
    "entries": lambda x, j: sum(((x == int(a)) & (j == int(b)) for a, b in np.argwhere(TABLE)), x == j) > 0,
}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("splash", "held"), ("flash", "held"), ("borrowed", "held"), ("ring", "held"), ("splash", "numpy")],
)
def test_numbers_that_a_function_holds(kernel: str, name: str) -> None:
    """As jax arrays of one number, which Pallas refuses to capture, and as NumPy's."""
    operation, config = KERNELS[kernel]
    function = NUMBERS[name]
    mask = Causal() & _named(function)
    attend = Attention(operation, fallback="error", **config)
    at = np.arange(40)
    seen = np.tril(np.ones((40, 40), bool)) & (
        (at[:, None] % 5 >= at % 5) if name == "held" else (at[:, None] // 2 >= at // 2)
    )
    wanted = reference_attention(*map(np.asarray, (Q, K, V)), scale=0.25, mask=seen[None, None]).output
    np.testing.assert_allclose(attend(Q, K, V, mask=mask).attention_outputs, wanted, atol=1e-5)


def test_a_value_of_the_caller_is_an_array() -> None:
    """A function made under jit that holds a traced value."""

    def plan(lengths: jax.Array) -> jax.Array:
        mask = _named(lambda x, j: j - x < lengths[0])
        code = mask.code
        assert code.arrays
        assert "Tracer" not in str(code)
        with pytest.raises(RefusedError, match="holds"):
            Attention("splash", interpret=True, fallback="error")(Q, K, V, mask=Causal() & mask)
        return lengths

    jax.jit(plan)(jnp.array([3]))


def test_a_target_that_is_not_here() -> None:
    """The plan for a TPU, without one."""
    mesh = described_mesh("v5e:2x2", {"fsdp": 2, "tp": 2})
    q, k = (jax.ShapeDtypeStruct((2, 1024, heads, 128), jnp.bfloat16) for heads in (8, 2))
    attend = Attention("splash", mesh=mesh, mask=Causal() & _named(BEYOND["table"][0]))
    assert attend.plan(q, k, k).kind == "fallback"
    attend = Attention("splash", mesh=mesh, mask=Causal() & _named(NUMBERS["held"]))
    assert attend.plan(q, k, k).implementation == "splash.forward_tpu"


def test_the_list_of_operations_is_that_of_the_compiled_function() -> None:
    from attnops.operators.choices.function_rules import MOSAIC, TRITON

    assert MOSAIC & TRITON - {"pjit"} <= _named(every_operation).code.operations


@pytest.mark.slow
def test_every_operation_compiles_for_a_tpu() -> None:
    pytest.importorskip("libtpu")
    mesh = described_mesh("v5e:2x2", {"fsdp": 2, "tp": 2})
    place = jax.NamedSharding(mesh, jax.P("fsdp", None, "tp"))
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 128), jnp.bfloat16, sharding=place) for heads in (8, 2))
    attend = Attention("splash", mesh=mesh, fallback="error", mask=_named(every_operation))
    jax.jit(lambda q, k, v: attend(q, k, v).attention_outputs).lower(q, k, k).compile()
