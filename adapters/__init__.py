"""Front doors of other libraries, one file each: jax_nn, flax_nnx, flax_linen, equinox, torch, transformers.

None is imported until asked for.
Import the file that you need (`from attnops.adapters.flax_nnx import attention_fn`); each but jax_nn needs its framework, an
extra.
"""
