"""jax.nn's attention on raw arrays."""
