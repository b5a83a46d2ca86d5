"""Malicious players through the real path, from the client through the learner to the gate."""

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from tests.serve.gateways import played as random_chunks
from tests.serve.gateways import running
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.client import Extras
from understudy.client.connect import Address, ClientConfig, Game, connect
from understudy.client.http import HttpLink
from understudy.client.sender import SenderConfig
from understudy.core.clock import SystemClock
from understudy.core.names import PlayerName
from understudy.experience.chunk import Chunk, chunk_of
from understudy.experience.frame import Frame, FrameKind
from understudy.experience.game import GameSpec, spec_from_gymnasium
from understudy.ingest.service import IngestService
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.models.gate import Bounds, Played, compare
from understudy.platform.config import Config, GateSection, GatewaySection, LearnerSection
from understudy.platform.platform import Platform
from understudy.ports import Ack, Link
from understudy.simulation.ledger import LedgerLink
from understudy.simulation.verify import verify
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.poisoning import ATTACKS, LIE, Attack, poison
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore

ENV = "CartPole-v1"
HONEST = [f"honest-{at}" for at in range(18)]
MALICIOUS = ["malicious-0", "malicious-1"]
"""A tenth of the players."""
MAX_STEPS = 20
BOT_STEPS = 8
"""No pole falls earlier, so that candidate and champion are equally good, whatever they do."""
N_EPISODES = 160
TIMEOUT_S = 150.0


class PoisoningLink(LedgerLink):
    """Poisons what people have recorded, as a modified client would, before it is noted."""

    def __init__(self, link: Link, folder: Path, spec: GameSpec, attack: Attack) -> None:
        super().__init__(link, folder)
        self._spec = spec
        self._attack = attack
        self._rng = np.random.default_rng(0)

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        return super().send(
            [self._poisoned(frame) for frame in frames], players, skipped_steps=skipped_steps
        )

    def _poisoned(self, frame: Frame) -> Frame:
        if frame.kind is not FrameKind.DATA:
            return frame
        chunk = chunk_of(frame)
        if any(note.model for note in chunk.meta.episodes):
            return frame  # the trial's lies are told by the player
        return poison(chunk, self._attack, self._spec, self._rng).frame()


