"""Runs of `understudy train`: from a few words to a trained policy in a folder."""
