"""Weights into signed bots: a registry on any object store, and the gate in front of it."""
