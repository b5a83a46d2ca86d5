"""What an import is handed: chunks of one game from a file, read twice — once to judge all of it, once to send it."""

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from understudy.app.exchange.history import OnSteps, noise_of
from understudy.core.chunk import Chunk, read_meta
from understudy.core.errors import ConfigError, Refused
from understudy.core.frame import MAX_BODY_BYTES
from understudy.core.game import GameSpec
from understudy.core.names import PlayerName, new_session
from understudy.core.session import MAX_REPORT_AHEAD
from understudy.ingest.check import check_against_spec

MAX_GAPS = 1000
"""Gaps in a session's numbers that one drop report can tell."""


class Incoming(Protocol):
    """A file of one game's steps."""

    @property
    def name(self) -> str:
        """The file, for messages."""
        ...

    @property
    def spec(self) -> GameSpec: ...

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        """Every chunk with whose it is, where the file tells; ConfigError where the file is bad. Asked for twice.

        A session's chunks come one behind the other, in order; only the random part of its id is kept.
        """
        ...

    @property
    def origins(self) -> Mapping[int, int]:
        """The random part of a session's id to that of the session it was exported from, where they differ."""
        ...

    def report(self) -> Mapping[str, Any]:
        """What else was found, complete once `chunks` was read to its end."""
        ...


@dataclass(slots=True)
class Outline:
    """A session as a file holds it."""

    origin: uuid.UUID
    player: PlayerName | None
    chunks: int = 0
    steps: int = 0
    last_no: int = -1
    end_step: int = 0
    missing: list[tuple[int, int]] = field(default_factory=list)
    missing_steps: int = 0

    def add(self, chunk: Chunk) -> None:
        """Take in the session's next chunk; Refused when its numbers contradict those before it."""
        meta = chunk.meta
        if meta.chunk_no <= self.last_no or meta.first_step < self.end_step:
            raise Refused("step_mismatch", f"chunk {meta.chunk_no} is out of order, or comes twice")
        skipped = meta.first_step - self.end_step
        if meta.chunk_no > self.last_no + 1:
            self.missing.append((self.last_no + 1, meta.chunk_no - 1))
        elif skipped:
            raise Refused(
                "step_mismatch", f"chunk {meta.chunk_no} begins {skipped} steps after the one before it ended"
            )
        if self.missing and meta.chunk_no >= MAX_REPORT_AHEAD - 1:
            raise Refused("too_many_gaps", f"chunk {meta.chunk_no} is too far on for a session with gaps")
        if len(self.missing) > MAX_GAPS:
            raise Refused("too_many_gaps", f"the session has more than {MAX_GAPS} gaps; export it without a filter")
        self.chunks, self.steps, self.missing_steps = (
            self.chunks + 1,
            self.steps + meta.n_steps,
            self.missing_steps + skipped,
        )
        self.last_no, self.end_step = meta.chunk_no, meta.first_step + meta.n_steps

    def is_like(self, other: "Outline") -> bool:
        """Whether another file holds the same steps of the session, by their numbers."""
        return (self.steps, self.end_step, self.missing) == (other.steps, other.end_step, other.missing)


def survey(incoming: Incoming, on_steps: OnSteps | None = None) -> dict[int, Outline]:
    """Read all of a file and judge it as ingest will; its sessions by the random part of their ids.

    ConfigError names the first thing that is wrong, before anything was stored. `on_steps` hears of no total.
    """
    n_steps = 0
    outlines: dict[int, Outline] = {}
    for chunk, player in incoming.chunks():
        noise = noise_of(chunk.meta.session)
        outline = outlines.setdefault(noise, Outline(chunk.meta.session, player))
        try:
            if chunk.meta.session.version != 7:
                raise Refused("bad_session", "the session's id is no UUIDv7")
            read_meta(chunk.meta.to_metadata())
            check_against_spec(chunk.validate(), incoming.spec)
            if chunk.size_bytes > MAX_BODY_BYTES // 2:
                chunk.frame()  # which refuses what is too large, once its images are compressed
            outline.add(chunk)
        except Refused as refused:
            where = f"session {chunk.meta.session}, step {chunk.meta.first_step}"
            raise ConfigError(f"{incoming.name} holds steps that may not be stored: {refused} ({where})") from None
        n_steps += chunk.meta.n_steps
        if on_steps is not None:
            on_steps(n_steps, 0)
    if not outlines:
        raise ConfigError(f"{incoming.name} holds no steps; give a file with some")
    return outlines


def session_of(*parts: bytes | str) -> uuid.UUID:
    """A session id whose random part is made of the content it stands for, without a time."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return new_session(0.0, digest.digest())


def with_session(chunk: Chunk, session: uuid.UUID) -> Chunk:
    """The same chunk in another session."""
    return Chunk(replace(chunk.meta, session=session), chunk.columns)


def same_spec(all_: Sequence[Incoming]) -> GameSpec:
    """The spec that all files share; ConfigError when they differ."""
    first, *others = all_
    for other in others:
        if other.spec.schema != first.spec.schema:
            raise ConfigError(
                f"{first.name} and {other.name} are of different games or schemas; import them one by one"
            )
    return first.spec
