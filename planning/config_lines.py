"""The fields of a config as text, each with where its value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .operation_config import OperationConfig

__all__ = ["ConfigLine", "config_lines"]


class ConfigLine(str):
    """`block_q=512 (declared)`. origin: 'declared', 'tuned' or 'default'."""

    origin: str


def config_lines(
    config: OperationConfig, declared: OperationConfig, tuned: Mapping[str, object] = MappingProxyType({})
) -> list[ConfigLine]:
    """A line for every field of a resolved config: declared fields first, then tuned ones."""

    def origin(name: str) -> str:
        return "declared" if declared.is_set(name) else "tuned" if name in tuned else "default"

    fields = [name for name in type(config).model_fields if name not in ("operation", "schema_version")]
    lines = []
    for name in sorted(fields, key=lambda name: (not declared.is_set(name), name not in tuned)):
        line = ConfigLine(f"{name}={getattr(config, name)} ({origin(name)})")
        line.origin = origin(name)
        lines.append(line)
    return lines
