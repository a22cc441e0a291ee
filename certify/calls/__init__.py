"""Certificates of calls that aren't softmax attention of query, key and value: pages, latents, selections, recurrences."""

from .case import CallCase
from .family import CallFamily
from .kinds import KINDS, every_kind, kind_of
from .runner import CallRunner

__all__ = ["KINDS", "CallCase", "CallFamily", "CallRunner", "every_kind", "kind_of"]
