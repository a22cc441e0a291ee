"""Which method runs on which platform, decided on meshes of described devices; and where the platform is read."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
import toy_operations as toy
from jax.sharding import AbstractMesh

from attnops.compat import abstract_device
from attnops.errors import InputError, RefusedError
from attnops.registry import OperationMetadata
from attnops.sharding import virtual_mesh

# A platform's own methods, best first: cuda and rocm are both gpus, and theirs go first.
OWN = {
    "tpu": ["forward_tpu"],
    "cuda": ["forward_blackwell", "forward_hopper", "forward_cuda", "forward_gpu"],
    "rocm": ["forward_rocm", "forward_gpu"],
    "gpu": ["forward_gpu"],
    "cpu": ["forward_cpu"],
}
SUBSETS = [set(s) for n in range(8) for s in itertools.combinations(toy.PLATFORM_METHODS, n)]


# Made up; jax 0.9 tells a described device's platform by its kind alone.
KINDS = {"tpu": "TPU 0", "cuda": "NVIDIA 0", "rocm": "AMD 0", "gpu": "GPU 0", "cpu": "CPU 0"}


def described(platform, kind=None):
    device = abstract_device(kind=kind or KINDS.get(platform, platform), cores=None, platform=platform)
    return AbstractMesh((2, 2), ("fsdp", "tp"), abstract_device=device)


def plan_on(operation, devices, kind=None, **metadata):
    return operation(OperationMetadata(mesh=described(devices, kind), **metadata)).plan(*toy.shapes())


@pytest.mark.parametrize("platform", OWN)
def test_the_best_method_that_is_written_runs(platform):
    for methods in SUBSETS:
        decided = plan_on(toy.make(methods), platform)
        want = next((m for m in OWN[platform] if m in methods), "forward_native")
        assert decided.method == want
        assert decided.implementation == f"toy.{want}"
        assert decided.kind == ("native" if want == "forward_native" else "platform")
        assert decided.rejected == ()
        assert decided.problem.platform == platform
        assert decided.problem.device_kind == KINDS[platform]


@pytest.mark.parametrize("platform", OWN)
@pytest.mark.parametrize("refusing", SUBSETS, ids=lambda s: "+".join(sorted(s)) or "none")
def test_the_next_one_runs_where_the_best_refuses(platform, refusing):
    operation = toy.make(toy.PLATFORM_METHODS, refusing=refusing)
    decided = plan_on(operation, platform, fallback="allow")
    tried = [*OWN[platform], "forward_native"]
    want = next(m for m in tried if m not in refusing)
    assert decided.method == want
    assert decided.kind == ("fallback" if want == "forward_native" else "platform")
    assert [r.implementation for r in decided.rejected] == [f"toy.{m}" for m in tried[: tried.index(want)]]

    forbidden = plan_on(operation, platform, fallback="error")
    if want == "forward_native":
        assert forbidden.kind == "refused"
        assert forbidden.implementation is None
        assert forbidden.method is None
        with pytest.raises(RefusedError, match="fallback is an error by policy"):
            forbidden.require()
    else:
        assert forbidden.method == want


def test_native_by_dispatch_is_no_fallback():
    decided = plan_on(toy.make({"forward_tpu"}), "cuda", fallback="error")
    assert decided.kind == "native"
    assert "has no kernel of its own on cuda" in decided.explain()


@pytest.mark.parametrize(
    ("kind", "method"),
    [("NVIDIA H200", "forward_blackwell"), ("AMD Instinct MI300X", "forward_rocm"), ("GPU ?", "forward_gpu")],
)
def test_a_gpu_in_an_abstract_mesh_is_told_by_its_name(kind, method):
    """jax calls every vendor's device 'gpu' there, and abstract meshes are what there is under jit."""
    assert plan_on(toy.make(toy.PLATFORM_METHODS), "gpu", kind).method == method


# -- where the platform is read --------------------------------------------------------------------------------------


def test_backend_decides_where_there_is_no_mesh():
    operation = toy.make(toy.PLATFORM_METHODS)
    for backend, methods in OWN.items():
        decided = operation(OperationMetadata(backend=backend)).plan(*toy.shapes())
        assert decided.problem.platform == backend
        assert decided.problem.platform_source == "metadata.backend"
        assert decided.method == methods[0]


def test_backend_decides_where_the_mesh_has_no_devices():
    mesh = AbstractMesh((2,), ("tp",))
    decided = toy.make(toy.PLATFORM_METHODS)(OperationMetadata(mesh=mesh, backend="tpu")).plan(*toy.shapes())
    assert decided.method == "forward_tpu"


