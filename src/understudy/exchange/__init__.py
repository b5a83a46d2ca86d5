"""Export to Parquet and Minari; import from them, and of the original pipeline's records."""
