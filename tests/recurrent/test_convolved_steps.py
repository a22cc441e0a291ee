"""Steps over slots with the convolutions before a recurrence: the definition in float64, on XLA and by the interpreted kernel."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import LINEAR
from step_inputs import MIXES, STEPS, Rows, Step, convolved, drawn, joined, wanted, wanted_windows

from attnops import ConfigError, Declaration, InputError, OperationMetadata, OperationRegistry, StateBatch
from attnops.cli.app import main
from attnops.errors import RefusedError
from attnops.verify.recurrent_of_call import recurrent_reference

QKV, XBC = ("query", "key", "value"), ("x", "B", "C")


def names_of(kind: str) -> tuple[str, ...]:
    return XBC if kind == "mamba2" else QKV


def of(kind: str, mix: str | Rows, **sizes: Any) -> Step:
    return convolved(drawn(kind, mix, **sizes), *names_of(kind))


def agrees(step: Step, kernel: bool = False, activation: str | None = "silu", **options: Any) -> Any:
    config = {"interpret": True, "chunk_size": 16} if kernel else {"chunk_size": 16}
    metadata = OperationMetadata(operation_configs={STEPS[step.kind]: config | {"conv_activation": activation}})
    operation: Any = OperationRegistry.create(STEPS[step.kind], metadata)
    given = step.given

    def run(given: dict[str, Any]) -> Any:
        return operation(**given, **options)

    output = jax.jit(run)(given)
    plan = operation.plan(**given, **options)
    assert plan.method == ("forward_tpu" if kernel else "forward_native"), plan.explain()
    outputs, state = wanted(step, activation)
    for found, want in ((output.attention_outputs, outputs), (output.state, state)):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), want, rtol=0, atol=3e-5 * max(np.nanmax(np.abs(want)), 1)
        )
    windows = wanted_windows(step)
    assert set(output.windows) == set(windows)
    for name, want in windows.items():
        np.testing.assert_array_equal(output.windows[name], want.astype(np.float32))
    return plan


def cells(every: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """All cells, those that aren't quick for `make test-all`."""
    return [cell if cell in quick else pytest.param(*cell, marks=pytest.mark.slow) for cell in every]


@pytest.mark.parametrize(
    ("kind", "mix"),
    cells(product(LINEAR, MIXES), [("gated_delta_rule", "mixed"), ("mamba2", "drafts"), ("gla", "decode")]),
)
def test_each_row_is_convolved_with_what_came_before(kind: str, mix: str) -> None:
    agrees(of(kind, mix))


@pytest.mark.parametrize(
    ("kind", "lengths"),
    cells(
        product(LINEAR, [(1, 1, 1, 1), (0, 1, 0, 1)]),
        [("gated_delta_rule", (0, 1, 0, 1)), ("kda", (1, 1, 1, 1)), ("mamba2", (0, 1, 0, 1))],
    ),
)
def test_one_token_by_the_kernel(kind: str, lengths: tuple[int, ...]) -> None:
    agrees(of(kind, Rows(lengths, (9, 1, 3, 0)), seed=len(set(lengths))), kernel=True, max_q_len=1)


_MIXES = {
    "mixed": (MIXES["mixed"], None),
    "drafts": (MIXES["drafts"], None),
    "few": (Rows((3, 2, 0, 1), (4, 0, 9, 1), drafts=1), 3),
    "chunks": (Rows((17, 20), (33, 0)), 20),
}


@pytest.mark.parametrize(
    ("kind", "mix"),
    cells(
        product(["gated_delta_rule", "mamba2", "kda", "gla"], _MIXES),
        [("gated_delta_rule", "few"), ("mamba2", "drafts")],
    ),
)
def test_rows_of_any_length_by_the_kernels(kind: str, mix: str) -> None:
    rows, longest = _MIXES[mix]
    agrees(of(kind, rows), kernel=True, max_q_len=longest)


_ONE, _SEVERAL = Rows((1, 0, 1), (9, 1, 0)), Rows((3, 2, 0, 1), (4, 0, 9, 1), drafts=2)


@pytest.mark.parametrize(
    ("rows", "key_heads", "heads"),
    cells(
        [(rows, *of) for rows in (_ONE, _SEVERAL) for of in ((32, 32), (2, 32), (1, 34), (3, 6))],
        [(_ONE, 2, 32), (_SEVERAL, 32, 32)],
    ),
)
def test_heads_in_several_blocks(rows: Rows, key_heads: int, heads: int) -> None:
    """At most 16 heads are worked on together: whole groups of a key head, or a part of one."""
    step = of("gated_delta_rule", rows, key_heads=key_heads, heads=heads)
    agrees(step, kernel=True, max_q_len=max(rows.lengths))


def test_states_that_lie_with_their_dims_exchanged() -> None:
    agrees(of("mamba2", Rows((1, 0, 1), (9, 1, 0)), dim=128, value_dim=12), kernel=True, max_q_len=1)


