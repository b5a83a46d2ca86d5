"""The quarantine table: frames that may not be stored, with their bytes."""

import uuid
from collections.abc import Iterator

from understudy.core.ports import Quarantined
from understudy.stores.cassandra.facts import Tag
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.rows import released_row
from understudy.stores.cassandra.tags import Tags
from understudy.stores.cassandra.wire import Row, Wire

_BUCKETS = "SELECT name, number FROM registry WHERE kind = 'quarantine'"
_PAGE = "SELECT * FROM quarantine WHERE bucket = ? AND id > ? LIMIT ?"
_FACTS = (
    "SELECT id, parked, received_s, session, chunk_no, crc, player, events, partition, commit_no, attempt "
    "FROM quarantine WHERE bucket = ?"
)
_ROWS = 64


class Quarantine:
    """Lists and empties it; it is filled by commits."""

    def __init__(self, wire: Wire, journal: Journal, tags: Tags) -> None:
        self._wire, self._journal, self._tags = wire, journal, tags

    def page(self, *, after_id: int, limit: int) -> list[Quarantined]:
        """Frames in quarantine by id, without those that were stored since or whose bytes are gone."""
        self._journal.refresh()
        found: list[Quarantined] = []
        for bucket in self._buckets():
            at = after_id
            while len(found) < limit:
                rows = self._wire.all([self._wire.bind(_PAGE, bucket, at, _ROWS)])[0]
                found += [_quarantined(row) for row in self._counting(rows) if row.raw is not None]
                if len(rows) < _ROWS:
                    break
                at = rows[-1].id
        return found[:limit]

    def facts(self) -> Iterator[Row]:
        """What counts of every frame in quarantine, without its bytes."""
        for bucket in self._buckets():
            yield from self._counting(list(self._wire.scan(self._wire.bind(_FACTS, bucket))))

    def _buckets(self) -> list[int]:
        return sorted(row.number for row in self._wire.scan(self._wire.bind(_BUCKETS)))

    def _counting(self, rows: list[Row]) -> list[Row]:
        """Those rows that a commit made count, that were not stored since and belong to nobody who was forgotten."""
        rows = [row for row in rows if row.partition is not None and row.id not in self._journal.replayed]
        rows = [row for row in rows if row.events >= self._journal.forgets.get(row.player, (0, 0.0))[0]]
        committed = self._tags.committed(_tag(row) for row in rows)
        return [row for row in rows if _tag(row) in committed]

    def erase_player(self, player: bytes, stamp: int, at_s: float) -> None:
        """Delete a player's frames, also those whose damaged header names nobody but that carry the pseudonym."""
        for bucket in self._buckets():
            at = -1
            while rows := self._wire.all([self._wire.bind(_PAGE, bucket, at, _ROWS)])[0]:
                at = rows[-1].id
                out = [
                    row.id
                    for row in rows
                    if (row.player == player or player in (row.raw or b"")) and (row.received_s or 0.0) <= at_s
                ]
                self._wire.all([released_row(self._wire, number, stamp) for number in out])

    def expire(self, since_s: float, before_s: float, stamp: int) -> None:
        """Delete the bytes of frames received before a time; that they were there stays known."""
        for bucket in self._buckets():
            rows = self._wire.scan(self._wire.bind(_FACTS, bucket))
            self._wire.all([
                self._wire.bind("DELETE raw FROM quarantine USING TIMESTAMP ? WHERE bucket = ? AND id = ?",
                                stamp, bucket, row.id)
                for row in rows
                if row.received_s is not None and since_s <= row.received_s < before_s
            ])  # fmt: skip


def _tag(row: Row) -> Tag:
    return Tag(row.partition, row.commit_no, row.attempt)


def _quarantined(row: Row) -> Quarantined:
    has_session = any(row.session)
    return Quarantined(
        id=row.id, reason=row.reason, detail=row.detail, parked=row.parked, received_s=row.received_s, game=row.game,
        session=uuid.UUID(bytes=row.session) if has_session else None, chunk_no=row.chunk_no if has_session else None,
        crc=row.crc, raw=row.raw,
    )  # fmt: skip
