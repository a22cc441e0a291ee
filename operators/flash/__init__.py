"""Flash attention for GPUs: its config, how its sizes are chosen, and a call through its kernels."""

from .flash_candidates import FLASH_SHIPPED, flash_candidates, flash_tuned_fields
from .flash_config import FlashAttention2Config
from .flash_rules import FLASH_FEATURES, FLASH_RULES
from .flash_sizes import resolve_flash, steps_note, unknown_gpu
from .run_flash import run_flash

__all__ = [
    "FLASH_FEATURES", "FLASH_RULES", "FLASH_SHIPPED", "FlashAttention2Config", "flash_candidates", "flash_tuned_fields",
    "resolve_flash", "run_flash", "steps_note", "unknown_gpu",
]  # fmt: skip
