"""Built-in games: each is a pure `step(xp, state, action)` for NumPy and jax.numpy."""
