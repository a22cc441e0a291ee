"""The kernels of each pass of splash, with the fields of the config that are their sizes."""

from __future__ import annotations

from ...planning import PassSizes
from .splash_config import SplashConfig

__all__ = ["splash_passes"]

# Products, the suffix of the blocks' fields, and how many products have the head dim, and how many the value dim.
_FORWARD = ("forward", "", 1, 1)
_FUSED = ("backward", "_dkv", 3, 2)
_APART = (("dkv", "_dkv", 2, 2), ("dq", "_dq", 2, 1))


def splash_passes(config: SplashConfig, backward: bool) -> tuple[PassSizes, ...]:
    """The kernels of the forward pass, or of the backward pass without it, by a resolved config.

    Only attnops' own kernels leave out parts of tiles, and have a name in a program by which their schedule is found.
    """
    own = config.kernel == "attnops"

    def kernel(products: str, suffix: str, head_dims: int, value_dims: int) -> PassSizes:
        block_q, block_kv, compute_q, compute_kv, ahead = (
            getattr(config, name, None)
            for name in (
                f"block_q{suffix}", f"block_kv{suffix}", f"block_q{suffix}_compute", f"block_kv{suffix}_compute",
                f"products_ahead{suffix}",
            )
        )  # fmt: skip
        sizes = PassSizes(products, block_q or 128, block_kv or 128, head_dims, value_dims)
        if not own:
            return sizes
        return sizes._replace(
            kernel=f"attnops_splash_{products}",
            compute_q=compute_q or block_q,
            compute_kv=compute_kv or block_kv,
            outer="kv" if products == "dkv" else "q",
            pipelined=bool(ahead) and products in ("forward", "backward"),
        )

    if not backward:
        return (kernel(*_FORWARD),)
    return (kernel(*_FUSED),) if config.use_fused_bwd_kernel else tuple(kernel(*one) for one in _APART)
