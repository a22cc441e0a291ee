"""ring and ulysses: splash (on other platforms the native path) with a fixed strategy for a split sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from .splash.kernel_operation import KernelOperation
from .splash.splash_config import SplashConfig

__all__ = ["RingAttention", "RingConfig", "UlyssesAttention", "UlyssesConfig"]


class RingConfig(SplashConfig):
    """The splash kernel's config; see SplashConfig. What is declared for 'splash' applies too."""

    operation: Literal["ring"] = "ring"  # type: ignore[assignment]


class UlyssesConfig(SplashConfig):
    """The splash kernel's config; see SplashConfig. What is declared for 'splash' applies too."""

    operation: Literal["ulysses"] = "ulysses"  # type: ignore[assignment]


class RingAttention(KernelOperation):
    """Keys and values travel around the mesh axes that split the sequence; without such axes it is splash."""

    name = "ring"
    config = RingConfig
    sequence_parallel: ClassVar[str | None] = "ring"
    backend_operation: ClassVar[str | None] = "splash"


class UlyssesAttention(KernelOperation):
    """Heads are split instead of the sequence while attention runs; without such axes it is splash."""

    name = "ulysses"
    config = UlyssesConfig
    sequence_parallel: ClassVar[str | None] = "ulysses"
    backend_operation: ClassVar[str | None] = "splash"
