"""Training runs: settings, folders, engines, evaluation."""
