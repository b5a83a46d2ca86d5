"""Engines: what starts roles and lets them work together."""
