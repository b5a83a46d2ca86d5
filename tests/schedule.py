"""Which tests run together in one worker of pytest-xdist, and which of them start first.

A file is a unit of work, so that its fixtures are set up once. Files that share servers or a
browser are one unit. (`--dist loadgroup` has no effect with pytest 9.2:
pytest-dev/pytest-xdist#1386.)
"""

from typing import Any

TOGETHER = {
    # One browser at a time: the clock drives a match, also on a small machine.
    "tests/browser/": "browser",
    # Each server is started once by the worker whose tests use it most, and may be killed there.
    "tests/integration/test_spark": "spark",
    "tests/integration/test_registry_away.py": "spark",
    "tests/integration/test_cassandra": "cassandra",
    "tests/integration/test_learner_window.py": "cassandra",
    "tests/integration/test_kafka": "kafka",
    "tests/integration/test_stream_elsewhere.py": "kafka",
    "tests/integration/test_exchange.py": "kafka",
    "tests/integration/test_kinesis": "kinesis",
    "tests/integration/test_s3": "kinesis",
    # A Ray of one test would count as a leftover of another one.
    "tests/integration/test_ray": "ray",
    "tests/integration/test_tune_engines.py": "ray",
}
"""Units of several files, by the prefix of a path."""

LONGEST_FIRST = (
    "tests/browser/",
    "tests/e2e/",
    "tests/bench/",
    # These fork hundreds of times; each fork copies the page tables of all compiled programs.
    "tests/stores/",
    "tests/client/",
    "tests/models/",
    "tests/learning/",
    "tests/faults/",
    "tests/cli/",
    "tests/docs/",
    "tests/training/",
    "tests/release/",
    "tests/platform/",
    "tests/exchange/",
    "tests/simulation/",
    "tests/learn/",
    "tests/serve/",
    "tests/clients/",
    "tests/integration/test_spark",
    "tests/integration/test_registry_away.py",
    "tests/integration/test_cassandra",
    "tests/integration/test_learner_window.py",
    "tests/integration/test_ray",
    "tests/integration/test_tune_engines.py",
    "tests/integration/test_loop.py",
    "tests/integration/test_pipeline.py",
)
"""Units that take minutes start first, so that no worker runs one alone at the end."""


def unit(nodeid: str) -> str:
    """The unit of work of a test: the one that its file shares with others, or else its file."""
    shared = (name for prefix, name in TOGETHER.items() if nodeid.startswith(prefix))
    return next(shared, nodeid.partition("::")[0])


def rank(nodeid: str) -> int:
    """The position of a test's unit in the start order."""
    ranks = (rank for rank, prefix in enumerate(LONGEST_FIRST) if nodeid.startswith(prefix))
    return next(ranks, len(LONGEST_FIRST))


def by_work_unit(config: Any, log: Any) -> Any:
    """A pytest-xdist scheduler that assigns units in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWorkUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False
    return ByWorkUnit(config, log)
