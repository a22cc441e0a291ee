"""How devices exchange what their tokens do to a state: both ways, with gradients, and what compiled programs send."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_inputs import call_of, expected

from attnops import OperationMetadata, OperationRegistry
from attnops.planning.recurrent.exchange import rounds
from attnops.verify.passes import target_reports
from attnops.verify.recurrent_call import PlannedRecurrence
from attnops.verify.recurrent_reference import reference_linear_gradients

WAYS = ("all_gather", "log_step")
SMALL = {"batch": 1, "key_heads": 1, "heads": 2, "dim": 4, "value_dim": 3}
WIDE = {"batch": 2, "key_heads": 4, "heads": 4, "dim": 32, "value_dim": 16}
slow = pytest.mark.slow


def split(kind: str, way: str | None, **axes: int) -> Any:
    devices = np.asarray(jax.devices()[: int(np.prod([*axes.values()]))]).reshape([*axes.values()])
    config = {"chunk_size": 8} | ({} if way is None else {"exchange": way})
    mesh = jax.sharding.Mesh(devices, tuple(axes))
    metadata = OperationMetadata(mesh=mesh, sequence_parallel="state", operation_configs={kind: config})
    return OperationRegistry.create(kind, metadata)


@pytest.mark.parametrize("devices", [2, 3, 5, 6, 8, 16])
def test_rounds_compose_the_maps_of_all_devices_before(devices: int) -> None:
    """Maps as sets of devices: after all rounds, device n has those of 0 to n, and a linear part where it was sent whole."""
    reached = [{n} for n in range(devices)]
    for step in rounds(devices):
        before = [set(x) for x in reached]
        for source, target in step.constant:
            # A map that doesn't reach the first device has a linear part to send, if its target's next round needs it.
            assert ((source, target) in step.linear) == (0 not in before[source])
            reached[target] |= before[source]
    assert reached == [set(range(n + 1)) for n in range(devices)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", ["gated_delta_rule", *(pytest.param(x, marks=slow) for x in ("kda", "gla", "simple_gla"))]
)
@pytest.mark.parametrize("devices", [8, pytest.param(6, marks=slow), pytest.param(2, marks=slow)])
def test_documents_cross_devices(kind: str, way: str, devices: int) -> None:
    """Outputs, state and all gradients of packed documents that are longer and shorter than a device's tokens."""
    call = call_of(kind, tokens=48, **SMALL)
    call["segment_ids"] = np.repeat([3, 4, 5, 6, 9], [20, 5, 2, 20, 1])[None].astype(np.int32)
    operation, rng = split(kind, way, sp=devices), np.random.default_rng(1)
    wanted = expected(kind, call)
    d_outputs, d_state = (rng.standard_normal(x.shape).astype(np.float32) for x in wanted)
    smooth = {name: x for name, x in call.items() if x.dtype == np.float32}

    def loss(smooth: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        found = operation(**call | smooth)
        return jnp.sum(found.attention_outputs * d_outputs) + jnp.sum(found.state * d_state), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(smooth)
    assert operation.plan(**call).placement.exchange == way
    np.testing.assert_allclose(found.attention_outputs, wanted.outputs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(found.state, wanted.state, rtol=0, atol=2e-5)
    decay = call["decay"] if call["decay"].ndim == 4 else call["decay"][..., None]
    of_reference = reference_linear_gradients(
        call["query"], call["key"], call["value"], decay, call.get("beta"), call["initial_state"], call["segment_ids"],
        scale=0.5, d_outputs=d_outputs, d_state=d_state,
    )  # fmt: skip
    for name, gradient in gradients.items():
        want = of_reference[name].reshape(gradient.shape)
        np.testing.assert_allclose(gradient, want, rtol=0, atol=5e-5 * max(np.abs(want).max(), 1), err_msg=name)


@pytest.mark.parametrize(
    ("kind", "way"), [("simple_gla", "all_gather"), ("simple_gla", "log_step"), ("causal_conv1d", None)]
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_callers_shard_map_returns_one_state(kind: str, way: str | None, check_vma: bool) -> None:
    call = call_of(kind, tokens=32, **SMALL)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("sp",))
    config = {} if way is None else {kind: {"chunk_size": 8, "exchange": way}}
    operation = OperationRegistry.create(kind, OperationMetadata(sequence_parallel="state", operation_configs=config))
    along = {name: jax.P(None, "sp") if x.shape[1:2] == (32,) else jax.P() for name, x in call.items()}

    def part(call: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = operation(**call)
        return found.attention_outputs, found.state

    where = jax.P(None, "sp"), jax.P()
    run = jax.shard_map(part, mesh=mesh, in_specs=(along,), out_specs=where, check_vma=check_vma)
    outputs, state = jax.jit(run)(call)
    wanted = expected(kind, call)
    np.testing.assert_allclose(outputs, wanted.outputs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, wanted.state, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [pytest.param("mamba2", marks=slow), "mamba1"])
@pytest.mark.parametrize("way", WAYS)
def test_mamba(kind: str, way: str) -> None:
    call = call_of(kind, tokens=48, segments=True, lengths=True, **SMALL)
    found, wanted = split(kind, way, sp=8)(**call), expected(kind, call)
    np.testing.assert_allclose(found.attention_outputs, wanted.outputs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.state, wanted.state, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "linear", "wanted"),
    # By one all-gather 7 maps; by rounds 3 of what is added, 2 of what multiplies, 1 state, and 2 * 7/8 of the last one.
    [("gated_delta_rule", 32 * 32, "log_step"), ("gla", 32, "log_step"), ("mamba2", 1, "log_step")],
)
def test_the_way_is_chosen_by_bytes(kind: str, linear: int, wanted: str) -> None:
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in call_of(kind, tokens=64, **WIDE).items()}
    rows, added = WIDE["batch"] * WIDE["heads"] * 4, 32 * 16
    bytes_of = {"all_gather": rows * 7 * (linear + added), "log_step": rows * ((4 + 1.75) * added + 2 * linear)}
    assert min(bytes_of, key=lambda way: bytes_of[way]) == wanted
    assert split(kind, None, sp=8).plan(**shapes).placement.exchange == wanted
    for way in WAYS:
        (told,) = (
            x for x in split(kind, way, sp=8).plan(**shapes).notes if getattr(x, "code", "") == "recurrent.exchange"
        )
        other = next(x for x in WAYS if x != way)
        assert (told.values["name"], told.values["size"]) == (way, bytes_of[way])
        assert (told.values["other"], told.values["other_size"]) == (other, bytes_of[other])
    # Two devices: one map, or what is added, the state and half of it back and forth.
    assert split("mamba2", None, sp=2).plan(**shapes if kind == "mamba2" else _shapes("mamba2")).placement.exchange == (
        "all_gather"
    )


def _shapes(kind: str, **sizes: Any) -> dict[str, Any]:
    call = call_of(kind, **{"tokens": 64} | WIDE | sizes)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items()}


