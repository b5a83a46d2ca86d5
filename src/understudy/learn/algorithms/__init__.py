"""Algorithms, one file each: pure functions behind the Algorithm port of `algorithm.py`."""
