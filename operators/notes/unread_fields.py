"""unread_fields: the declared fields of a metadata that only attention reads."""

from __future__ import annotations

from ...registry import OperationMetadata

__all__ = ["unread_fields"]

_FIELDS = ("runtime_dtype", "runtime_softmax_dtype", "dropout_prob")


def unread_fields(metadata: OperationMetadata, further: tuple[str, ...]) -> list[str]:
    """Those that an operation that doesn't attend leaves unread, and of the `further` fields those that aren't their defaults."""
    plain = OperationMetadata()
    return [name for name in (*_FIELDS, *further) if getattr(metadata, name) != getattr(plain, name)]