@pytest.mark.parametrize(
    ("names", "kernel"),
    cells(
        product([("query",), ("value",), ("key", "value")], [False, True]),
        [(("key", "value"), False), (("query",), False)],
    ),
)
def test_some_arrays_are_convolved(names: tuple[str, ...], kernel: bool) -> None:
    step = convolved(drawn("kda", "mixed"), *names, bias=False, width=2)
    agrees(step, kernel, activation=None)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("kept", [(False, False, False), (False, True, False), (True, False, False)])
def test_rows_that_keep_nothing(kept: tuple[bool, ...], kernel: bool) -> None:
    step = of("gated_delta_rule", Rows((1, 1, 1), (4, 0, 2)), heads=32, key_heads=32)
    write = np.array(step.batch.write_slots)
    write[:3][~np.array(kept)] = step.slots
    agrees(
        Step(**vars(step) | {"batch": StateBatch(**step.batch.arrays | {"write_slots": write})}), kernel, max_q_len=1
    )


@pytest.mark.parametrize("kernel", [False, True])
def test_an_unknown_slot_is_nan_and_nothing_else(kernel: bool) -> None:
    step = of("simple_gla", "decode")
    read = np.array(step.batch.read_slots)
    read[0] = step.slots + 3
    batch = StateBatch(**step.batch.arrays | {"read_slots": read})
    config = {"conv_activation": "silu"} | ({"interpret": True} if kernel else {})
    operation: Any = OperationRegistry.create(
        STEPS["simple_gla"], OperationMetadata(operation_configs={STEPS["simple_gla"]: config})
    )
    output = jax.jit(lambda batch: operation(**step.given | {"batch": batch}, max_q_len=1))(batch)
    assert np.isnan(output.attention_outputs[0]).all()
    np.testing.assert_allclose(output.attention_outputs[1:], wanted(step, "silu")[0][1:], rtol=0, atol=2e-4)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bfloat16_tokens_and_windows(kernel: bool) -> None:
    """The windows hold the tokens as they are; XLA rounds what is convolved, the kernel doesn't."""
    step = of("gated_delta_rule", "drafts")
    narrow = {name: jnp.asarray(x).astype(jnp.bfloat16) for name, x in (step.arrays | step.windows).items()}
    exact = {name: np.asarray(x, np.float32) for name, x in narrow.items()}
    rounded = Step(
        **vars(step) | {"arrays": {n: exact[n] for n in step.arrays}, "windows": {n: exact[n] for n in step.windows}}
    )
    name = STEPS[step.kind]
    config = {"conv_activation": "silu", "chunk_size": 16} | ({"interpret": True} if kernel else {})
    operation: Any = OperationRegistry.create(name, OperationMetadata(operation_configs={name: config}))
    output = operation(**narrow, state=step.state, batch=step.batch)
    outputs, state = wanted(rounded, "silu")
    assert output.attention_outputs.dtype == jnp.bfloat16
    for found, want in ((output.attention_outputs, outputs), (output.state, state)):
        size = np.nanmax(np.abs(want))
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=0, atol=2e-2 * size)
    for one, want in wanted_windows(rounded).items():
        assert output.windows[one].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(output.windows[one], np.float32), want.astype(np.float32))


@pytest.mark.parametrize("kind", ["kda", "mamba2"])
@pytest.mark.parametrize("kernel", [False, True])
def test_on_a_mesh(kind: str, kernel: bool) -> None:
    """Heads and slots are split, windows as the state is; devices send nothing."""
    parts = [convolved(drawn(kind, Rows((1, 4), (5, 0)), seed=n), *names_of(kind)) for n in (1, 2)]
    step = joined(parts)
    for name in ("A", "D"):
        for part in parts:
            part.arrays.update({name: step.arrays[name]} if name in step.arrays else {})
    results = [(*wanted(part, "silu"), wanted_windows(part)) for part in parts]
    outputs, state = (np.concatenate([found[n] for found in results]) for n in (0, 1))
    name = STEPS[kind]
    config = {"conv_activation": "silu", "chunk_size": 16} | ({"interpret": True} if kernel else {})
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    operation: Any = OperationRegistry.create(name, OperationMetadata(mesh=mesh, operation_configs={name: config}))
    compiled = jax.jit(lambda given: operation(**given)).lower(step.given).compile()
    output = compiled(step.given)
    np.testing.assert_allclose(output.attention_outputs, outputs, rtol=0, atol=2e-4)
    np.testing.assert_allclose(output.state, state, rtol=0, atol=2e-4)
    for one, found in output.windows.items():
        np.testing.assert_array_equal(found, np.concatenate([x[2][one] for x in results]).astype(np.float32))
    plan = operation.plan(**step.given)
    window = f"{names_of(kind)[0]}_conv_window"
    assert tuple(plan.specs[window])[:3] == ("dp", None, "tp")
    assert tuple(plan.specs[window.replace("window", "weight")])[1] == "tp"
    assert plan.specs[window.replace("window", "bias")][0] == "tp"
    for sent in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {sent}(" not in compiled.as_text()


def test_windows_of_keys_that_a_mesh_repeats_are_refused() -> None:
    step = of("gated_delta_rule", "mixed", key_heads=2)
    operation = step.operation(OperationMetadata(mesh=jax.make_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])))
    plan = operation.plan(**step.given)
    assert {reason.code for rejected in plan.rejected for reason in rejected.reasons} == {"recurrent.repeated_windows"}
    with pytest.raises(RefusedError):
        operation(**step.given)
    of_values = convolved(drawn("gated_delta_rule", "mixed", key_heads=2), "value")
    output = operation(**of_values.given)
    np.testing.assert_allclose(output.attention_outputs, wanted(of_values)[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"query_conv_window": None}, "query_conv_weight and no query_conv_window"),
        ({"key_conv_weight": None}, "and no key_conv_weight"),
        ({"value_conv_weight": np.zeros((3, 4, 6), np.float32)}, r"value_conv_weight has shape \(3, 4, 6\)"),
        ({"query_conv_bias": np.zeros((4, 8), np.float32)}, "query_conv_bias has shape"),
        ({"query_conv_window": np.zeros((14, 2, 2, 8), np.float32)}, "query_conv_window has shape"),
        ({"key_conv_window": np.zeros((14, 3, 2, 8), np.float16)}, "key_conv_window is float16; wanted float32"),
        ({"conv_activation": "relu"}, "conv_activation='relu'"),
    ],
)
def test_wrong_convolutions_are_refused(change: dict[str, Any], names: str) -> None:
    step = of("gated_delta_rule", "mixed")
    assert step.slots == 14
    with pytest.raises(InputError, match=names):
        step.operation()(**step.given | change)


