"""The platform over HTTP: one small versioned API for games, workers and the dashboard."""
