"""Export and import of stored data: Parquet, Minari, and the original pipeline's records."""
