"""Real recorder and ingest processes, killed at random: every acknowledged step is stored, once."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.card import Card
from tests.faults.processes import start, understudy_here, wait_until
from tests.faults.profiles import sizes
from tests.faults.recorder import RecorderSettings
from understudy.backends.data import DataFolder
from understudy.platform.children import Child

BAD_NETWORK = {"duplicate": 0.1, "reorder": 0.3, "fail": 0.1, "lose_answer": 0.2}
NO_NETWORK = {"fail": 0.995, "lose_answer": 0.3}
SMALL_SPOOL = 96 * 1024


class Troupe:
    """Three recorders (the last with a bad network and a small spool) and one ingest."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._children = [self._start(at) for at in range(4)]
        self._victims = self._chosen()
        self.kills: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def _start(self, at: int) -> Child:
        if at == 3:
            hasty = self._rng.random() < 0.7
            return start(
                "tests.faults.ingester" if hasty else "understudy.platform.ingest", str(self._root)
            )
        starved = at == 2
        settings = RecorderSettings(
            data=str(self._root),
            players=[f"player-{at}-{n}" for n in range(2)],
            seed=self._rng.randrange(1 << 30),
            faults=NO_NETWORK if starved else BAD_NETWORK,
            spool_cap_bytes=SMALL_SPOOL if starved else 64 * 1024 * 1024,
            rate=9000 if starved else 2000,
        )
        return start("tests.faults.recorder", asdict(settings))

    def _chosen(self) -> Iterator[Sequence[int]]:
        """Which processes are killed next: first ingest, a recorder, and all at once."""
        yield [3]
        yield [1]
        yield range(4)
        while True:
            everybody = self._rng.random() < 0.15
            yield range(4) if everybody else [self._rng.choice([0, 1, 2, 3, 3])]

    def kill_somebody(self) -> None:
        """Kill one process, or all at once, and start what was killed again."""
        victims = next(self._victims)
        for at in victims:
            self._children[at].kill()
        for at in victims:
            child = self._children[at]
            code = child.wait(10.0)
            assert code == -9, (
                f"{child.name} ended with {code} before it was killed:\n{child.errors}"
            )
            self._count(child)
            self.kills["ingest" if at == 3 else "recorder"] += 1
            self._children[at] = self._start(at)

    def _count(self, child: Child) -> None:
        self.seen.update(child.latest.get("fates", {}))
        self.seen["failed_sends"] += child.latest.get("failed_sends", 0)

    def stop(self) -> None:
        """Kill the first recorder, let the others finish."""
        self._children[0].kill()
        for child in self._children[:3]:
            child.stop()
            child.wait(30.0)
        self._children[3].stop()
        assert self._children[3].wait(60.0) == 0, self._children[3].errors
        for child in self._children:
            self._count(child)

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait(10.0)


@sizes("kills", short=8, full=220)
def test_every_acknowledged_step_is_stored_once_whichever_process_is_killed(
    tmp_path: Path, kills: int, seed: int, card: Card
) -> None:
    rng = random.Random(seed)
    root = tmp_path / "data"
    troupe = Troupe(root, rng)
    try:
        while troupe.kills.total() < kills:
            time.sleep(rng.choice([rng.uniform(0.0, 0.3), rng.uniform(0.5, 1.2)]))
            troupe.kill_somebody()
        wait_until(DataFolder(root).has_writer, timeout_s=120.0, what="ingest to start")
        time.sleep(1.0)
        alive = understudy_here("data", "verify", "--data", root)
        troupe.stop()
    finally:
        troupe.close()
    answer = understudy_here("data", "verify", "--data", root)
    found = answer.fields
    assert alive.code == 0, f"with live writers: {alive}"
    assert alive.fields["live_writer"]
    assert answer.code == 0, f"seed {seed}: {answer}"
    assert found["lost_steps"] == found["duplicate_steps"] == found["gap_chunks"] == 0
    assert found["ledger_steps"] > 100 * kills
    assert troupe.seen["duplicate"] > 0
    assert troupe.seen["failed_sends"] > 0
    assert found["dropped_steps"] > 0, "the starved recorder was to drop and say so"
    total = troupe.kills.total()
    note = (
        f"{dict(troupe.kills)}; duplicates {troupe.seen['duplicate']}, reported drops "
        f"{found['dropped_steps']} steps"
    )
    card.line("kill -9 of recorders and ingest", tried=total, held=total, note=note)
    steps = found["ledger_steps"]
    card.line("acknowledged steps under kills", tried=steps, held=steps - found["lost_steps"])
