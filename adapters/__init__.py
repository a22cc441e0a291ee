"""Front doors of other libraries, one file each: flax_nnx, flax_linen, equinox, torch. Nothing is imported until asked for.

Import the file that you need (`from attnops.adapters.flax_nnx import attention_fn`); each needs its framework, an extra.
"""
