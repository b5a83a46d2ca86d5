"""Sending what killed games left in a spool, without a game of one's own."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from understudy.client.sender import Sender
from understudy.client.session import Sessions
from understudy.client.spool import Spool
from understudy.client.spooled import read_about
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Corrupt, SpecError
from understudy.core.game import GameSpec
from understudy.core.ports import Link


def send_leftovers(
    folder: Path, link_to: Callable[[GameSpec], Link], *, timeout_s: float = 60.0, clock: Clock | None = None
) -> int:
    """Adopt every unlocked session in one spool folder and send it; how many frames were acknowledged."""
    clock = clock or SystemClock()
    spec = _spec_in(folder)
    if spec is None:
        return 0
    link = link_to(spec)
    sender = Sender(
        link,
        Sessions(spec, kind="player", client="understudy-leftovers", clock=clock),
        Spool(folder),
        spec=spec,
        clock=clock,
    )
    deadline = clock.monotonic() + timeout_s
    try:
        wait_s = sender.step()
        while not sender.is_clear and clock.monotonic() < deadline:
            time.sleep(min(wait_s, 0.1))
            wait_s = sender.step()
    finally:
        sender.release()
        link.close()
    return sender.counts.acked_frames


def _spec_in(folder: Path) -> GameSpec | None:
    for path in sorted(folder.glob("*/session.json")):
        with contextlib.suppress(Corrupt, SpecError):
            return read_about(path.parent).spec()
    return None
