"""Experience into weights."""
