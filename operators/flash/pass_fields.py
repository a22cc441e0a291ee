"""Which fields of a FlashAttention2Config are the sizes of which pass."""

from __future__ import annotations

from .kernel.flash_sizes import TileSizes

__all__ = ["FIELDS"]

# The fields of TileSizes, as a config has them for each pass.
FIELDS: dict[str, tuple[str, ...]] = {
    name: tuple(f"{field}{suffix}" for field in TileSizes._fields)
    for name, suffix in (("forward", ""), ("dkv", "_dkv"), ("dq", "_dq"))
}