def test_an_activation_without_a_convolution_is_refused() -> None:
    step = drawn("gated_delta_rule", "mixed")
    with pytest.raises(InputError, match="no convolution"):
        step.operation()(**step.given, conv_activation="silu")
    with pytest.raises(InputError, match="no convolution"):
        step.operation(conv_activation="silu").plan(**step.given)


def test_the_reference_of_files_is_that_of_rows() -> None:
    step = of("mamba2", "drafts")
    operation = step.operation(conv_activation="silu")
    problem = operation.plan(**step.given).problem
    found = recurrent_reference(problem, operation.flat(step.given), operation, problem.config)
    outputs, state = wanted(step, "silu")
    np.testing.assert_allclose(found["attention_outputs"], outputs, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found["state"], state, rtol=0, atol=1e-10)
    for name, want in wanted_windows(step).items():
        np.testing.assert_array_equal(found[name], want)


def test_decoding_updates_slots_and_windows_where_they_are() -> None:
    step = of("gated_delta_rule", Rows((1,) * 16, (3,) * 16), dim=128, value_dim=128)
    operation = step.operation()
    slots = {"state": step.state, **step.windows}

    def run(slots: dict[str, Any], arrays: dict[str, Any], batch: StateBatch) -> Any:
        return operation(**slots, **arrays, batch=batch, max_q_len=1)

    compiled = jax.jit(run, donate_argnums=0).lower(slots, step.arrays, step.batch).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in slots.values())


@pytest.mark.parametrize("kind", ["kda", "mamba2"])
def test_a_file_declares_convolutions(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = ("conv_weight", "conv_bias", "conv_window")
    file = {
        "operation": STEPS[kind],
        "metadata": {"operation_configs": {STEPS[kind]: {"conv_activation": "silu"}}},
        "call": {
            "batch": 3, "q_len": 24, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "dims": {"width": 3, "slots": 5},
            "operands": {f"{name}_{end}": True for name in names_of(kind) for end in ends},
        },
    }  # fmt: skip
    declaration = Declaration.from_dict(file)
    assert Declaration.from_json(declaration.to_json()) == declaration
    assert declaration.shapes()[f"{names_of(kind)[1]}_conv_window"].shape == (5, 2, 2, 8)
    path = tmp_path / "step.json"
    path.write_text(json.dumps(file))
    with pytest.raises(SystemExit) as stopped:
        sys.exit(main(["run", "--check", "--json", str(path)]))
    assert not stopped.value.code, capsys.readouterr()
    checked = json.loads(capsys.readouterr().out)
    assert {f"{name}_conv_window" for name in names_of(kind)} <= {one["what"] for one in checked["checks"]}


def test_sizes_of_a_convolution_need_one() -> None:
    call = {"batch": 3, "q_len": 24, "q_heads": 4, "head_dim": 8, "dims": {"width": 3}}
    with pytest.raises(ConfigError, match=r"call.dims has 'width'"):
        Declaration.from_dict({"operation": STEPS["kda"], "call": call}).shapes()
    call |= {"dims": {}, "operands": {"key_conv_weight": True}}
    with pytest.raises(ConfigError, match=r"call.dims.width missing"):
        Declaration.from_dict({"operation": STEPS["kda"], "call": call}).shapes()
