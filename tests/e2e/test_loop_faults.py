"""The closed loop under consecutive faults: no acknowledged step is lost, players keep a bot."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import gymnasium
import numpy as np
import pytest

from tests.card import Card
from understudy.backends.data import DataFolder
from understudy.backends.deployment import models_folder, open_deployment
from understudy.client.connect import Address, ClientConfig, connect
from understudy.client.http import HttpLink
from understudy.client.sender import SenderConfig
from understudy.core.errors import Corrupt, Refused
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame
from understudy.experience.game import spec_from_gymnasium
from understudy.platform.children import Child
from understudy.platform.config import Config, GateSection, GatewaySection, LearnerSection
from understudy.platform.platform import Platform
from understudy.ports import Ack
from understudy.simulation.ledger import LedgerLink
from understudy.simulation.people import Groups, PeopleSettings, Solo
from understudy.simulation.verify import verify

ENV = "CartPole-v1"
NAMES = [f"person-{at}" for at in range(4)]
REVOKED_WITHIN_S = 2.0
TIMEOUT_S = 120.0


class TimedLink(HttpLink):
    """Records when the last accepted frame batch was sent."""

    accepted_at_s = 0.0

    def send(
        self, frames: Sequence[Frame], players: Mapping[UUID, PlayerName], *, skipped_steps: int = 0
    ) -> Sequence[Ack]:
        began_s = time.monotonic()
        acks = super().send(frames, players, skipped_steps=skipped_steps)
        if any(ack.accepted for ack in acks):
            self.accepted_at_s = began_s
        return acks


class Guest:
    """A player who always lets the bot play, and counts each decision without a bot."""

    def __init__(self, data: DataFolder, spool: Path, *, url: str, key: str) -> None:
        spec = spec_from_gymnasium(gymnasium.make(ENV))
        self.link = TimedLink(Address(url, key), spec.game)
        link = LedgerLink(self.link, data.ledger)
        config = ClientConfig(link=link, spool=spool, sender=SenderConfig(linger_s=0.1))
        self.game = connect(spec, consent="granted", config=config)
        rng = np.random.default_rng()
        self._person = Solo(self.game, "guest", ENV, rng, bot_share=1.0, choose=self._alone)
        self.by_bot = 0
        self.without_bot = 0
        self.gaps = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def _alone(self, _: Any) -> int:
        self.without_bot += 1
        self.gaps += self.by_bot > 0
        return 0

    def _play(self) -> None:
        while not self._stop.wait(0.02):
            before = self.without_bot
            self._person.step()
            self.by_bot += self.without_bot == before

    def leave(self, timeout_s: float) -> bool:
        """Stop playing; returns whether every step is acknowledged."""
        self._stop.set()
        self._thread.join(5.0)
        return self.game.close(timeout_s=timeout_s)


class Stage:
    """The platform, its players and its guests; every wait steps the roles and checks the bots."""

    def __init__(self, folder: Path, platform: Platform) -> None:
        self.data = platform.data
        self.platform = platform
        self._folder = folder
        self.deployment = open_deployment(self.data)
        self._people: Child | None = None
        self.have_bot = False
        self.wait(lambda: platform.supervisor.is_ready, "the platform is ready")
        assert platform.url is not None
        assert platform.keys is not None
        self.url = platform.url
        self.key = platform.keys.key
        self.guests: list[Guest] = []
        settings = PeopleSettings(
            data=str(self.data.root),
            url=self.url,
            key=self.key,
            env_id=ENV,
            names=NAMES,
            rate=50.0,
        )
        (self._people,) = Groups("people", [settings]).children

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited {TIMEOUT_S:.0f} s, and still not: {what}"
            self.look()
            time.sleep(0.05)

    def look(self) -> None:
        self.platform.supervisor.step()
        if self._people is not None:
            assert self.people.exit_code is None, self.people.errors
            assert not (self.have_bot and not self.people.latest.get("bot")), (
                "people lost their bot"
            )
            self.have_bot |= bool(self.people.latest.get("bot"))

    def guest(self, name: str, key: str) -> Guest:
        self.guests.append(Guest(self.data, self._folder / name, url=self.url, key=key))
        return self.guests[-1]

    @property
    def people(self) -> Child:
        assert self._people is not None
        return self._people

    @property
    def acked(self) -> int:
        return int(self.people.latest.get("acked", 0))

    def kill(self, role: str) -> None:
        """Kill a role with SIGKILL, then wait until it is restarted."""
        status = self.platform.supervisor.statuses[role]
        assert status.child is not None
        before = status.child.pid
        restarts = status.restarts
        status.child.kill()
        self.wait(
            lambda: status.restarts > restarts and status.state == "running",
            f"the {role} runs again",
        )
        assert status.child.pid != before


@contextlib.contextmanager
def staged(folder: Path, learner: LearnerSection) -> Iterator[Stage]:
    config = Config(
        data=str(folder / "D"),
        gateway=GatewaySection(port=0),
        gate=GateSection(first_share=0.5),
        learner=learner,
    )
    with Platform(config, on_state_change=lambda *_: None) as platform:
        stage = Stage(folder, platform)
        try:
            yield stage
        finally:
            for guest in stage.guests:
                guest.leave(0.0)
            stage.people.kill()
            stage.people.wait(5.0)


def damage(path: Path) -> bytes:
    """Flip one bit of a file; returns the original bytes."""
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    return good


# Short trainings of clones, again and again: each fault comes while the learner works.
CLONES = LearnerSection(
    first_steps=300, bc_updates=256, growth=1.2, improve_with="bc", improve_steps=10**6
)


@pytest.mark.parametrize(
    "learner",
    [
        pytest.param(CLONES, id="clones"),
        pytest.param(LearnerSection(first_steps=300), id="default", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::understudy.client.session.RecordingWarning")
def test_kills_a_damaged_model_and_a_revoked_key_lose_no_step_and_no_player_is_without_a_bot(
    tmp_path: Path, card: Card, bar: Callable[[float], float], learner: LearnerSection
) -> None:
    """Takes over 20 seconds: one platform learns a bot, then survives five faults."""
    with staged(tmp_path, learner) as stage:
        deployment = stage.deployment
        key, known = deployment.keys.create(["play"], registers=True, label="revoked later")
        revoked = stage.guest("revoked", key)
        watcher = stage.guest("watcher", stage.key)
        game = revoked.game.spec.game
        stage.wait(
            lambda: revoked.by_bot > 0 and watcher.by_bot > 0 and stage.have_bot,
            "the first bot plays",
        )

        # A model file goes bad, and the gateway that had it in memory is killed.
        first = deployment.registry.catalogue(game).models[1]
        blob = models_folder(stage.data) / "blobs" / f"{first.policy_sha256}.safetensors"
        good = damage(blob)
        with pytest.raises((Refused, Corrupt)):
            deployment.registry.policy(game, 1)
        acked = stage.acked
        stage.kill("gateway")
        newcomer = stage.guest("newcomer", stage.key)
        stage.wait(lambda: stage.acked > acked, "people's steps are acknowledged again")
        stage.wait(
            lambda: newcomer.game.stats().acked_steps > 0, "the newcomer's steps are acknowledged"
        )
        is_only_one = deployment.registry.catalogue(game).model_of("champion") == 1
        assert not (is_only_one and newcomer.by_bot), "a damaged model played"

        # A key is revoked while its client plays.
        revoked_at_s = time.monotonic()
        deployment.keys.revoke(known.id)
        stage.wait(
            lambda: "revoked" in revoked.game.stats().last_error, "the revoked client is refused"
        )
        acked = stage.acked

        stage.kill("ingest")
        stage.kill("learner")
        stage.wait(lambda: stage.acked > acked, "people play on")
        updates = _updates(stage, game)
        stage.wait(lambda: _updates(stage, game) > updates, "the new learner learns")
        assert revoked.link.accepted_at_s <= revoked_at_s + bar(REVOKED_WITHIN_S)

        # Restored from a backup, the bot reaches those who have none without anybody doing more.
        blob.write_bytes(good)
        stage.wait(lambda: newcomer.by_bot > 0, "the newcomer has a bot")

        # What a client keeps for its next start may go bad as well; then it is fetched again.
        assert newcomer.leave(20.0)
        for kept in (tmp_path / "newcomer").rglob("*.safetensors"):
            damage(kept)
        again = stage.guest("newcomer", stage.key)
        stage.wait(lambda: again.by_bot > 0, "a good copy plays")
        assert again.game.stats().refused_bots == 1
        for model_no in {int(one.game.stats().bot.rpartition("/")[2]) for one in (watcher, again)}:
            deployment.registry.policy(game, model_no)

        # Frames of the revoked key wait on its machine, all of them, until it is given another.
        stats = revoked.game.stats()
        assert not revoked.leave(0.0)
        assert stats.spooled_steps > stats.acked_steps > 0
        assert (stats.refused_frames, stats.dropped_steps) == (0, 0)
        heir = stage.guest("revoked", deployment.keys.create(["play"], registers=True)[0])
        stage.wait(
            lambda: heir.game.stats().adopted_sessions > 0, "the spool is sent with the new key"
        )

        for guest in (watcher, again, heir):
            assert guest.leave(30.0)
            assert guest.gaps == 0
        assert revoked.gaps == newcomer.gaps == 0
        stage.people.stop()
        assert stage.people.wait(40.0) == 0
        assert stage.people.latest["flushed"]
        assert stage.people.latest["refused_bots"] == 0
        assert stage.platform.supervisor.stop()
        statuses = stage.platform.supervisor.statuses
        restarts = {name: status.restarts for name, status in statuses.items()}

    assert restarts == {"gateway": 1, "ingest": 1, "learner": 1}
    found = verify(DataFolder(tmp_path / "D"))
    assert (found.lost_steps, found.lost_chunks, found.duplicate_steps, found.corrupt) == (
        0,
        0,
        0,
        (),
    )
    assert (found.gap_chunks, found.quarantined_chunks, found.recovered_frames) == (0, 0, 0)
    assert found.exit_code == 0
    assert found.ledger_steps == found.steps >= 1_000
    card.line("killed gateway, ingest, learner; damaged model; revoked key", tried=5, held=5)
    card.line(
        "steps acknowledged over HTTP",
        tried=found.ledger_steps,
        held=found.ledger_steps - found.lost_steps,
    )


def _updates(stage: Stage, game: str) -> int:
    """The updates of the running learner."""
    child = stage.platform.supervisor.statuses["learner"].child
    games = child.latest.get("games", {}) if child is not None else {}
    return int(games.get(game, {}).get("updates", 0))
