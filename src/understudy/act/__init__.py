"""A game and weights turned into experience: actors, their envs, and how they explore."""
