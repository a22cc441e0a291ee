"""torch and torchax tensors to arrays and back: as NumPy's on a CPU, through DLPack elsewhere, torchax's as what they are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..errors import ConfigError, InputTypeError
from ..operators.api.attention import Attention

__all__ = ["Padding", "check_tensor", "dropout_key", "is_torchax", "to_jax", "to_torch"]

# For tensors by name: a dimension, counted from the end, and how many zeros to add there.
Padding = Mapping[str, tuple[int, int]]
_NONE: Padding = MappingProxyType({})
_FEW_BYTES = 2**16  # NumPy's copy of as many takes less time than the overhead of DLPack and of torch's functions


def check_tensor(name: str, x: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse what JAX can't accept. Errors: InputTypeError for a kind of tensor or a dtype."""
    if not is_torchax(x) and (type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided):
        raise InputTypeError(
            f"{name} is a {type(x).__module__}.{type(x).__qualname__}; wanted a plain dense torch.Tensor, or one of "
            "torchax. (DLPack can't pass a subclass that wraps something else to JAX.)"
        )
    if x.dtype not in dtypes:
        raise InputTypeError(f"{name} is {x.dtype}; wanted one of {', '.join(map(str, dtypes))}: cast it.")


def dropout_key(query: torch.Tensor) -> Any:
    """A key of jax.random, derived from torch.manual_seed for plain tensors and from the environment for torchax's."""
    if not is_torchax(query):
        return np.asarray(torch.randint(2**32, (2,), dtype=torch.int64), np.uint32)
    import torchax

    return torchax.default_env().get_and_rotate_prng_key()


def to_jax(
    attention: Attention, tensors: dict[str, torch.Tensor], padding: Padding = _NONE
) -> tuple[dict[str, Any], Any]:
    """(the tensors as arrays where the operation runs, where they came from: None for torchax's, which take no padding)."""
    if all(map(is_torchax, tensors.values())):
        from torchax import interop

        return {name: interop.jax_view(x) for name, x in tensors.items()}, None
    if any(map(is_torchax, tensors.values())):
        kinds = ", ".join(f"{name} {'torchax' if is_torchax(x) else 'plain'}" for name, x in tensors.items())
        raise InputTypeError(f"tensors of two kinds: {kinds}; move all of them to torchax with x.to('jax'), or none.")
    mesh = attention.operation.metadata.declared_mesh
    where = NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else jax.local_devices()[0]
    arrays = {name: _array(x, padding.get(name)) for name, x in tensors.items()}
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(
            "the declared mesh has no devices, so torch tensors can't run on it; declare a Mesh of devices."
        )
    first = next(iter(arrays.values()))
    home = first.sharding if isinstance(first, jax.Array) else SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    if mesh is None and all(isinstance(x, np.ndarray) or x.device is where for x in arrays.values()):
        return arrays, home
    return {name: jax.device_put(x, where) for name, x in arrays.items()}, home


def to_torch(x: jax.Array, home: Any) -> torch.Tensor:
    """An array as a tensor of the kind and on the device that `to_jax` returned."""
    if home is None:
        from torchax import interop

        return interop.torch_view(x)
    x = x if x.sharding == home else jax.device_put(x, home)
    if x.nbytes <= _FEW_BYTES and all(device.platform == "cpu" for device in home.device_set):
        return _tensor(np.array(x))
    # Wait: torch may change in place what JAX is still reading.
    return torch.utils.dlpack.from_dlpack(jax.block_until_ready(x))


def _array(x: torch.Tensor, padding: tuple[int, int] | None) -> Any:
    """An array over a tensor's memory, or of a copy with zeros after its end. On a CPU it is NumPy's: a compiled call takes it
    as it is, in a tenth of DLPack's time."""
    x = x.detach()
    few = x.device.type == "cpu" and x.numel() * x.element_size() <= _FEW_BYTES
    if padding is not None and not few:
        dim, padded = padding
        x, padding = torch.nn.functional.pad(x, (*[0] * (-2 * dim - 1), padded)), None
    x = x.contiguous()
    if x.device.type != "cpu":
        return jnp.from_dlpack(x)
    x = x.resolve_neg()
    array = x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    return array if padding is None else _padded(array, *padding)


def _padded(x: np.ndarray, dim: int, more: int) -> np.ndarray:
    shape = list(x.shape)
    shape[dim] += more
    padded = np.zeros(shape, x.dtype)
    inside: tuple[Any, ...] = (..., slice(x.shape[dim]), *[slice(None)] * (-dim - 1))
    padded[inside] = x
    return padded


def _tensor(x: np.ndarray) -> torch.Tensor:
    """A tensor over an array's memory."""
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == jnp.bfloat16 else torch.from_numpy(x)


def is_torchax(x: Any) -> bool:
    """Found without an import: whoever has such a tensor has imported torchax."""
    return type(x).__module__ in ("torchax.tensor", "torchax.view")
