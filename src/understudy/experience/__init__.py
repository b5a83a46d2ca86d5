"""Recorded experience: chunks of steps, the frames that carry them, and the game spec."""
