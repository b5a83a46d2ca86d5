"""Recorded data out of a store and into one: Parquet, Minari, and the records of the original pipeline."""
