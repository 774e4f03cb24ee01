"""Its policies are not used by any task, but it wants JAX."""

import jax.numpy as jnp  # noqa: F401
