"""The platform over HTTP: a small versioned API for games, workers and the dashboard."""
