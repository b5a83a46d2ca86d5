"""Tuning: searches the settings of a training for the best ones."""
