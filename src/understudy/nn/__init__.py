"""Networks as data, and how they act in NumPy without JAX."""
