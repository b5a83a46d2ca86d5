"""Stored data in and out: Parquet, Minari, and the records of the original pipeline."""
