"""unread_fields: the declared fields of a metadata that only attention reads."""

from __future__ import annotations

from ...planning import Policy
from ...registry import OperationMetadata

__all__ = ["unread_fields"]

_FIELDS = ("runtime_dtype", "runtime_softmax_dtype", "dropout_prob")


def unread_fields(metadata: OperationMetadata, policy: tuple[str, ...]) -> list[str]:
    """Those that an operation that doesn't attend leaves unread, and of the `policy` those that aren't its defaults."""
    plain, default = OperationMetadata(), Policy()
    changed = [name for name in _FIELDS if getattr(metadata, name) != getattr(plain, name)]
    return changed + [name for name in policy if getattr(metadata.policy, name) != getattr(default, name)]
