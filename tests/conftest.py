"""Set up JAX for the tests: eight virtual CPU devices, no metadata server, no compilation cache."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = 8
# "cuda": the conformance tests run on this machine's GPU, compiled (make test-gpu).
PLATFORM = os.environ.get("ATTNOPS_TEST_PLATFORM", "cpu")

_imported_too_early = "jax" in sys.modules
os.environ["JAX_PLATFORMS"] = "cpu" if PLATFORM == "cpu" else f"{PLATFORM},cpu"
if PLATFORM == "cuda":  # several workers share its memory; jax.nn's products, which the published tolerances require
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
# No choice that somebody tuned on this machine may decide what the tests see.
os.environ["ATTNOPS_TUNE_CACHE"] = tempfile.mkdtemp(prefix="attnops-tests-")
atexit.register(shutil.rmtree, os.environ["ATTNOPS_TUNE_CACHE"], ignore_errors=True)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# The strictest that a user's program may declare. In the environment, so that the processes that tests start have it too.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

# Nearly all of the time goes into compiling small programs that run once. So XLA's CPU compiler is in a hurry here: LLVM
# optimises nothing, and loops are emitted without MLIR. `make test-all` also compiles the quick tests as a user does.
_flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
_hurry = ""
if PLATFORM == "cuda":
    _flags += " --xla_gpu_autotune_level=0"  # of XLA's own products
elif not os.environ.get("ATTNOPS_TEST_OPTIMISED"):
    _flags += " --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10.") and not _imported_too_early:  # later ones don't have the first of them
        _hurry = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = _flags + _hurry
# Ahead-of-time TPU compiles: ask no metadata server, and let parallel test workers each load libtpu.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

if _hurry:  # libtpu reads XLA_FLAGS too, and ends the process for a flag that it doesn't know; the CPU reads them once
    import jax

    jax.jit(lambda x: x)(0)
    os.environ["XLA_FLAGS"] = _flags

if _imported_too_early:  # a plugin did it: fine as long as the settings above still took effect
    import jax

    devices = jax.devices()
    assert [d.platform for d in devices] == ["cpu"] * DEVICES, (
        f"jax was imported before tests/conftest.py and has {devices}; wanted {DEVICES} cpu devices. "
        "Find the pytest plugin that imports jax."
    )

# Compiling takes seconds the first time a shape is seen, so a deadline would only measure that. The gate draws the same
# examples on every machine; `make test-all` searches new ones.
settings.register_profile("attnops", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("attnops-search", deadline=None, max_examples=40)
settings.load_profile("attnops")


def pytest_collection_finish() -> None:
    """Python's collector needn't go through what stays: modules and tests. Tracing makes many objects, and few circles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """The mark `default_promotion`: the test calls another library whose own code promotes dtypes or ranks."""
    mark = request.node.get_closest_marker("default_promotion")
    if mark is None:
        yield
        return
    assert mark.args, "say in the mark why the test needs it"
    import jax

    with (
        pytest.MonkeyPatch.context() as environment,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        for name in ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION"):  # of processes that the test starts
            environment.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_file() -> Iterator[None]:
    """Forget what a file has compiled: thousands of programs are gigabytes, which Python's collector goes through again and
    again."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture
def new_jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans as with a jax that has what kernels in Mosaic GPU need; plans are cached."""
    from attnops.operators.mosaic import mosaic_rules
    from attnops.operators.paged import mosaic_page_rules
    from attnops.planning.decide import _decide

    for module in (mosaic_rules, mosaic_page_rules):
        monkeypatch.setattr(module, "JAX_NEEDED", (0, 0))
    _decide.cache_clear()
    yield
    _decide.cache_clear()


# Parametrised cells that only `make test-all` runs, chosen by tools/slow_cells.py.
_SLOW_CELLS = frozenset((Path(__file__).parent / "slow_cells.txt").read_text(encoding="utf-8").splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in _SLOW_CELLS:
            item.add_marker(pytest.mark.slow)
