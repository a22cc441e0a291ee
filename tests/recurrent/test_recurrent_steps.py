"""Steps over slots agree with the token-by-token definition in float64, row by row: outputs, every slot, drafts, meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import KINDS, LINEAR, call_of, expected
from step_inputs import MIXES, STEPS, Rows, Step, drawn, joined, wanted

from attnops import InputError, OperationMetadata, OperationRegistry, StateBatch
from attnops.errors import InputTypeError, RefusedError


def close(found: Any, want: np.ndarray, within: float = 2e-5) -> None:
    assert found.shape == want.shape
    size = max(np.nanmax(np.abs(want)), 1.0)
    np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=0, atol=within * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_each_row_continues_its_own_state(kind: str, mix: str) -> None:
    step = drawn(kind, mix)
    output, (outputs, state) = step.run(), wanted(step)
    close(output.attention_outputs, outputs)
    close(output.state, state)
    unwritten = np.setdiff1d(np.arange(step.slots), step.batch.write_slots)
    np.testing.assert_array_equal(np.asarray(output.state)[unwritten], step.state[unwritten])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_few_tokens_need_no_chunks(kind: str) -> None:
    """max_q_len is a promise that changes no number."""
    for mix, longest in (("decode", 1), (Rows((3, 2, 1), (4, 0, 9)), 3)):
        step = drawn(kind, mix)
        output, (outputs, state) = step.run(max_q_len=longest and np.int64(longest)), wanted(step)
        close(output.attention_outputs, outputs)
        close(output.state, state)
        assert output.plan.problem.mode == "autoregressive"


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "mamba2"])
def test_large_states_are_worked_on_in_blocks_of_heads(kind: str) -> None:
    """States of 640 KiB; one row starts from zeros, one has no token, one writes nothing."""
    step = drawn(kind, Rows((1, 0, 1, 1), (9, 4, 0, 2)), key_heads=4, heads=8, dim=160, value_dim=128)
    write = np.array(step.batch.write_slots)
    write[3] = step.slots
    step = Step(**vars(step) | {"batch": StateBatch(**step.batch.arrays | {"write_slots": write})})
    output = jax.jit(lambda batch: Step(**vars(step) | {"batch": batch}).run(max_q_len=1))(step.batch)
    outputs, state = wanted(step)
    close(output.attention_outputs, outputs)
    close(output.state, state)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_on_one_device_and_on_a_mesh(kind: str) -> None:
    parts = [drawn(kind, Rows((1, 18), (5, 0)), seed=1), drawn(kind, Rows((4, 15), (3, 2)), seed=2)]
    step = joined(parts)
    for name in ("A", "A_log", "D", "dt_bias", "weight", "bias"):
        if name in step.arrays:  # one for all shards
            for part in parts:
                part.arrays[name] = step.arrays[name]
    outputs, state = (np.concatenate(x) for x in zip(*map(wanted, parts), strict=True))
    devices = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    config = {STEPS[kind]: {"chunk_size": 16}} if kind != "causal_conv1d" else {}
    for metadata in (None, OperationMetadata(mesh=devices, operation_configs=config)):
        output = jax.jit(lambda batch, metadata=metadata: Step(**vars(step) | {"batch": batch}).run(metadata))(
            step.batch
        )
        close(output.attention_outputs, outputs)
        close(output.state, state)
    plan = step.operation(metadata).plan(**step.arrays, state=step.state, batch=step.batch)
    heads = 2 if kind == "causal_conv1d" else 1
    assert plan.specs["state"][0] == plan.specs["read_slots"][0] == "dp"
    assert plan.specs["state"][heads] == "tp"
    assert plan.specs["attention_outputs"][:2] == ("dp", "tp")


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_then_decoding_is_the_whole_call(kind: str) -> None:
    """Three sequences whose rows come in any order and not in every step; one jitted step with its slots donated."""
    rng, lengths, slots, rows = np.random.default_rng(4), (26, 9, 31), 5, 3
    calls = [call_of(kind, batch=1, tokens=n, state=False, seed=n) for n in lengths]
    for call in calls:
        call |= {name: calls[0][name] for name in ("A", "D", "weight", "bias") if name in call}
    table = OperationRegistry.get(STEPS[kind]).operands
    shared = {name: x for name, x in calls[0].items() if "tokens" not in table[name].dims}
    width = 12
    step = drawn(kind, "decode")
    operation = step.operation()

    def run(arrays: dict[str, Any], state: Any, batch: StateBatch) -> Any:
        return operation(**arrays, **shared, state=state, batch=batch, debug=True)

    jitted = jax.jit(run, donate_argnums=1)
    state = jnp.zeros((slots, *step.state.shape[1:]))
    done, outputs = [0, 0, 0], [[], [], []]
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        order = [int(x) for x in rng.permutation(3) if done[x] < lengths[x] and rng.random() < 0.8]
        budget, lens = width, []
        for at in order:
            ahead = 8 if done[at] < lengths[at] - 8 else 1  # the last tokens one by one
            lens.append(min(ahead, budget, lengths[at] - done[at]))
            budget -= lens[-1]
        starts = np.cumsum([0, *lens])
        arrays = {}
        for name in table.names:
            if "tokens" in table[name].dims and name in calls[0]:
                parts = [calls[at][name][0, done[at] : done[at] + n] for at, n in zip(order, lens, strict=True)]
                filler = np.zeros((width - starts[-1], *calls[0][name].shape[2:]), np.float32)
                arrays[name] = np.concatenate([*parts, filler])
        ids = [at + 1 if n else slots for at, n in zip(order, lens, strict=True)]
        batch = StateBatch.make(
            slots,
            cu_q_lens=starts,
            kv_lens=[done[at] + n for at, n in zip(order, lens, strict=True)],
            read_slots=ids,
            write_slots=ids,
            max_sequences=rows,
        )
        output = jitted(arrays, state, batch)
        state = output.state
        for n, (at, length) in enumerate(zip(order, lens, strict=True)):
            outputs[at].append(np.asarray(output.attention_outputs)[starts[n] : starts[n] + length])
            done[at] += length
    for at, call in enumerate(calls):
        want = expected(kind, call)
        close(np.concatenate(outputs[at]), want.outputs[0])
        close(state[at + 1], want.state[0])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_of_bfloat16_are_rounded_once(kind: str) -> None:
    step = drawn(kind, "mixed")
    narrow = jnp.asarray(step.state).astype(jnp.bfloat16)
    operation = step.operation(state_dtype="bfloat16")
    output = operation(**step.arrays, state=narrow, batch=step.batch)
    outputs, state = wanted(Step(**vars(step) | {"state": np.asarray(narrow, np.float32)}))
    close(output.attention_outputs, outputs)
    assert output.state.dtype == jnp.bfloat16
    error = np.abs(np.asarray(output.state, np.float64) - state)
    assert np.nanmax(error - np.abs(state) * 2**-8) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_tokens_stay_near(kind: str) -> None:
    step = drawn(kind, "mixed")
    narrow = {name: jnp.asarray(x).astype(jnp.bfloat16) for name, x in step.arrays.items()}
    wide = {name: np.asarray(x, np.float32) for name, x in narrow.items()}
    state = jnp.asarray(step.state).astype(jnp.bfloat16) if kind == "causal_conv1d" else step.state
    output = step.operation()(**narrow, state=state, batch=step.batch)
    outputs, _ = wanted(Step(**vars(step) | {"arrays": wide, "state": np.asarray(state, np.float32)}))
    assert output.attention_outputs.dtype == jnp.bfloat16
    close(output.attention_outputs, outputs, 1e-2)


def batch_of(slots: Any = 4, **changes: Any) -> StateBatch:
    fields = {"cu_q_lens": [0, 2, 3], "kv_lens": [5, 1], "read_slots": [0, 4], "write_slots": [[0, 2], [1, 4]]}
    return StateBatch.make(slots, **(fields | changes))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"cu_q_lens": [1, 2, 3]}, "starts at 1"),
        ({"cu_q_lens": [0, 2, 1]}, "falls from 2 to 1"),
        ({"cu_q_lens": [0, 2]}, "2 entries for 2 rows"),
        ({"kv_lens": [1, 1]}, "row 0: 2 queries and kv_len 1"),
        ({"tokens": 2}, "row 1: cu_q_lens goes to 3"),
        ({"num_seqs": 3}, "num_seqs is 3"),
        ({"read_slots": [5, 4]}, "row 0: read_slots has 5"),
        ({"read_slots": [-1, 4]}, "row 0: read_slots has -1"),
        ({"read_slots": [4, 4]}, "row 0: a past of 3 tokens"),
        ({"write_slots": [[0, 2], [5, 4]]}, "row 1: write_slots has 5"),
        ({"write_slots": [[0, 2], [1, 3]]}, "row 1: write_slots has a slot in column 1"),
        ({"write_slots": [[0, 2], [2, 4]]}, "row 1: slot 2 is written by row 0 too"),
        ({"write_slots": [[2, 4], [0, 4]]}, "row 0: reads slot 0, which row 1 writes"),
        ({"write_slots": [[0, 2]]}, "write_slots has 1 rows"),
        ({"max_sequences": 1}, "at most 1"),
        ({"drafts": 0}, "2 slots to write"),
        ({"read_slots": [2**40, 4]}, "fits in int32"),
        ({"slots": "4"}, "slots='4'"),
        ({"slots": 0}, "slots=0"),
        ({"kv_lens": [[5], [1, 2]]}, "kv_lens has rows of different lengths"),
    ],
)
def test_wrong_batches_are_refused(change: dict[str, Any], names: str) -> None:
    with pytest.raises(InputError, match=names):
        batch_of(**change)


@pytest.mark.parametrize("change", [{"write_slots": None}, {"write_slots": "01"}, {"kv_lens": ["5", "1"]}])
def test_other_types_in_batches_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputTypeError, match=next(iter(change))):
        batch_of(**change)


def test_rows_may_read_one_slot_and_keep_nothing() -> None:
    batch = batch_of(kv_lens=[5, 4], read_slots=[3, 3], write_slots=[[0, 4], [4, 4]])
    assert batch.shards is None
    np.testing.assert_array_equal(batch.write_slots, [[0, 4], [4, 4]])


def test_traced_batches_are_checked_with_debug() -> None:
    step = drawn("simple_gla", "mixed")
    twice = np.array(step.batch.write_slots)
    twice[1] = twice[0]
    wrong = StateBatch(**step.batch.arrays | {"write_slots": twice})

    def run(batch: StateBatch, **options: Any) -> None:
        jitted = jax.jit(lambda batch: Step(**vars(step) | {"batch": batch}).run(debug=True, **options).state)
        jax.block_until_ready(jitted(batch))
        jax.effects_barrier()

    run(step.batch)
    with pytest.raises(Exception, match="is written by row 0 too"):
        run(wrong)
    with pytest.raises(Exception, match="max_q_len=2"):
        run(step.batch, max_q_len=2)


def test_a_slot_out_of_range_is_not_another_ones() -> None:
    """Traced and without debug, it reads as NaN and nothing is written."""
    step = drawn("simple_gla", "decode")
    read, write = np.array(step.batch.read_slots), np.array(step.batch.write_slots)
    read[0], write[1] = step.slots + 3, -2
    batch = StateBatch(**step.batch.arrays | {"read_slots": read, "write_slots": write})
    output = jax.jit(lambda batch: Step(**vars(step) | {"batch": batch}).run())(batch)
    assert np.isnan(output.attention_outputs[0]).all()
    lost = step.batch.write_slots[1]
    np.testing.assert_array_equal(output.state[lost], step.state[lost])


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"batch": None}, InputTypeError, "StateBatch"),
        ({"state": None}, InputTypeError, "no state"),
        ({"state": np.zeros((18, 4, 8, 5), np.float32)}, InputError, "state has shape"),
        ({"state": np.zeros((18, 4, 8, 6), np.float16)}, InputError, "slots of float32"),
        ({"state": np.zeros((3, 4, 8, 6), np.float32)}, InputError, "wanted 0 to 2"),
        ({"initial_state": np.zeros((1, 4, 8, 6), np.float32)}, InputTypeError, "unknown argument 'initial_state'"),
        ({"segment_ids": np.zeros(46, np.int32)}, InputTypeError, "unknown argument 'segment_ids'"),
        ({"layout": "thd"}, InputTypeError, "unknown argument 'layout'"),
        ({"mode": "train"}, InputError, "mode='train'"),
        ({"max_q_len": 0}, InputError, "max_q_len=0"),
        ({"max_q_len": 2}, InputError, "max_q_len=2"),
        ({"mode": "autoregressive"}, InputError, "max_q_len=1"),
        ({"debug": 1}, InputTypeError, "debug=1"),
        ({"decay": np.ones((46, 4), np.float32)}, InputError, "decay holds 1"),
    ],
)
def test_wrong_steps_are_refused(change: dict[str, Any], error: type[Exception], names: str) -> None:
    step = drawn("gated_delta_rule", "mixed")
    arguments = step.arrays | {"state": step.state, "batch": step.batch} | change
    with pytest.raises(error, match=names):
        step.operation()(**arguments)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"drafts": "x"}, "drafts='x'"), ({"drafts": -1}, "drafts=-1"),
        ({"max_sequences": 2.0}, "max_sequences=2.0"), ({"max_sequences": 0}, "max_sequences=0"),
    ],
)  # fmt: skip
def test_sizes_of_a_batch_are_whole_numbers(change: dict[str, Any], names: str) -> None:
    with pytest.raises(InputError, match=names):
        batch_of(**change)


def test_numpys_whole_numbers_are_sizes() -> None:
    assert batch_of(drafts=np.int64(1), max_sequences=np.int32(3)).write_slots.shape == (3, 2)
    step = drawn("simple_gla", "decode")
    arguments = step.arrays | {"state": step.state, "batch": step.batch}
    assert step.operation().plan(**arguments, max_q_len=np.int64(1)).problem.option["max_q_len"] == 1


def test_rows_that_a_mesh_splits_otherwise_than_slots_are_refused() -> None:
    step = joined([drawn("kda", Rows((1, 4), (5, 0))), drawn("kda", Rows((2, 3), (1, 2)))])
    devices = jax.make_mesh((4, 2), ("dp", "tp"))
    operation = step.operation(OperationMetadata(mesh=devices))
    plan = operation.plan(**step.arrays, state=step.state, batch=step.batch)
    codes = {reason.code for rejected in plan.rejected for reason in rejected.reasons}
    assert codes == {"recurrent.shards"}
    with pytest.raises(RefusedError):
        operation(**step.arrays, state=step.state, batch=step.batch)


@pytest.mark.parametrize("kind", [*LINEAR, "mamba1"])
def test_decoding_updates_slots_where_they_are(kind: str) -> None:
    """One row's state at a time is copied, to be read twice and written."""
    step = drawn(kind, Rows((1,) * 16, (3,) * 16), dim=128, value_dim=128)
    operation = step.operation()

    def run(arrays: dict[str, Any], state: jax.Array, batch: StateBatch) -> Any:
        output = operation(**arrays, state=state, batch=batch, max_q_len=1)
        return output.attention_outputs, output.state

    compiled = jax.jit(run, donate_argnums=1).lower(step.arrays, jnp.asarray(step.state), step.batch).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= step.state.nbytes
    assert memory.temp_size_in_bytes < (4 if kind == "mamba1" else 2) * step.state[0].nbytes


