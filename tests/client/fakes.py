"""Shared by the client tests: a fake clock, a link in memory, and a reader of what it received."""

import itertools
import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.client import ClientConfig, Game, connect
from understudy.client.sender import SenderConfig
from understudy.core.errors import LinkFailed
from understudy.core.names import PlayerName
from understudy.experience.chunk import Chunk, RowKind, chunk_of
from understudy.experience.frame import Frame, FrameKind, read_close, read_drop
from understudy.experience.game import GameSpec
from understudy.experience.ticket import TicketSeal
from understudy.models.trial import Trial, draw_tickets
from understudy.ports import Ack, Link, LiveModels, TicketBatch

SEAL = TicketSeal(bytes(32))


class FakeClock:
    """Advances only by `advance`; waiting returns at once."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s
        self.up_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.up_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.is_set()

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.up_s += seconds


class MemoryLink:
    """Stores the frames that it receives, in order; its attributes make the next sends fail."""

    address = "memory"

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.players: dict[uuid.UUID, PlayerName] = {}
        self.specs: list[GameSpec] = []
        self.n_sends = 0
        self.is_down = False
        self.loses_answers = 0
        self.refuses: Any = None
        self.retry_after_s: float | None = None
        self.is_closed = False
        self.recording_rate = 1.0
        self.skipped_steps = self.n_polls = 0
        self.live_models: LiveModels | None = None
        self.policies: dict[int, bytes] = {}
        self.trial: Trial | None = None
        self.n_ticket_requests = 0
        self.rng = random.Random(0)

    def register(self, spec: GameSpec) -> None:
        if self.is_down:
            raise ConnectionError("down")
        self.specs.append(spec)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        self.n_sends += 1
        assert len(frames) + skipped_steps > 0
        assert len(frames) <= 64
        if self.is_down:
            raise ConnectionError("down")
        if self.retry_after_s is not None:
            return [Ack(False, retry_after_s=self.retry_after_s)] * len(frames)
        refused = [self.refuses is not None and self.refuses(frame) for frame in frames]
        self.frames += [frame for frame, no in zip(frames, refused, strict=True) if not no]
        self.players |= players
        if self.loses_answers:
            self.loses_answers -= 1
            raise TimeoutError("the response got lost")
        self.skipped_steps += skipped_steps
        return [Ack(False, refused="not_today") if no else Ack(True) for no in refused]

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        self.n_polls += 1
        if self.is_down:
            raise LinkFailed("unreachable", "down")
        return (
            self.live_models
            if self.live_models is not None and self.live_models.number > after
            else None
        )

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        self.n_ticket_requests += 1
        if self.is_down:
            raise LinkFailed("unreachable", "down")
        return draw_tickets(
            self.trial, SEAL, n, now_s=1_800_000_000.0, rng=self.rng, with_control=with_control
        )

    def policy(self, model_no: int) -> bytes:
        return self.policies[model_no]

    def close(self) -> None:
        self.is_closed = True

    def by_session(self) -> dict[uuid.UUID, dict[int, Frame]]:
        """Return frames by session and number; a repeated number must have the same bytes."""
        by_session: dict[uuid.UUID, dict[int, Frame]] = defaultdict(dict)
        for frame in self.frames:
            known = by_session[frame.session].setdefault(frame.chunk_no, frame)
            assert known.encode() == frame.encode()
        return by_session


@dataclass(frozen=True)
class Transition:
    """(s, a, r, s', terminated, truncated) as bytes and numbers, so that equality is bitwise."""

    obs: tuple[bytes, ...]
    action: tuple[bytes, ...]
    reward: float
    next_obs: tuple[bytes, ...] | None
    terminated: bool
    truncated: bool


def as_bytes(arrays: Mapping[str, Any]) -> tuple[bytes, ...]:
    return tuple(np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays))


def walk(chunk: Chunk, *, padded_final: bool = False) -> Iterator[tuple[bool, Transition]]:
    """Yield each step of a chunk as (starts an episode, transition)."""
    columns = chunk.columns
    obs = {name: column for name, column in columns.items() if name.split(".")[0] == "obs"}
    action = {name: column for name, column in columns.items() if name.split(".")[0] == "action"}
    for at in np.flatnonzero(columns["row"] == RowKind.STEP):
        is_padded = padded_final and bool(columns["terminated"][at])
        yield (
            bool(columns["is_first"][at]),
            Transition(
                as_bytes({name: column[at] for name, column in obs.items()}),
                as_bytes({name: column[at] for name, column in action.items()}),
                float(columns["reward"][at]),
                None
                if is_padded
                else as_bytes({name: column[at + 1] for name, column in obs.items()}),
                bool(columns["terminated"][at]),
                bool(columns["truncated"][at]),
            ),
        )


def chunks(frames: Mapping[int, Frame]) -> list[Chunk]:
    """Return a session's chunks in order; checks that numbers and steps have only reported gaps."""
    dropped: set[int] = set()
    for frame in frames.values():
        if frame.kind is FrameKind.DROP:
            for first, last in read_drop(frame).ranges:
                dropped |= set(range(first, last + 1))
        if frame.kind is FrameKind.CLOSE:
            assert read_close(frame).n_chunks == max(frames) == frame.chunk_no
    assert set(range(max(frames) + 1)) - set(frames) <= dropped
    session_chunks = [
        chunk_of(frames[number])
        for number in sorted(frames)
        if frames[number].kind is FrameKind.DATA
    ]
    for before, after in itertools.pairwise(session_chunks):
        step = before.meta.first_step + before.meta.n_steps
        numbers = set(range(before.meta.chunk_no + 1, after.meta.chunk_no))
        assert after.meta.first_step == step or (numbers & dropped and after.meta.first_step > step)
    return session_chunks


def episodes(frames: Mapping[int, Frame], *, padded_final: bool = False) -> list[list[Transition]]:
    """Return the transitions of a session without losses, split into episodes."""
    split: list[list[Transition]] = []
    for chunk in chunks(frames):
        for starts, transition in walk(chunk, padded_final=padded_final):
            if starts:
                split.append([])
            split[-1].append(transition)
    return split


def client(link: Link, tmp_path: Path, **settings: Any) -> Game:
    """Return a Game without a thread, on a fake clock, for tests that call `pump`."""
    settings.setdefault("clock", FakeClock())
    seed = settings.pop("rng_seed", 0)
    settings.setdefault("sender", SenderConfig(linger_s=1.0))
    shape = {
        name: settings.pop(name)
        for name in list(settings)
        if name not in ClientConfig.__dataclass_fields__
    }
    if not isinstance(shape.get("game"), GameSpec):
        shape = {"game": "my-game", "obs": 2, "actions": 3, **shape}
    config = ClientConfig(
        link=link,
        spool=tmp_path / "spool",
        background=False,
        rng=random.Random(seed),
        **settings,
    )
    return connect(config=config, **shape)