def test_an_exchange_without_effect_is_told() -> None:
    codes = [getattr(x, "code", "") for x in split("kda", "log_step", dp=2).plan(**_shapes("kda")).notes]
    assert "recurrent.no_exchange" in codes
    assert "recurrent.exchange" not in codes


@pytest.mark.parametrize(
    ("kind", "way", "axes"),
    [
        pytest.param("gated_delta_rule", "log_step", {"sp": 8}, marks=slow),
        ("simple_gla", "log_step", {"sp": 4, "tp": 2}),
        *(
            pytest.param(kind, way, axes, marks=slow)
            for kind, way in (
                ("kda", "all_gather"),
                ("gla", "log_step"),
                ("mamba2", "log_step"),
                ("mamba1", "all_gather"),
            )
            for axes in ({"sp": 4, "tp": 2}, {"dp": 2, "sp": 2, "tp": 2})
        ),
        ("causal_conv1d", None, {"sp": 4, "tp": 2}),
    ],
)
def test_programs_send_what_is_counted(kind: str, way: str | None, axes: dict[str, int]) -> None:
    """Forward and backward, at two lengths, with documents: the same bytes. Channels of mamba1 share B and C, whose gradients are
    summed up over the devices that have parts of the channels."""
    sent, split_in = [], {"tp": 1, "dp": 1, **axes}
    for tokens in (64, 256):
        operation = split(kind, way, **axes) if way else _plain(kind, axes)
        shapes = _shapes(kind, tokens=tokens, segments=True)
        *_, report = target_reports(PlannedRecurrence(operation, shapes), "cpu")
        shared = [4 * shapes[name].size for name in ("B", "C")] if kind == "mamba1" else []
        summed = sum(shared) / (split_in["dp"] * split_in["sp"]) * 2 * (1 - 1 / split_in["tp"])
        assert [one.name for one in report.passes] == ["forward", "forward and backward"]
        for one in report.passes:
            assert (one.failure, one.unknown, one.differences) == (None, (), ())
            assert one.collectives
        forward, both = (sum(c.sent_bytes for c in one.collectives or ()) for one in report.passes)
        sent.append([forward, both - summed])
    assert sent[0] == sent[1]
    assert sent[0][1] > 1.9 * sent[0][0]  # what is passed on goes back the same way


def _plain(kind: str, axes: dict[str, int]) -> Any:
    devices = np.asarray(jax.devices()[: int(np.prod([*axes.values()]))]).reshape([*axes.values()])
    mesh = jax.sharding.Mesh(devices, tuple(axes))
    return OperationRegistry.create(kind, OperationMetadata(mesh=mesh, sequence_parallel="state"))
