"""Actors and their envs: play a game with a policy to collect experience."""
