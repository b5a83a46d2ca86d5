"""The platform's roles as processes: configuration, supervision, status and backup."""
