"""The TPU kernels of steps over slots, interpreted, agree with the token-by-token definition in float64, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import LINEAR
from step_inputs import MIXES, STEPS, Rows, Step, drawn, joined, wanted

from attnops import OperationMetadata, OperationRegistry, StateBatch
from attnops.operators.recurrent.kernel.tpu_sizes import FORWARD, STEP
from attnops.verify.recurrent_of_call import recurrent_reference


def agrees(step: Step, metadata: OperationMetadata | None = None, **options: Any) -> Any:
    config = {STEPS[step.kind]: {"interpret": True, "chunk_size": 16}}
    metadata = (
        OperationMetadata(operation_configs=config) if metadata is None else metadata.replace(operation_configs=config)
    )
    operation = OperationRegistry.create(STEPS[step.kind], metadata)
    output = jax.jit(lambda batch: operation(**step.arrays, state=step.state, batch=batch, **options))(step.batch)
    plan = operation.plan(**step.arrays, state=step.state, batch=step.batch, **options)
    assert plan.method == "forward_tpu", plan.explain()
    outputs, state = wanted(step)
    for found, want in ((output.attention_outputs, outputs), (output.state, state)):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), want, rtol=0, atol=2e-5 * max(np.nanmax(np.abs(want)), 1)
        )
    unwritten = np.setdiff1d(np.arange(step.slots), step.batch.write_slots)
    np.testing.assert_array_equal(np.asarray(output.state)[unwritten], step.state[unwritten])
    return plan


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (0, 1, 0, 1)])
def test_one_token_of_each_row(kind: str, lengths: tuple[int, ...]) -> None:
    plan = agrees(drawn(kind, Rows(lengths, (9, 1, 3, 0)), seed=len(set(lengths))), max_q_len=1)
    memory = plan.runs.memory(plan.problem, plan.placement, plan.config)
    assert set(memory) == {STEP}


_RAW = {"gate": "raw", "beta_form": "sigmoid", "beta_max": 2.0, "normalise_qk": True, "normalise_eps": 1e-4}


@pytest.mark.parametrize(
    ("kind", "declared", "own", "sizes"),
    [
        ("gated_delta_rule", _RAW, ("A_log", "dt_bias"), {}),
        ("gated_delta_rule", {"gate": "raw"}, ("A_log",), {"heads": 8, "dim": 128, "value_dim": 12}),
        ("gated_delta_rule", {"normalise_qk": True}, (), {"key_heads": 1, "heads": 3}),
        ("kda", _RAW, ("A_log", "dt_bias"), {"heads": 6}),
        ("kda", _RAW, ("A_log", "dt_bias"), {"dim": 128, "value_dim": 12}),
        ("gla", {"normalise_qk": True}, (), {}),
        ("mamba2", {"dt_softplus": True, "dt_min": 0.2, "dt_max": 1.5}, ("dt_bias",), {}),
        ("mamba2", {"dt_softplus": True}, ("dt_bias",), {"dim": 128, "value_dim": 12}),
    ],
)
def test_gates_and_norms_are_the_kernels(
    kind: str, declared: dict[str, Any], own: tuple[str, ...], sizes: dict[str, int]
) -> None:
    step, rng = drawn(kind, Rows((1, 0, 1, 1), (9, 1, 3, 0)), **sizes), np.random.default_rng(7)
    arrays, heads = dict(step.arrays), step.state.shape[1]
    raw = "dt" if kind == "mamba2" else "decay"
    if own:  # what a model projects, of either sign; some decays are of e^-30 and less
        arrays[raw] = (3 * rng.standard_normal(arrays[raw].shape)).astype(np.float32)
    if declared.get("beta_form"):
        arrays["beta"] = (3 * rng.standard_normal(arrays["beta"].shape)).astype(np.float32)
    shapes = {"A_log": (heads,), "dt_bias": arrays[raw].shape[1:]}
    arrays |= {name: (2 * rng.standard_normal(shapes[name])).astype(np.float32) for name in own}
    name = STEPS[kind]
    operation = OperationRegistry.create(
        name, OperationMetadata(operation_configs={name: {"interpret": True} | declared})
    )
    plan = operation.plan(**arrays, state=step.state, batch=step.batch, max_q_len=1)
    assert plan.method == "forward_tpu", plan.explain()
    output = jax.jit(lambda batch: operation(**arrays, state=step.state, batch=batch, max_q_len=1))(step.batch)
    given = arrays | {"state": step.state} | step.batch.arrays
    given = {
        name: np.where(np.isnan(x), 0, x) if name != "state" and x.dtype.kind == "f" else x for name, x in given.items()
    }
    want = recurrent_reference(plan.problem, given, operation, plan.problem.config)
    for found, one in ((output.attention_outputs, want["attention_outputs"]), (output.state, want["state"])):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), one, rtol=0, atol=2e-5 * max(np.nanmax(np.abs(one)), 1)
        )


@pytest.mark.parametrize("kind", ["gated_delta_rule", "mamba2"])
def test_states_that_lie_with_their_dims_exchanged(kind: str) -> None:
    agrees(drawn(kind, Rows((1, 0, 1), (9, 1, 0)), dim=128, value_dim=12), max_q_len=1)


@pytest.mark.parametrize("kept", [(False, False, False), (False, True, False), (True, False, False)])
def test_rows_that_keep_nothing(kept: tuple[bool, ...]) -> None:
    step = drawn("gated_delta_rule", Rows((1, 1, 1), (4, 0, 2)), heads=8)
    write = np.array(step.batch.write_slots)
    write[:3][~np.array(kept)] = step.slots
    agrees(Step(**vars(step) | {"batch": StateBatch(**step.batch.arrays | {"write_slots": write})}), max_q_len=1)


def test_a_batch_of_fresh_rows_that_keep_nothing() -> None:
    step = drawn("kda", Rows((1, 1), (0, 0)))
    write = np.full_like(step.batch.write_slots, step.slots)
    agrees(Step(**vars(step) | {"batch": StateBatch(**step.batch.arrays | {"write_slots": write})}), max_q_len=1)


def test_an_unknown_slot_is_nan_and_nothing_else() -> None:
    step = drawn("simple_gla", "decode")
    read = np.array(step.batch.read_slots)
    read[0] = step.slots + 3
    batch = StateBatch(**step.batch.arrays | {"read_slots": read})
    metadata = OperationMetadata(operation_configs={STEPS["simple_gla"]: {"interpret": True}})
    operation = OperationRegistry.create(STEPS["simple_gla"], metadata)
    output = jax.jit(lambda batch: operation(**step.arrays, state=step.state, batch=batch, max_q_len=1))(batch)
    assert np.isnan(output.attention_outputs[0]).all()
    np.testing.assert_allclose(output.attention_outputs[1:], wanted(step)[0][1:], rtol=0, atol=2e-5)


_FIXED = ("simple_gla", "lightning", "retention")  # which differ in the decay that a call has

_MIXES = {
    "mixed": (MIXES["mixed"], None),
    "drafts": (MIXES["drafts"], None),
    "few": (Rows((3, 2, 0, 1), (4, 0, 9, 1), drafts=1), 3),
    "chunks": (Rows((17, 20), (33, 0)), 20),
}


@pytest.mark.parametrize(
    ("kind", "mix"),
    [
        ("gated_delta_rule", "drafts"),
        ("mamba2", "few"),
        *(
            pytest.param(kind, mix, marks=pytest.mark.slow)
            for kind in LINEAR
            for mix in _MIXES
            if (kind not in _FIXED or mix == "drafts")
            and (kind, mix) not in (("gated_delta_rule", "drafts"), ("mamba2", "few"))
        ),
    ],
)
def test_rows_of_several_tokens(kind: str, mix: str) -> None:
    """The kernel has the last tokens of rows, that of the whole call those before them."""
    rows, longest = _MIXES[mix]
    plan = agrees(drawn(kind, rows), **({} if longest is None else {"max_q_len": longest}))
    memory = plan.runs.memory(plan.problem, plan.placement, plan.config)
    assert set(memory) == ({STEP} if mix == "few" else {STEP, FORWARD})


@pytest.mark.parametrize(
    ("kind", "rows", "longest"),
    [
        ("gated_delta_rule", Rows((2, 0, 3), (9, 1, 0), drafts=1), 3),
        pytest.param("mamba2", Rows((2, 18, 1), (9, 1, 0)), None, marks=pytest.mark.slow),
    ],
)
def test_rows_whose_states_lie_with_their_dims_exchanged(kind: str, rows: Rows, longest: int | None) -> None:
    agrees(drawn(kind, rows, dim=128, value_dim=12), **({} if longest is None else {"max_q_len": longest}))


@pytest.mark.parametrize("longest", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_rows_of_several_tokens_that_keep_some_states_or_none(longest: int | None) -> None:
    """A row keeps its last state, one only that before it, one none."""
    step = drawn("gated_delta_rule", Rows((4, 3, 2, 4), (5, 0, 3, 2), drafts=1), heads=8)
    write = np.array(step.batch.write_slots)
    write[1, 0] = write[2] = write[3, 1] = step.slots
    agrees(
        Step(**vars(step) | {"batch": StateBatch(**step.batch.arrays | {"write_slots": write})}),
        **({} if longest is None else {"max_q_len": longest}),
    )


@pytest.mark.parametrize(
    ("slots", "head_dim", "value_dim", "copied"),
    [  # whether the program compiled for a TPU v5e copies the slots
        (128, 64, 64, True), (20, 64, 64, False), (128, 128, 64, False), (100, 128, 128, False), (40, 72, 40, True),
    ],
)  # fmt: skip
def test_slots_that_the_kernel_takes_in_another_layout_are_told(
    slots: int, head_dim: int, value_dim: int, copied: bool
) -> None:
    rows, heads = 4, 16
    sizes = {"query": (rows, heads, head_dim), "key": (rows, heads, head_dim), "value": (rows, heads, value_dim)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in sizes.items()}
    state = jax.ShapeDtypeStruct((slots, heads, head_dim, value_dim), jnp.float32)
    shapes = ((rows + 1,), (rows,), (), (rows,), (rows, 1))
    batch = StateBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    operation = OperationRegistry.create(STEPS["simple_gla"], OperationMetadata(platform="tpu"))
    plan = operation.plan(**arrays, state=state, batch=batch, max_q_len=1)
    assert plan.method == "forward_tpu"
    assert ("recurrent.slots_copied" in [x.code for x in plan.notes]) == copied


@pytest.mark.parametrize(
    ("rows", "longest", "sizes"),
    [
        ((Rows((1, 1), (5, 0)), Rows((1, 1), (3, 0))), 1, {}),
        pytest.param(
            (Rows((1, 18), (5, 0)), Rows((4, 15), (3, 2))), None, {"dim": 128, "value_dim": 12}, marks=pytest.mark.slow
        ),
    ],
)
def test_on_a_mesh(rows: tuple[Rows, Rows], longest: int | None, sizes: dict[str, int]) -> None:
    step = joined([drawn("kda", of_shard, seed=n, **sizes) for n, of_shard in enumerate(rows)])
    metadata = OperationMetadata(mesh=jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4]))
    config = {STEPS["kda"]: {"interpret": True, "chunk_size": 16}}
    operation = OperationRegistry.create(STEPS["kda"], metadata.replace(operation_configs=config))
    output = operation(**step.arrays, state=step.state, batch=step.batch, max_q_len=longest)
    assert output.plan.method == "forward_tpu"
    plain = step.operation()(**step.arrays, state=step.state, batch=step.batch, max_q_len=longest)
    np.testing.assert_allclose(output.attention_outputs, plain.attention_outputs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(output.state, plain.state, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mix", ["decode", pytest.param("drafts", marks=pytest.mark.slow)])
def test_slots_of_bfloat16(mix: str) -> None:
    """Between its chunks and its last tokens, the state of a row of drafts is rounded once more."""
    step, drafts = drawn("gla", mix), mix == "drafts"
    narrow = jnp.asarray(step.state).astype(jnp.bfloat16)
    config = {STEPS["gla"]: {"interpret": True, "state_dtype": "bfloat16", "chunk_size": 16}}
    operation = OperationRegistry.create(STEPS["gla"], OperationMetadata(operation_configs=config))
    output = operation(**step.arrays, state=narrow, batch=step.batch, **({} if drafts else {"max_q_len": 1}))
    assert output.plan.method == "forward_tpu"
    outputs, state = wanted(Step(**vars(step) | {"state": np.asarray(narrow, np.float32)}))
    np.testing.assert_allclose(output.attention_outputs, outputs, rtol=0, atol=5e-2 if drafts else 1e-4)
    assert output.state.dtype == jnp.bfloat16
    apart = np.abs(np.asarray(output.state, np.float64) - state)
    once_more = np.nanmax(np.abs(state)) * 2**-8 if drafts else 0
    assert np.nanmax(apart - np.abs(state) * 2**-8) <= 1e-6 + once_more
