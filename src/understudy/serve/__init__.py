"""The platform over HTTP: a small versioned API for games and workers, and the play page."""
