"""A whole platform in one process, on a disk whose power may be cut.

Players, stream, ingest, store and erasure. Run as `python -m tests.faults.writer SETTINGS`. The
ledger of acks, the forgotten players and the deployment's key are written to another disk.
"""

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.faults.recording import GAME, Table, cart
from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, connect
from understudy.client.local import LocalLink
from understudy.core.clock import SystemClock
from understudy.core.log import no_sync, sync_data
from understudy.experience.intake import Intake, deployment_key, key_file, pseudonym
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.simulation.ledger import LedgerLink
from understudy.stores.database import Synchronous
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """What one process does."""

    data: str
    outside: str
    """A folder on a disk that keeps its power."""
    seed: int
    syncs: bool = True
    """False is a control: the stream is not synced."""
    synchronous: Synchronous = "FULL"
    """Less is a control, too: the store is synced at checkpoints only, or never."""
    roll_bytes: int = 8 * 1024


def main(settings: WriterSettings) -> None:
    data = DataFolder(Path(settings.data))
    outside = Path(settings.outside)
    outside.mkdir(exist_ok=True)
    rng = np.random.default_rng(settings.seed)
    sync = sync_data if settings.syncs else no_sync
    key = deployment_key(data.root)
    specs = SpecFolder(data.games)
    stream = FileStream(data.stream, sync=sync, roll_bytes=settings.roll_bytes)
    intake = Intake(key, cart().game, SystemClock())
    link = LedgerLink(LocalLink(stream, intake=intake, specs_folder=data.games), outside / "ledger")
    config = ClientConfig(link=link, background=False, spool=data.spool)
    with LocalStore(data.store, specs=specs, synchronous=settings.synchronous) as store:
        service = IngestService(stream, store, specs, owner="writer")
        threading.Thread(target=_follow, args=(service,), daemon=True).start()
        with connect(cart(), consent="granted", config=config) as game:
            (outside / "key").write_bytes(key_file(key))
            table = Table(game, [f"player-{settings.seed}-{n}" for n in range(3)], rng)
            erased = 0
            for turn in range(1_000_000):
                table.play(steps=int(rng.integers(1, 20)))
                if turn % 8 == 7:
                    stream.trim(store.positions(), before_s=float(rng.choice([0.0, 1e12])))
                if rng.random() < 0.03:
                    player = f"player-{settings.seed}-{rng.integers(3)}"
                    erased += _forget(store, key, player, outside)
                if turn % 10 == 0:
                    figures = {"turn": turn, "stored": service.stats.steps, "erased": erased}
                    print(json.dumps(figures), flush=True)


def _follow(service: IngestService) -> None:
    while True:
        service.step()


def _forget(store: LocalStore, key: bytes, player: str, outside: Path) -> int:
    """Returns the number of erased chunks."""
    last = store.next_arrival
    erased = store.forget(pseudonym(key, GAME, player))
    with (outside / "forgotten").open("a") as file:
        file.write(
            json.dumps({"player": pseudonym(key, GAME, player).hex(), "before": last}) + "\n"
        )
    return erased


if __name__ == "__main__":
    main(WriterSettings(**json.loads(sys.argv[1])))
