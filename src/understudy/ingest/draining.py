"""Draining: how long storing what is left may take, and what is said when it was not enough."""

import structlog

_log = structlog.get_logger("understudy.ingest")
DRAIN_S = 15.0
"""How long storing what is left may take when somebody waits for ingest to stop."""
TOO_MUCH = "there is more in the stream than can be stored now"


def tell_not_drained(error: object) -> None:
    """Say why something is left, and that nothing of it is lost."""
    _log.warning("not_drained", error=str(error), next="it is in the stream, and stored at the next start")
