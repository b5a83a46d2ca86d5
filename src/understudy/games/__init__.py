"""Built-in games: each has a pure `step(xp, state, ...)`, where `xp` is NumPy or jax.numpy."""
