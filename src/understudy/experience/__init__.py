"""What travels: chunks of steps, the frames around them, and the game they belong to."""
