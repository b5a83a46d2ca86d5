"""Export and import of Parquet and Minari; import of the original pipeline's records."""
