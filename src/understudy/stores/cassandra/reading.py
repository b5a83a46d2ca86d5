"""Reading commits back, in order."""

from collections.abc import Iterator

from understudy.stores.cassandra.facts import Commit, Tag, read_facts
from understudy.stores.cassandra.tables import COMMIT_BUCKET
from understudy.stores.cassandra.wire import Row, Statement, Wire

_COMMITS = (
    "SELECT partition, commit_no, attempt, events, at_s, before, facts FROM commits "
    "WHERE partition = ? AND bucket = ? AND commit_no > ? AND commit_no <= ? LIMIT ?"
)
PAGE = 32


def select(wire: Wire, partition: str, after: int, up_to: int, *, limit: int = PAGE) -> Statement:
    """The commits behind a number, as far as they lie beside one another."""
    bucket = (after + 1) >> COMMIT_BUCKET
    return wire.bind(_COMMITS, partition, bucket, after, up_to, limit)


def commit_of(row: Row) -> Commit:
    return Commit(
        Tag(row.partition, row.commit_no, row.attempt), row.events, row.at_s, row.before, read_facts(row.facts)
    )


def commits_between(wire: Wire, partition: str, after: int, up_to: int) -> Iterator[Commit]:
    """Every commit behind a number up to one that is committed; those that are gone are passed over."""
    first, last = (after + 1) >> COMMIT_BUCKET, up_to >> COMMIT_BUCKET
    for bucket in range(first, last + 1):
        at = after
        while rows := wire.all([wire.bind(_COMMITS, partition, bucket, at, up_to, PAGE)])[0]:
            yield from map(commit_of, rows)
            at = rows[-1].commit_no
            if len(rows) < PAGE:
                break
