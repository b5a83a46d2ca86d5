"""What a store finds when it is opened: commits that were not sealed yet, and leftovers to remove."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from understudy.core.log import LogReader, remove
from understudy.stores.catalogue import Catalogue
from understudy.stores.commits import Trailer, Watermark, commit_parts, commits_in, damage, log_numbers, log_path


@dataclass(slots=True)
class Recovered:
    """Where the log stands; `entries` gives its commits once each, in order, with damage made visible."""

    folder: Path
    first_commit: int
    first_arrival: int
    next_file: int
    old_files: list[int]
    """Every log file there is; to be removed once their commits are in a new one and readers know."""
    floor: int
    """Files below this were sealed."""
    promised_arrival: int
    """The arrival number that readers were told comes next."""
    at_s: float

    def entries(self) -> Iterator[list[bytes]]:
        """Log payloads in the order of arrival; numbers that can no longer be read become a `damaged` event."""
        number, arrival = self.first_commit, self.first_arrival
        for file in self.old_files:
            if file < self.floor:
                continue
            with LogReader(log_path(self.folder, file)) as reader:
                for commit in commits_in(reader):
                    trailer = commit.trailer
                    if trailer.number < number:
                        continue  # a crash while a log was copied leaves commits twice
                    if trailer.number > number:
                        yield self._damage(number, arrival, trailer.first_arrival)
                    yield [commit.entry.payload]
                    number, arrival = trailer.number + 1, trailer.first_arrival + trailer.n_arrivals
        if self.promised_arrival > arrival:
            yield self._damage(number, arrival, self.promised_arrival)

    def _damage(self, number: int, first: int, following: int) -> list[bytes]:
        event = damage(first, following, at_s=self.at_s)
        return commit_parts(Trailer(number=number, first_arrival=first, event=event), [])


def recover(folder: Path, catalogue: Catalogue, mark: Watermark | None, *, now_s: float) -> Recovered:
    """Remove segments that a crash left unregistered, and find the commits that are not sealed."""
    registered = {row[0] for row in catalogue.rows("SELECT id FROM segments")}
    for path in (folder / "segments").iterdir():
        if path.suffix == ".tmp" or int(path.stem) not in registered:
            remove(path)
    floor, numbers = catalogue.fact("log_floor"), log_numbers(folder)
    return Recovered(
        folder=folder,
        first_commit=catalogue.fact("next_commit", 1),
        first_arrival=catalogue.fact("sealed_below", 1),
        next_file=max([floor, *numbers], default=0) + 1,
        old_files=numbers,
        floor=floor,
        promised_arrival=mark.next_arrival if mark is not None else 0,
        at_s=now_s,
    )
