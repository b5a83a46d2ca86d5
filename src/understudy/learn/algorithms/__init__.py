"""Algorithms, one file each: pure functions that implement the port in `algorithm.py`."""