@pytest.mark.parametrize("kind", LINEAR)
def test_decoding_updates_states_where_they_are(kind: str) -> None:
    """The whole call with one token of each sequence."""
    call = call_of(kind, batch=8, tokens=1, dim=64, value_dim=32)
    operation, state = OperationRegistry.create(kind), jnp.asarray(call.pop("initial_state"))

    def run(call: dict[str, Any], state: jax.Array) -> Any:
        output = operation(**call, initial_state=state)
        return output.attention_outputs, output.state

    memory = jax.jit(run, donate_argnums=1).lower(call, state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state.nbytes
    assert memory.temp_size_in_bytes < state.nbytes / 2


@pytest.mark.parametrize("kind", ["kda", "mamba1", "causal_conv1d"])
@pytest.mark.parametrize(("mix", "longest"), [("drafts", None), ("decode", 1)])
def test_a_gradient_is_refused(kind: str, mix: str, longest: int | None) -> None:
    step = drawn(kind, mix)
    name = next(iter(step.arrays))

    def loss(x: Any, state: Any) -> Any:
        call = Step(**vars(step) | {"arrays": step.arrays | {name: x}, "state": state})
        return call.run(max_q_len=longest).attention_outputs.sum()

    for at in (0, 1):
        with pytest.raises(InputError, match="serving has no gradient"):
            jax.jit(jax.grad(loss, at))(step.arrays[name], step.state)
    stopped = jax.grad(lambda x: loss(jax.lax.stop_gradient(x), step.state) + x.sum())(step.arrays[name])
    np.testing.assert_array_equal(stopped, np.ones_like(step.arrays[name]))
