"""The platform's roles as processes: config, supervision, status, backup."""
