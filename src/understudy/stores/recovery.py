"""What a store finds when it is opened: commits that were not sealed yet, and leftovers to remove."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import Corrupt
from understudy.core.log import Entry, LogReader, remove
from understudy.stores.catalogue import Catalogue
from understudy.stores.commits import Commit, Event, Trailer, Watermark, commit_parts, log_numbers, log_path, read_commit


@dataclass(slots=True)
class Recovered:
    """Where the log stands; `entries` gives its commits once each, in order, with damage made visible."""

    folder: Path
    first_commit: int
    first_arrival: int
    next_file: int
    old_files: list[int]
    promised_arrival: int
    """The arrival number that readers were told comes next."""
    at_s: float

    def entries(self) -> Iterator[list[bytes]]:
        """Log payloads in the order of arrival; numbers that can no longer be read become one `damaged` event."""
        number, arrival = self.first_commit, self.first_arrival
        for file in self.old_files:
            with LogReader(log_path(self.folder, file)) as reader:
                for commit in _commits(reader):
                    trailer = commit.trailer
                    if trailer.number < number:
                        continue  # a crash while a log was copied leaves commits twice
                    if trailer.first_arrival > arrival:
                        yield self._damage(number, arrival, trailer.first_arrival, reader.path.name)
                    yield [commit.entry.payload]
                    number, arrival = trailer.number + 1, trailer.first_arrival + trailer.n_arrivals
        if self.promised_arrival > arrival:
            yield self._damage(number, arrival, self.promised_arrival, "the log's end")

    def _damage(self, number: int, first: int, following: int, where: str) -> list[bytes]:
        event = Event(kind="damaged", at_s=self.at_s, count=following - first, reason=where)
        return commit_parts(Trailer(number=number, first_arrival=first, event=event), [])


def _commits(reader: LogReader) -> Iterator[Commit]:
    at = 0
    while True:
        entry: Entry | None = reader.at(at)
        if entry is None:
            following = reader.next_readable(at) if at < reader.size_bytes else None
            if following is None:
                return
            at = following
            continue
        at = entry.end
        try:
            yield read_commit(entry)
        except Corrupt:
            continue


def recover(folder: Path, catalogue: Catalogue, mark: Watermark | None, *, now_s: float) -> Recovered:
    """Remove what a crash left half done, and find the commits that are not sealed."""
    floor, sealed_below = catalogue.fact("log_floor"), catalogue.fact("sealed_below", 1)
    numbers = log_numbers(folder)
    for number in numbers:
        if number < floor:
            remove(log_path(folder, number))
    registered = {row[0] for row in catalogue.rows("SELECT id FROM segments")}
    for path in (folder / "segments").iterdir():
        if path.suffix == ".tmp" or int(path.stem) not in registered:
            remove(path)
    return Recovered(
        folder=folder,
        first_commit=catalogue.fact("next_commit", 1),
        first_arrival=sealed_below,
        next_file=max([floor, *numbers], default=0) + 1,
        old_files=[number for number in numbers if number >= floor],
        promised_arrival=mark.next_arrival if mark is not None else 0,
        at_s=now_s,
    )