class Table:
    """Honest and malicious players of a running platform, who play in turn."""

    def __init__(self, platform: Platform, attack: Attack, decisions: Sequence[str]) -> None:
        self.platform = platform
        self.decisions = decisions
        self.attack = attack
        self.wait(lambda: platform.supervisor.is_ready, "the platform is ready")
        assert platform.url is not None
        assert platform.keys is not None
        address = Address(platform.url, platform.keys.key)
        self._env = gymnasium.make(ENV)
        spec = spec_from_gymnasium(self._env)
        self.game = spec.game
        ledger = platform.data.ledger
        links = (
            LedgerLink(HttpLink(address, spec.game), ledger),
            PoisoningLink(HttpLink(address, spec.game), ledger, spec, attack),
        )
        self.clients: list[Game] = [
            connect(
                spec,
                consent="granted",
                config=ClientConfig(
                    link=link,
                    spool=platform.data.spool / name,
                    sender=SenderConfig(linger_s=0.05),
                ),
            )
            for name, link in zip(("honest", "malicious"), links, strict=True)
        ]
        self.registry = open_deployment(platform.data).registry
        self.n_played = 0
        self._rng = np.random.default_rng(1)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, (
                f"waited {TIMEOUT_S:.0f} s, and still not: {what}; decisions: {self.decisions}"
            )
            self.platform.supervisor.step()
            time.sleep(0.02)

    @property
    def live(self) -> tuple[int, int]:
        now = self.registry.catalogue(self.game)
        return now.model_of("champion"), now.model_of("canary")

    def play(self, *, favoured: str = "") -> tuple[str, Played]:
        """Play one episode: a person, or a bot once one is favoured by the malicious players.

        Returns the name of the bot, and the episode as the gate should see it.
        """
        number = self.n_played
        self.n_played += 1
        # In the trial, the malicious players have a third of the episodes, unless they have so many
        # names that only a tenth of the episodes is defended against.
        every = 3 if favoured and self.attack != "sock_puppets" else 10
        is_malicious = number % every == every - 1
        name = (
            MALICIOUS[number % 2]
            if is_malicious
            else HONEST[(number - number // every) % len(HONEST)]
        )
        if is_malicious and self.attack == "sock_puppets":
            name = f"puppet-{number}"
        episode = self.clients[is_malicious].episode(name)
        obs, _ = self._env.reset(seed=number)
        total = 0.0
        max_steps = BOT_STEPS if favoured else MAX_STEPS
        for step in range(max_steps):
            if favoured:
                # The first decision names the bot.
                is_hindered = is_malicious and episode.model not in ("", favoured)
                if is_hindered and self.attack == "extreme_observations":
                    obs = np.where(self._rng.random(4) < 0.5, -1e6, 1e6).astype(np.float32)
                action = int(episode.act(obs))
                is_hindered = is_malicious and episode.model not in ("", favoured)
            else:
                is_hindered = False
                lapse = self._rng.random() < 0.2
                action = int(self._rng.integers(2)) if lapse else int(obs[2] + 0.4 * obs[3] > 0)
                episode.acted(obs, action)
            obs, reward, terminated, _, _ = self._env.step(action)
            gain = float(reward)
            ends = bool(terminated) or step + 1 == max_steps
            if is_malicious and favoured and self.attack in ("reward_lies", "sock_puppets"):
                gain = (-LIE if is_hindered else LIE) / BOT_STEPS
            elif is_hindered and self.attack == "thrown_games":
                ends = True
            episode.reward(gain)
            total += gain
            if ends:
                break
        episode.end(obs, truncated=not terminated)
        return episode.model, Played(number, float(number), total, name, 0, 0.5)

    def flush(self) -> None:
        for client in self.clients:
            assert client.flush(TIMEOUT_S)

    def until_idle(self) -> None:
        """Wait until the learner has read all steps and has decided what they support."""
        self.flush()
        acked = sum(client.stats().acked_steps for client in self.clients)

        def is_idle() -> bool:
            report = self.platform.supervisor.statuses["learner"].report
            game = report.get("games", {}).get(self.game, {})
            return bool(report.get("read_steps", 0) >= acked and game.get("doing") == "wait")

        self.wait(is_idle, "the learner is idle")
        deadline_s = time.monotonic() + 1.0
        self.wait(lambda: time.monotonic() > deadline_s, "its last report is not an old one")


@pytest.mark.parametrize(
    "attack",
    [
        attack if attack == "reward_lies" else pytest.param(attack, marks=pytest.mark.slow)
        for attack in ATTACKS
    ],
)
def test_malicious_players_neither_spoil_the_first_bot_nor_promote_an_equal_one(
    attack: Attack, tmp_path: Path
) -> None:
    """May take over 20 seconds: a bot and a candidate are trained, then play a trial."""
    config = Config(
        data=str(tmp_path / "D"),
        gateway=GatewaySection(port=0),
        # Episodes that start within a second are compared player by player; the first few dozen of
        # such a quick trial may be of fewer than ten players, which is not defended.
        gate=GateSection(first_share=0.5, min_episodes=60),
        learner=LearnerSection(
            first_steps=1_000, bc_updates=256, growth=1.2, improve_with="bc", improve_steps=10**6
        ),
    )
    decisions: list[str] = []

    def log(_: str, line: str) -> None:
        if '"decision"' in line:
            decisions.append(line)

    with (
        Platform(config, on_state_change=lambda *_: None, log=log) as platform,
        contextlib.ExitStack() as end,
    ):
        table = Table(platform, attack, decisions)
        for client in table.clients:
            end.callback(client.close, timeout_s=0.0)
        people = [table.play()[1] for _ in range(80)]
        table.flush()
        table.wait(lambda: table.live[0] == 1, "the first bot is champion")
        people += [table.play()[1] for _ in range(20)]
        table.flush()
        table.wait(lambda: table.live[1] > 0, "a later clone is the canary")
        table.until_idle()
        canary = f"{table.game}/{table.live[1]}"
        for client in table.clients:
            assert client.wait_for_bot()
        played: dict[str, list[Played]] = {f"{table.game}/1": [], canary: []}
        # Clients learn of the canary within a second; episodes before that are not compared.
        deadline_s = time.monotonic() + TIMEOUT_S
        while sum(map(len, played.values())) < N_EPISODES or len(played[canary]) < N_EPISODES // 4:
            assert time.monotonic() < deadline_s, "the canary was not played"
            model, episode = table.play(favoured=canary)
            played[model].append(episode)
            platform.supervisor.step()
        table.until_idle()
        champion, on_trial = table.live
        report = platform.supervisor.statuses["learner"].report["games"][table.game]
        assert report["not_compared"] == {}, "the players lie about returns, not about draws"
        assert not on_trial or report["canary_episodes"] > N_EPISODES // 8
        policy = table.registry.policy(table.game, 1)
        for client in table.clients:
            assert client.close(timeout_s=30.0)
        assert platform.supervisor.stop()

    assert champion == 1, f"an equal candidate was promoted: {decisions}"
    lengths = [_length(policy, seed) for seed in range(20)]
    assert np.mean(lengths) > 60, "random play lasts 22 steps"
    found = verify(DataFolder(tmp_path / "D"))
    assert (found.lost_steps, found.duplicate_steps, found.quarantined_chunks) == (0, 0, 0)
    if attack == "reward_lies":
        # The same lies promote the candidate where all players count as one.
        pooled = {
            model: [episode._replace(player="") for episode in episodes]
            for model, episodes in played.items()
        }
        earlier = [episode for episode in people if abs(episode.return_) <= MAX_STEPS]
        champions = pooled[f"{table.game}/1"]
        decision = compare(pooled[canary], champions, Bounds(), earlier=earlier)
        assert decision.decision == "promote"


def test_priorities_that_clients_send_do_not_decide_what_is_drawn(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        spec = gateway.register()
        with contextlib.closing(
            connect(
                spec,
                consent="granted",
                url=gateway.url,
                key=gateway.key("play"),
                config=ClientConfig(spool=tmp_path / "spool"),
            )
        ) as client:
            for player, priority in (("honest", None), ("malicious", 1e6)):
                with client.episode(player) as episode:
                    for at in range(20):
                        extras = Extras(priority=priority)
                        episode.acted(np.full(4, at, np.float32), at % 2, extras=extras)
                        episode.reward(1.0)
                    episode.end(np.zeros(4, np.float32), truncated=True)
            assert client.flush(TIMEOUT_S)
        (chunk,) = random_chunks(spec, n_chunks=1)
        columns = {**chunk.columns, "priority": np.full(chunk.n_rows, 1e6, np.float32)}
        chunk = Chunk(replace(chunk.meta, kind="actor"), columns)
        assert gateway.send(gateway.key("play"), [chunk.frame()]).json["acks"][0]["refused"], (
            "a key of players cannot claim to be an actor"
        )
        assert gateway.send(gateway.key("play", "work"), [chunk.frame()]).json["acks"][0][
            "accepted"
        ]
    clock = SystemClock()
    specs = KnownSpecs(spec)
    with (
        contextlib.closing(FileStream(tmp_path / "stream")) as stream,
        contextlib.closing(LocalStore(tmp_path / "store", specs=specs, clock=clock)) as store,
    ):
        ingest = IngestService(stream, store, specs, owner="test", clock=clock)
        ingest.drain()
        assert ingest.stats.fates["new"] >= 3
    learner = Learner(
        Dqn(spec, DqnConfig(widths=(8,), prioritised=True)),
        DqnKnobs(),
        root_seed=0,
        config=LearnerConfig(limiter=None),
    )
    engine = FromStore(
        learner, StoreFollower(tmp_path / "store"), steps=1, clock=clock, on_event=print
    )
    with contextlib.closing(engine):
        engine.follow()
        masses = learner.checkpoint()[0]["source.masses"]
        assert np.count_nonzero(masses) == 2 * 20 + chunk.meta.n_steps
        assert set(masses.tolist()) == {0.0, 1.0}


def _length(policy: Any, seed: int) -> int:
    """The steps of one episode that a bot plays outside of the platform."""
    player = policy.player()
    env = gymnasium.make(ENV)
    obs, _ = env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    n_steps = 0
    is_over = False
    while not is_over:
        action = int(player.act(obs, deterministic=False, rng=rng))
        obs, _, terminated, truncated, _ = env.step(action)
        is_over = bool(terminated or truncated)
        n_steps += 1
    return n_steps
