"""The config that an operation runs with, from everything in the metadata; and notes on what no operation here reads."""

from __future__ import annotations

from ...errors import ConfigError
from ...planning import OperationConfig, PlannedOperation
from ...planning.notes import note
from ...registry import OperationMetadata

__all__ = ["declared_config"]


def declared_config(
    operation: type[PlannedOperation], metadata: OperationMetadata, platform: str = ""
) -> tuple[OperationConfig, list[str]]:
    """(the config, notes): its own and that of the kernel that it runs, then metadata's block sizes where neither specifies one.

    On a platform where the operation runs another one's kernels, only that one's config counts.
    Errors: ConfigError if the two configs disagree, or a block size doesn't fit the others.
    """
    of_kernel = operation.config_elsewhere(platform)
    elsewhere = None if of_kernel is None else of_kernel.model_fields["operation"].default
    read = (operation.name, operation.backend_operation) if elsewhere is None else (elsewhere,)
    config = metadata.operation_configs.get(read[0])
    if config is None:
        config = (of_kernel or operation.config).coerce({})
    if elsewhere is None:
        config = _with_kernels(config, operation, metadata)
    config, notes = _fed(config, operation, metadata)
    reader = (
        operation.name if elsewhere is None else f"{operation.name} on {platform}, which runs {elsewhere}'s kernels"
    )
    for name, other in sorted(metadata.operation_configs.items()):
        if name not in read and (set_fields := _set_fields(other)):
            notes.append(note("config.other_unread", name=name, fields=set_fields, reader=reader))
    return config, notes


def _with_kernels(
    config: OperationConfig, operation: type[PlannedOperation], metadata: OperationMetadata
) -> OperationConfig:
    kernels = metadata.operation_configs.get(operation.backend_operation or "")
    if kernels is None:
        return config
    set_fields = _set_fields(kernels)
    for field in set_fields:
        declared, of_kernels = getattr(config, field), getattr(kernels, field)
        if config.is_set(field) and declared != of_kernels:
            raise ConfigError(
                f"operation_configs: {operation.name!r} has {field}={declared!r} and {kernels.operation!r}, whose kernel it "
                f"runs, {field}={of_kernels!r}; make them agree, or leave {field} out of one."
            )
    try:
        return config.with_fields({field: getattr(kernels, field) for field in set_fields})
    except ConfigError as error:
        raise ConfigError(
            f"operation_configs: {operation.name!r} and {kernels.operation!r}, whose kernel it runs, together: {error}"
        ) from None


def _fed(
    config: OperationConfig, operation: type[PlannedOperation], metadata: OperationMetadata
) -> tuple[OperationConfig, list[str]]:
    fed, notes = {}, list[str]()
    for source in ("blocksize_q", "blocksize_k", "blocksize_b"):
        value = getattr(metadata, source)
        if value is None:
            continue
        field = config.feeds.get(source)
        if field is None:
            notes.append(note("config.feed_unread", source=source, value=value, operation=operation.name))
        elif config.is_set(field):
            notes.append(
                note("config.feed_gives_way", source=source, value=value, field=field, declared=getattr(config, field))
            )
        else:
            fed[field] = value
            notes.append(note("config.feed_taken", source=source, value=value, field=field))
    try:
        return (config.with_fields(fed) if fed else config), notes
    except ConfigError as error:
        sources = ", ".join(
            f"{s}={getattr(metadata, s)}" for s in ("blocksize_q", "blocksize_k") if getattr(metadata, s)
        )
        raise ConfigError(f"{sources} can't feed the config of {operation.name}: {error}") from None


def _set_fields(config: OperationConfig) -> list[str]:
    return sorted(config.model_fields_set - {"operation", "schema_version"})
