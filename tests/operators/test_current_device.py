"""The platform of a call without a mesh: that of committed arrays, then of jax.default_device, then the default backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnops import InputError, OperationMetadata, OperationRegistry
from attnops.operators.call.current_device import CurrentDevice, current_device

TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", client=None, id=0)
AMD = SimpleNamespace(platform="gpu", device_kind="AMD Instinct", client=SimpleNamespace(platform_version="rocm 6"))
SHAPE = (1, 256, 2, 128)


class Device:
    """A device that isn't here, as far as jax tells of one."""

    def __init__(self, like: Any) -> None:
        self.__dict__.update(vars(like))


@pytest.fixture
def on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a TPU, whose other backend are the CPUs that are here."""
    real, tpu = jax.devices, Device(TPU)
    monkeypatch.setattr(jax, "devices", lambda backend=None: [tpu] if backend in (None, "tpu") else real(backend))


def cpu_array(index: int = 3) -> jax.Array:
    return jax.device_put(np.ones(SHAPE, np.float32), jax.local_devices(backend="cpu")[index])


def test_the_order() -> None:
    loose, committed = jnp.ones(SHAPE), cpu_array()
    assert current_device([loose, None]) == CurrentDevice("cpu", "cpu", "jax's default backend")
    assert current_device([None, loose, committed]).source == "the arrays' devices"
    for device in (jax.devices()[3], "cpu"):
        with jax.default_device(device):
            assert current_device([loose, np.ones(3)]).source == "jax.default_device"
            assert current_device([loose, committed]).source == "the arrays' devices"
    shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    assert current_device([shape, jax.random.key(0)]).source == "jax's default backend"
    assert current_device([jax.device_put(jax.random.key(0), jax.devices()[1])]).source == "the arrays' devices"
    split = jax.device_put(jnp.ones(8), NamedSharding(Mesh(jax.devices()[:4], ("a",)), PartitionSpec("a")))
    assert current_device([split]) == CurrentDevice("cpu", "cpu", "the arrays' devices")


def test_under_jit_what_is_traced_says_nothing() -> None:
    found = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        found.append(current_device([x]))
        return x

    traced(cpu_array())
    with jax.default_device(jax.devices()[2]):
        traced(jnp.ones(SHAPE))
    assert [current.source for current in found] == ["jax's default backend", "jax.default_device"]


@pytest.mark.usefixtures("on_a_tpu")
def test_plans_on_a_machine_with_two_backends() -> None:
    splash = OperationRegistry.create("splash", OperationMetadata(tuning="off"))
    loose, committed = np.ones(SHAPE, np.float32), cpu_array()

    def plan(*arrays: Any) -> tuple[str, str, str | None]:
        found = splash.plan(*arrays)
        return found.problem.platform, found.problem.platform_source, found.implementation

    assert plan(loose, loose, loose) == ("tpu", "jax's default backend", "splash.forward_tpu")
    assert plan(committed, loose, loose) == ("cpu", "the arrays' devices", "splash.forward_native")
    assert plan(loose, loose, committed) == ("cpu", "the arrays' devices", "splash.forward_native")
    for device in (jax.local_devices(backend="cpu")[3], "cpu"):
        with jax.default_device(device):
            assert plan(loose, loose, loose) == ("cpu", "jax.default_device", "splash.forward_native")
    assert plan(loose, loose, loose)[0] == "tpu"
    text = splash.explain(committed, committed, committed)
    assert "the arrays' devices" in text


@pytest.mark.usefixtures("on_a_tpu")
def test_what_is_declared_goes_before_and_is_held_against_where_it_runs() -> None:
    committed, loose = cpu_array(), np.ones(SHAPE, np.float32)
    metadata = OperationMetadata(backend="tpu", tuning="off")
    decided = OperationRegistry.create("splash", metadata).plan(committed, committed, committed)
    assert (decided.problem.platform, decided.problem.platform_source) == ("tpu", "metadata.backend")
    with pytest.raises(InputError, match=r"planned for tpu \(from metadata.backend\), but this call runs on cpu"):
        OperationRegistry.create("splash", metadata)(committed, committed, committed)
    expected = OperationMetadata(platform="tpu", tuning="off")
    mesh = Mesh(jax.local_devices(backend="cpu")[:1], ("tp",))
    decided = OperationRegistry.create("splash", OperationMetadata(mesh=mesh, tuning="off")).plan(loose, loose, loose)
    assert (decided.problem.platform, decided.problem.platform_source) == ("cpu", "the mesh's devices")
    with pytest.raises(InputError, match="this call runs on cpu"):
        OperationRegistry.create("splash", expected)(committed, committed, committed)


@pytest.mark.usefixtures("on_a_tpu")
def test_a_warm_operation_plans_again_where_the_platform_is_another() -> None:
    """Committed arrays run on the CPU of a TPU machine; the call that was kept for them is not for others."""
    splash = OperationRegistry.create("splash", OperationMetadata(tuning="off"))
    small = jax.device_put(np.ones((1, 4, 1, 8), np.float32), jax.local_devices(backend="cpu")[3])
    output = splash(small, small, small)
    assert output.plan.problem.platform == "cpu"
    assert output.attention_outputs.devices() == {jax.local_devices(backend="cpu")[3]}
    with jax.default_device("cpu"):
        loose = jnp.ones((1, 4, 1, 8))
        assert splash(loose, loose, loose).plan.problem.platform_source == "jax.default_device"
    assert splash(small, small, small).plan.problem.platform_source == "the arrays' devices"


def test_calls_run_where_the_arrays_are_and_where_the_default_is() -> None:
    vanilla = OperationRegistry.create("vanilla")
    loose = jnp.ones((1, 4, 1, 8))
    for device in jax.devices()[2:4]:
        with jax.default_device(device):
            assert vanilla(loose + 0, loose + 0, loose + 0).attention_outputs.devices() == {device}
        committed = jax.device_put(loose, device)
        assert vanilla(committed, committed, committed).attention_outputs.devices() == {device}


def test_a_default_device_that_is_not_here() -> None:
    x = np.ones((1, 4, 1, 8), np.float32)
    with (
        jax.default_device("gpu"),
        pytest.raises(InputError, match=r"jax.default_device is 'gpu', but there is none here"),
    ):
        OperationRegistry.create("vanilla").plan(x, x, x)


def test_the_vendor_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda backend=None: [Device(AMD)])
    here = current_device([])
    assert here == CurrentDevice("rocm", "AMD Instinct", "jax's default backend")
    assert [here.serves(platform) for platform in ("rocm", "gpu", "cuda", "cpu")] == [True, True, False, False]
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    problem = OperationRegistry.create("vanilla", OperationMetadata(backend="gpu")).plan(x, x, x).problem
    assert (problem.platform, problem.device_kind, problem.platform_source) == (
        "rocm",
        "AMD Instinct",
        "metadata.backend",
    )
