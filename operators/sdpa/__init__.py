"""sdpa: jax.nn.dot_product_attention; cuDNN on CUDA."""

from .operation import ScaledDotProduct, SdpaConfig

__all__ = ["ScaledDotProduct", "SdpaConfig"]
