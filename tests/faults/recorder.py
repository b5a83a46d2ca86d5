"""A process of players on a bad network: simulated players, spool, stream, and a ledger of acks.

Run as `python -m tests.faults.recorder SETTINGS`, with settings as JSON; without an argument they
are the first line of its standard input. It reports lines of JSON until it is killed or its
standard input closes.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.faults.history import HistoryLink
from tests.faults.recording import Cart, cart
from understudy.backends.data import DataFolder
from understudy.client.connect import Address, ClientConfig, connect, local_link
from understudy.client.http import HttpLink
from understudy.client.sender import SenderConfig
from understudy.core.clock import SystemClock
from understudy.simulation.ledger import LedgerLink
from understudy.simulation.people import Tester, play_on
from understudy.testing import Faults, FaultyLink


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """What one process does."""

    data: str
    players: list[str]
    seed: int
    faults: dict[str, float] = field(default_factory=dict)
    """Fields of `understudy.testing.Faults`."""
    spool_cap_bytes: int = 64 * 1024 * 1024
    linger_s: float = 0.02
    rate: float = 3000.0
    """Steps a second and player."""
    url: str = ""
    """A gateway to send to; empty: the stream of the data folder."""
    key: str = ""
    folder: str = ""
    """With `url`: where spool, history and receipts are, all called `name`."""
    name: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(settings: RecorderSettings) -> None:
    """Play until asked to stop; then close, which flushes what it can."""
    rng = np.random.default_rng(settings.seed)
    data = DataFolder(Path(settings.data))
    # Inside the faults: whatever the stream called durable is promised, whether the client heard of
    # it or not.
    own = Path(settings.folder) / settings.name
    ledger = LedgerLink(
        HistoryLink(
            HttpLink(Address(settings.url, settings.key), cart().game),
            own.with_suffix(".history"),
        )
        if settings.url
        else local_link(data.root, cart(), SystemClock()),
        data.ledger,
    )
    link = FaultyLink(ledger, Faults(**settings.faults), np.random.default_rng(settings.seed + 1))
    sender = SenderConfig(
        linger_s=settings.linger_s,
        session_idle_s=0.5,
        adopt_every_s=0.5,
        retry_first_s=0.01,
        retry_cap_s=0.05,
    )
    config = ClientConfig(
        link=link,
        spool=own if settings.url else data.spool,
        spool_cap_bytes=settings.spool_cap_bytes,
        sender=sender,
    )
    receipts = own.with_suffix(".receipts") if settings.url else None
    game = connect(cart(), consent="granted", receipts=receipts, config=config)
    people = [
        Tester(Cart(rng, end_share=0.02), game.recorder(name), settings.seed)
        for name in settings.players
    ]
    play_on(game, ledger, people, rate=settings.rate, close_s=config.close_timeout_s)


if __name__ == "__main__":
    main(RecorderSettings(**json.loads(sys.argv[1] if sys.argv[1:] else sys.stdin.readline())))
