"""Front doors of other libraries, one file each: jax_nn, flax_nnx, flax_linen, equinox, keras, easydel, torch, transformers,
diffusers; dispatch is for code bases with a dispatcher of their own.

None is imported until asked for: import the file that you need (`from attnops.adapters.flax_nnx import attention_fn`). Each but
jax_nn and dispatch needs its framework, an extra.
"""
