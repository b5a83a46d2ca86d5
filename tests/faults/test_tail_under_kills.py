"""A reader in another process tails while the writer writes, forgets and is killed."""

import json
import random
import time
from dataclasses import asdict
from pathlib import Path

from tests.card import Card
from tests.faults.processes import start, wait_until
from tests.faults.profiles import sizes
from tests.faults.writer import WriterSettings
from understudy.backends.data import DataFolder
from understudy.platform.children import Child
from understudy.platform.ingest import IngestRole
from understudy.ports import Stored
from understudy.stores.view import StoreView


@sizes("kills", short=3, full=50)
def test_a_reader_sees_every_arrival_once_in_order_while_the_writer_is_killed(
    tmp_path: Path, kills: int, seed: int, card: Card
) -> None:
    data = DataFolder(tmp_path / "data")
    seen = tmp_path / "seen"
    rng = random.Random(seed)
    tailer: Child | None = None
    for kill in range(kills):
        writer = start_writer(data, tmp_path, rng)
        try:
            wait_until(
                lambda w=writer: bool(w.latest) or w.exit_code is not None,  # type: ignore[misc]
                timeout_s=60,
                what="the first turn",
            )
            tailer = tailer or start("tests.faults.tailer", f"{data.store}:{seen}")
            time.sleep(rng.uniform(0.0, 0.8))
            if kill == 0:
                wait_until(
                    lambda w=writer: w.latest["erased"] or w.exit_code is not None,  # type: ignore[misc]
                    timeout_s=300,
                    what="somebody to be forgotten",
                )
            assert writer.exit_code is None, writer.errors
            assert tailer.exit_code is None, tailer.errors
        finally:
            writer.kill()
            writer.wait(10.0)
    assert tailer is not None
    try:
        with IngestRole(data) as role:
            role.service.drain()
            last = role.store.next_arrival - 1
        tail = tailer
        wait_until(
            lambda: tail.latest.get("last") == last or tail.exit_code is not None,
            timeout_s=60,
            what="catching up",
        )
    finally:
        tailer.stop()
        assert tailer.wait(10.0) == 0, tailer.errors
    steps = tailer.latest["steps"]
    held = check(data, [json.loads(line) for line in seen.read_text().splitlines()], last)
    assert steps > 0
    card.line(
        "writer killed under a reader", tried=kills, held=kills, note=f"{steps} steps checked"
    )
    card.line("arrivals seen once, in order", tried=last, held=held)


def start_writer(data: DataFolder, outside: Path, rng: random.Random) -> Child:
    settings = WriterSettings(
        data=str(data.root), outside=str(outside), seed=rng.randrange(1 << 30)
    )
    return start("tests.faults.writer", asdict(settings))


def check(data: DataFolder, seen: list[list[object]], last: int) -> int:
    """Check that arrivals were read once, in order and as stored; returns their number."""
    expected = 1
    found: dict[int, str] = {}
    for first, until, what in seen:
        assert first == expected, f"arrival {first} after {expected - 1}"
        assert isinstance(until, int)
        found[expected] = str(what)
        expected = until + 1
    assert expected == last + 1
    n_gone = 0
    with StoreView(data.store) as view:
        for item in view.tail(None, max_items=last, wait_s=0.0).items:
            if isinstance(item, Stored):
                frame = item.frame
                assert (
                    found[item.arrival_no] == f"{frame.session} {frame.chunk_no} {frame.body_crc}"
                )
            else:
                n_gone += 1
    assert n_gone > 0, "somebody was to be forgotten"
    return last
