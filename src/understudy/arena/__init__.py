"""Bots against bots: which is better, and how certain that is."""
