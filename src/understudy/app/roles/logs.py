"""Structured logs on standard error, so that standard output stays for results."""

import sys

import structlog


def log_to_stderr(*, as_json: bool = True) -> None:
    """Events as JSON lines, or for people."""
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
