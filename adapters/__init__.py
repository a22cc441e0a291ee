"""Adapters to other libraries, one file each: jax_nn, tokamax, flax_nnx, flax_linen, equinox, keras, easydel, torch,
transformers, diffusers; ragged_paged for serving engines with their own page cache. dispatch is for code bases with their own
dispatcher.

None is imported automatically: import the one you need (`from attnops.adapters.flax_nnx import attention_fn`). All except
jax_nn, tokamax, ragged_paged and dispatch require their framework, which is an extra.
"""
