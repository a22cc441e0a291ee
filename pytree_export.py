"""How jax.export writes the package's pytrees: each type by a stable name, its static data as JSON.

Registering costs nothing worth mentioning: jax loads its export modules anyway, and needs flatbuffers only to serialise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from jax import export

__all__ = ["exported", "exported_tuple"]

_Class = TypeVar("_Class")


def exported(
    write: Callable[[Any], Any] = list, read: Callable[[Any], Any] = tuple
) -> Callable[[type[_Class]], type[_Class]]:
    """Register a pytree class for serialisation as 'attnops.' and its name.

    write: its static data as JSON values; read: the inverse. By default the data is a tuple of JSON values. The name and the
    form are part of files that users keep: they must not change.
    """

    def register(kind: type[_Class]) -> type[_Class]:
        export.register_pytree_node_serialization(
            kind,
            serialized_name=f"attnops.{kind.__name__}",
            serialize_auxdata=lambda data: json.dumps(write(data), allow_nan=False).encode(),
            deserialize_auxdata=lambda text: read(json.loads(bytes(text))),
        )
        return kind

    return register


def exported_tuple(kind: type[_Class]) -> type[_Class]:
    """The same for a named tuple."""
    return export.register_namedtuple_serialization(kind, serialized_name=f"attnops.{kind.__name__}")
