"""Bots against bots: who is better, and how sure that is."""
