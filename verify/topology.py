"""A mesh of TPU devices that aren't here, described by libtpu: enough to plan, lower and compile for them."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from ..distribution import with_extras
from ..errors import ConfigError, nearest, shown
from .arranged import arranged
from .generations import has_libtpu

__all__ = ["TOPOLOGIES", "described_mesh"]

# Names known to work, for every generation that libtpu describes; larger ones have the same form.
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5e:4x4", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")

# Without these libtpu asks the cloud's metadata server where it runs, and locks out other processes.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# libtpu's own form. It reads '' as a topology of its choice, and a size of 0 kills the process (SIGFPE, libtpu 0.0.51).
_FORM = re.compile(r"[A-Za-z0-9_ ]+[=_:]([1-9][0-9]*(?:x[1-9][0-9]*)*)(?:_twisted|_untwisted)?")
_MAX_CHIPS = 2**16  # seven times the largest pod; each device is an object
# If two threads asked first at the same time, both would load libtpu, and one would fail.
_loading = threading.Lock()


def described_mesh(topology: str, sizes: Mapping[str, int] | None = None) -> Mesh:
    """Return a mesh over the devices of a TPU topology such as 'v5e:2x2'; by default one axis 'fsdp' of all of them.

    Requires libtpu but no TPU, and works with JAX_PLATFORMS=cpu. Errors: ConfigError without libtpu or for a name that libtpu
    doesn't know; ShardingError when the sizes don't multiply to the number of devices.
    """
    if not has_libtpu():
        raise ConfigError(
            f"topology {shown(topology)} needs libtpu, which isn't installed; pip install '{with_extras('tpu')}'."
        )
    _check_form(topology)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        with _loading:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        names = ", ".join(TOPOLOGIES)
        raise ConfigError(
            f"topology {shown(topology)} is not known to libtpu ({reason}); names that work: {names}."
            + nearest(topology, TOPOLOGIES)
        ) from None
    return arranged(list(devices), sizes, f"topology {topology}")


def _check_form(topology: str) -> None:
    match = _FORM.fullmatch(topology)
    if match is None or math.prod(int(size[:9]) for size in match[1].split("x")) > _MAX_CHIPS:
        raise ConfigError(
            f"topology {shown(topology)}; wanted a generation and sizes from 1 on, of at most {_MAX_CHIPS} chips; names that "
            f"work: {', '.join(TOPOLOGIES)}." + nearest(topology, TOPOLOGIES)
        )
