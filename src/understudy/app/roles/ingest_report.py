"""What ingest reports of itself, whichever engine it is: for `status` and the metrics."""

from typing import Any

from understudy.ingest.writer import IngestStats


def report_of(stats: IngestStats, **more: Any) -> dict[str, Any]:
    """A report as JSON; `more`: what only one engine has to say."""
    return {
        "stored": stats.steps, "lag_s": round(stats.lag_s, 4), "fates": dict(stats.fates),
        "refusals": dict(stats.refusals), "storage_error": stats.trouble[:300], **more,
    }  # fmt: skip
