"""Re-readable logs of frames."""
