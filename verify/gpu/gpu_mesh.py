"""A mesh of NVIDIA GPUs that aren't here, described to jax's CUDA plugin: enough to plan, lower and compile for them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from ...devices import gpu_specs
from ...distribution import with_extras
from ...errors import ConfigError, first_line
from ..arranged import arranged
from .gpu_target import gpu_target
from .target_config import target_config

__all__ = ["described_gpus", "has_cuda_plugin"]

_PLUGINS = ("xla_cuda13", "xla_cuda12")
_loading = threading.Lock()


def has_cuda_plugin() -> bool:
    """Whether programs can be compiled for described GPUs."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.{name}") is not None for name in _PLUGINS)


def described_gpus(target: str, sizes: Mapping[str, int] | None = None) -> Mesh:
    """Return a mesh over the GPUs of a target such as 'h100:8'; by default one axis 'fsdp' of all of them.

    Requires jax's CUDA plugin and JAX_PLATFORMS=cpu, but no GPU. Errors: ConfigError if the plugin is missing or doesn't load,
    or for an unknown target; ShardingError when the sizes don't multiply to the number of GPUs.
    """
    gpus = gpu_target(target)
    if not has_cuda_plugin():
        raise ConfigError(
            f"target {target} needs jax's CUDA plugin, which isn't installed; pip install '{with_extras('cuda-compile')}'."
        )
    from jax.experimental import topologies

    try:
        with _loading:
            described = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"1x{gpus.hosts}x{gpus.gpus}",
                target_config=target_config(gpu_specs()[gpus.name]),
            )
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"target {target}: jax's CUDA plugin doesn't load or doesn't accept the description ({first_line(error)}); on a "
            "machine without a GPU set JAX_PLATFORMS=cpu, and install the plugin version that matches jax "
            f"{jax.__version__}."
        ) from None
    return arranged(list(described.devices), sizes, target)
