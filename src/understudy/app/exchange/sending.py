"""Sending: every frame of an import's files, as its plan says, into the stream."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event

from understudy.app.exchange.history import OnSteps, noise_of
from understudy.app.exchange.incoming import Incoming, with_session
from understudy.app.exchange.plan import Plan
from understudy.core.clock import Clock
from understudy.core.errors import StorageFailed
from understudy.core.frame import MAX_FRAMES_PER_SEND, CloseReport, DropReport, Frame, close_frame, drop_frame
from understudy.core.names import PlayerName
from understudy.core.ports import Link

SEND_BYTES = 4 * 1024 * 1024
SEND_TRIES = 8
"""How often frames are handed to a stream that is busy or away, a few seconds apart at last."""


class Sender:
    """Hands frames over, and again while that may help."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link, self._clock = link, clock

    def send(self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName]) -> None:
        """All of them are durable in the stream; StorageFailed when one is not."""
        for tried in range(SEND_TRIES):
            acks = self._link.send(frames, players)
            left = [(frame, ack) for frame, ack in zip(frames, acks, strict=True) if not ack.accepted]
            if not left:
                return
            refused = next((ack.refused for _, ack in left if ack.refused), None)
            if refused or tried + 1 == SEND_TRIES:
                raise StorageFailed(
                    f"the stream did not take a frame: {refused or left[0][1].error}; mend that, then run the same "
                    "command again, which goes on where this one ended"
                )
            frames = [frame for frame, _ in left]
            self._clock.wait(Event(), min(max(ack.retry_after_s for _, ack in left), 0.1 * 2**tried))


def send(
    files: Sequence[Incoming], plans: Mapping[int, Plan], sender: Sender, *, after_each: Callable[[], None],
    on_steps: OnSteps | None,
) -> None:  # fmt: skip
    """Send what has an id; `after_each` is called whenever some of it is in the stream."""
    total, done = sum(plan.outline.steps for plan in plans.values()), 0
    waiting: list[Frame] = []
    players: dict[uuid.UUID, PlayerName] = {}
    for frame, player, steps in _frames(files, plans):
        if frame is not None:
            waiting.append(frame)
            players[frame.session] = player
        done += steps
        if len(waiting) == MAX_FRAMES_PER_SEND or sum(one.size_bytes for one in waiting) > SEND_BYTES:
            sender.send(waiting, players)
            waiting, players = [], {}
            after_each()
        if on_steps is not None:
            on_steps(done, total)
    if waiting:
        sender.send(waiting, players)


def _frames(files: Sequence[Incoming], plans: Mapping[int, Plan]) -> Iterator[tuple[Frame | None, PlayerName, int]]:
    """Every frame of the files, whose it is, and how many steps it brings; no frame for what stays out."""
    sent: dict[int, int] = {}
    for owner, one in enumerate(files):
        for chunk, _ in one.chunks():
            noise, n_steps = noise_of(chunk.meta.session), chunk.meta.n_steps
            plan = plans.get(noise)
            if plan is None or plan.owner != owner:
                continue
            outline, session = plan.outline, plan.session
            if session is None:
                yield None, plan.player, n_steps
                continue
            number = outline.last_no + 1
            if noise not in sent and outline.missing:
                report = DropReport(tuple(outline.missing), outline.missing_steps)
                yield drop_frame(session, number, report), plan.player, 0
            yield with_session(chunk, session).frame(), plan.player, n_steps
            sent[noise] = sent.get(noise, 0) + 1
            if sent[noise] == outline.chunks:
                number += bool(outline.missing)
                yield close_frame(session, number, CloseReport(number, outline.steps)), plan.player, 0