def test_the_devices_of_a_mesh_beat_the_backend():
    metadata = OperationMetadata(mesh=virtual_mesh({"tp": 2}), backend="tpu")
    decided = toy.make(toy.PLATFORM_METHODS)(metadata).plan(*toy.shapes())
    assert decided.problem.platform == "cpu"
    assert decided.problem.platform_source == "the mesh's devices"
    assert decided.method == "forward_cpu"


def test_the_default_backend_stands_last():
    decided = toy.make(toy.PLATFORM_METHODS)().plan(*toy.shapes())
    assert (decided.problem.platform, decided.method) == ("cpu", "forward_cpu")
    assert decided.problem.platform_source == "jax's default backend"
    expected = toy.make(toy.PLATFORM_METHODS)(OperationMetadata(platform="tpu")).plan(*toy.shapes())
    assert (expected.problem.platform, expected.method) == ("tpu", "forward_tpu")


def test_the_mesh_of_the_context_counts():
    operation = toy.make(toy.PLATFORM_METHODS)()
    with jax.sharding.use_abstract_mesh(described("tpu")):
        decided = operation.plan(*toy.shapes())
    assert decided.method == "forward_tpu"
    assert [a.name for a in decided.problem.mesh] == ["fsdp", "tp"]
    assert operation.plan(*toy.shapes()).method == "forward_cpu"


@pytest.mark.parametrize(
    ("wanted", "platform", "agree"),
    [
        ("tpu", "tpu", True),
        ("cuda", "cuda", True),
        ("gpu", "cuda", True),
        ("gpu", "rocm", True),
        ("gpu", "gpu", True),
        ("cuda", "rocm", False),
        ("tpu", "cpu", False),
        ("cpu", "tpu", False),
        ("gpu", "tpu", False),
        ("tpu", "gpu", False),
    ],
)
def test_a_declared_platform_that_disagrees_with_the_mesh_is_an_error(wanted, platform, agree):
    operation = toy.make(toy.PLATFORM_METHODS)
    if agree:
        assert plan_on(operation, platform, platform=wanted).problem.platform == platform
    else:
        with pytest.raises(
            InputError, match=f"metadata.platform='{wanted}', but the mesh's devices says? '{platform}'"
        ):
            plan_on(operation, platform, platform=wanted)


def test_a_declared_platform_that_disagrees_with_the_backend_is_an_error():
    with pytest.raises(InputError, match=r"metadata.platform='tpu', but metadata.backend says 'cpu'"):
        toy.make()(OperationMetadata(platform="tpu", backend="cpu")).plan(*toy.shapes())


def _leaves_short_ones(*methods, **others):
    short = dataclasses.replace(toy.rule("toy.short", lambda p, c: p.q_len > 1), routes=True)
    return toy.make(methods, rules=(short,), **others)


@pytest.mark.parametrize("fallback", ["warn", "error", "allow"])
def test_what_a_method_leaves_to_native_is_dispatch(fallback):
    operation = _leaves_short_ones("forward_tpu")(OperationMetadata(mesh=described("tpu"), fallback=fallback))
    assert operation.plan(*toy.shapes()).kind == "platform"
    decided = operation.plan(*toy.shapes(q_len=1))
    assert (decided.kind, decided.method) == ("routed", "forward_native")
    assert [r.code for rejected in decided.rejected for r in rejected.reasons] == ["toy.short"]
    assert "dispatch: the platform's own implementation leaves such calls to it" in decided.explain()


def test_what_is_left_to_native_warns_nobody():
    operation = _leaves_short_ones("forward_cpu")(OperationMetadata())
    query = jnp.ones((1, 1, 2, 8))
    assert operation(query, query, query).plan.kind == "routed"  # a FallbackWarning would be an error here


def test_other_reasons_beside_do_not_make_it_a_fallback_but_alone_they_do():
    operation = _leaves_short_ones("forward_tpu", refusing=("forward_tpu",))
    metadata = OperationMetadata(mesh=described("tpu"), fallback="error")
    assert operation(metadata).plan(*toy.shapes(q_len=1)).kind == "routed"
    assert operation(metadata).plan(*toy.shapes()).kind == "refused"


def test_a_second_own_method_is_tried_before_a_call_is_left():
    leaving = _leaves_short_ones("forward_cuda")
    both = type("Both", (leaving,), {"forward_gpu": toy.make(["forward_gpu"]).forward_gpu})
    decided = both(OperationMetadata(mesh=described("cuda"))).plan(*toy.shapes(q_len=1))
    assert (decided.kind, decided.method) == ("platform", "forward_gpu")
