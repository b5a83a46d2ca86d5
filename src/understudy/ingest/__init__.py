"""Ingest: checks the frames of a stream and stores each step once."""
