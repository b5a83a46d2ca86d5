"""Games in the box: each a pure `step(xp, state, action)` that runs with NumPy and with
jax.numpy."""
