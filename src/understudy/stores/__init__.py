"""Durable experience."""
