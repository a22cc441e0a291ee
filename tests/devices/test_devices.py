"""The table of TPUs: as Pallas and libtpu describe them, and the same number wherever a device is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType

from attnops import KVCache
from attnops.compat import abstract_device
from attnops.devices import MIN_VMEM_BYTES, SCALAR_BYTES, described_cores, tpu_of, vmem_of
from attnops.devices.tpus import KINDS
from attnops.verify.devices import device_limits
from attnops.verify.generations import generations, topology_of
from attnops.verify.targets import target_of

CACHE = KVCache(layers=1, kv_heads=2, head_dim=128, pages=8, max_sequences=2, max_length=32)
# GiB of HBM of a chip, from cloud.google.com/tpu/docs, and its cores.
CHIPS = {"TPU v4": (32, 2), "TPU v5 lite": (16, 1), "TPU v5": (95, 2), "TPU v6 lite": (32, 1), "TPU7x": (192, 2)}


def _mesh(kind: str, cores: int | None) -> AbstractMesh:
    device = abstract_device(kind, cores, "tpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


@pytest.mark.parametrize("kind", [*KINDS, "TPU v5p", "TPU v5e", "TPU v6e"])
def test_a_core_is_as_pallas_describes_it(kind: str) -> None:
    with jax.sharding.use_abstract_mesh(_mesh(kind, 1)):
        info = pltpu.get_tpu_info()
    core = tpu_of(kind, 1)
    assert core is not None
    assert (core.hbm_bytes, core.vmem_bytes) == (info.hbm_capacity_bytes, info.vmem_capacity_bytes)
    assert core.scalar_bytes == info.smem_capacity_bytes
    assert (core.bytes_per_second, core.flops_per_second) == (info.mem_bw_bytes_per_second, info.bf16_ops_per_second)
    assert MIN_VMEM_BYTES <= core.vmem.default <= core.vmem.maximum <= core.vmem_bytes
    assert core.scalar_bytes == SCALAR_BYTES or kind in ("TPU v2", "TPU v3")


@pytest.mark.parametrize("kind", CHIPS)
def test_the_cores_of_a_chip_have_its_memory(kind: str) -> None:
    held, cores = CHIPS[kind]
    chip = tpu_of(kind, cores)
    assert chip is not None
    assert chip.hbm_bytes == pytest.approx(held * 2**30, rel=0.015)
    assert chip.hbm_bytes == cores * tpu_of(kind, 1).hbm_bytes


@pytest.mark.parametrize(
    ("kind", "cores", "held"),
    [
        ("TPU v4", 1, 17.2e9),
        ("TPU v4", 2, 34.4e9),
        ("TPU v4", None, 34.4e9),  # a machine joins a chip's cores
        ("TPU v5", 1, 51.5e9),
        ("TPU v5", None, 103e9),
        ("TPU v5p", 2, 103e9),
        ("TPU v5 lite", None, 17.2e9),
        ("TPU v6 lite", None, 34.4e9),
        ("TPU7x", None, 103e9),  # each core is a device
    ],
)
def test_every_question_has_the_same_answer(kind: str, cores: int | None, held: float) -> None:
    mesh = _mesh(kind, cores)
    limits = device_limits("tpu", kind, cores)
    assert limits is not None
    assert limits.hbm_bytes == held
    assert CACHE.plan(mesh).memory_limit == held
    assert CACHE.plan(mesh, device_kind=kind).memory_limit == held
    if cores is None:
        assert CACHE.plan(device_kind=kind).memory_limit == held


@pytest.mark.parametrize("name", generations())
def test_targets_are_as_libtpu_describes_them(name: str) -> None:
    target = target_of({"v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}.get(name, f"{name}:2x2"))
    assert target.cores == described_cores(target.kind)
    mesh = target.abstract({"fsdp": target.count})
    assert CACHE.plan(mesh).memory_limit == device_limits("tpu", target.kind, target.cores).hbm_bytes
    assert CACHE.plan(mesh).scalar_limit == SCALAR_BYTES


@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
@pytest.mark.parametrize("kind", CHIPS)
def test_cores_are_those_of_described_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import topologies

    from attnops.verify.topology import described_mesh

    mesh = described_mesh(topology_of(kind))  # loads libtpu with the environment that it needs
    device: Any = mesh.devices.flat[0]
    assert device.num_cores == described_cores(kind)
    assert CACHE.plan(mesh).memory_limit == tpu_of(kind, device.num_cores).hbm_bytes
    if kind in ("TPU v4", "TPU v5"):
        joined = topologies.get_topology_desc(
            platform="tpu", topology_name=topology_of(kind), chip_config_name="megacore"
        ).devices
        assert {one.num_cores for one in joined} == {tpu_of(kind).cores}
        assert len(joined) == 4  # chips


def test_an_unknown_kind() -> None:
    assert tpu_of("TPU v99") is None
    assert device_limits("tpu", "TPU v99") is None
    assert vmem_of("TPU v99").maximum == MIN_VMEM_BYTES
    plan = CACHE.plan(device_kind="TPU v99")
    assert (plan.memory_limit, plan.scalar_limit) == (None, SCALAR_BYTES)
