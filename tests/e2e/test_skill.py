"""Skills through the embedded platform: people play, the learner calibrates, bots become even."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.platforms import constant_policy
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.cli.status import _skills
from understudy.client.connect import ClientConfig, Game, connect
from understudy.experience.game import GameSpec, game_spec
from understudy.models.manifest import Lineage
from understudy.nn.heads import head_for
from understudy.nn.network import Dense, Input, NetworkSpec
from understudy.nn.policy import Policy
from understudy.platform.ingest import IngestRole
from understudy.platform.learner_process import LearnerRole
from understudy.release.game_training import LearnerServiceConfig
from understudy.release.model_check import check_model
from understudy.release.schedule import LearningSchedule

SPEC = game_spec("doors", obs=3, actions=3, has_action_mask=True)
ROUNDS = 10
SEED = 0
CONFIG = LearnerServiceConfig(
    explore_share=0.0,
    schedule=LearningSchedule(first_steps=10**8, improve_steps=10**8),
    settings={"bc": {"widths": [4], "batch": 8, "updates_per_call": 2, "capacity": 4_096}},
)
PEOPLE = {"ada": 0.8, "bob": 0.6, "cyd": 0.5, "dan": 0.3}
"""How often each person finds the open door of three; a random one is right in a half of the
rounds, since one of the others is always locked."""


def seer(spec: GameSpec = SPEC) -> Policy:
    """A policy that always opens the right door, which the observation names."""
    network = NetworkSpec({"obs": Input((3,), np.dtype(np.float32))}, (), {"logits": (Dense(3),)})
    weights = {name: np.zeros(shape, np.float32) for name, shape in network.shapes().items()}
    weights["heads.logits.0.kernel"] = 50 * np.eye(3, dtype=np.float32)
    return Policy(spec, network, weights, head_for(spec))


@dataclass
class Doors:
    """The game: each round one door is right and one is locked; a right door scores 1."""

    data: DataFolder
    game: Game
    rng: np.random.Generator

    def play(self, player: str, *, wisdom: float | None = None, **how: Any) -> float:
        """An episode of a person with this wisdom, or of the bot; returns its score."""
        score = 0.0
        with self.game.episode(player, **how) as episode:
            for _ in range(ROUNDS):
                right, locked = self.rng.permutation(3)[:2].tolist()
                obs = np.eye(3, dtype=np.float32)[right]
                mask = np.arange(3) != locked
                if wisdom is None:
                    action = episode.act(obs, action_mask=mask)
                else:
                    other = 3 - right - locked
                    action = right if self.rng.random() < wisdom else other
                    episode.acted(obs, action, action_mask=mask)
                assert action != locked, "a bot at any skill plays only valid actions"
                episode.reward(float(action == right))
                score += action == right
            episode.end()
        return score

    def mean(self, n_episodes: int, **how: Any) -> float:
        return float(np.mean([self.play("bot", **how) for _ in range(n_episodes)]))

    def learn(self, role: LearnerRole) -> dict[str, dict[str, float]]:
        """Store what was played, let the learner see it and the game hear of it."""
        assert self.game.flush(60)
        with IngestRole(self.data) as ingest:
            ingest.service.drain()
        for _ in range(100):
            if not role.step():
                break
        self.game._bots.step(0.0)
        return role.status()["games"]["doors"]["skills"]  # type: ignore[no-any-return]


@pytest.fixture
def doors(tmp_path: Path):
    data = DataFolder(tmp_path / "D")
    registry = open_deployment(data).registry
    registry.register(SPEC)
    config = ClientConfig(background=False, rng=random.Random(SEED))
    with connect(SPEC, data=data.root, consent="granted", config=config) as game:
        yield Doors(data, game, np.random.default_rng(SEED))


def release(doors: Doors, policy: Policy, alias: str = "champion") -> None:
    registry = open_deployment(doors.data).registry
    epoch = registry.catalogue("doors").epoch or registry.takeover("doors", owner="test")
    manifest = registry.release(policy, Lineage(algorithm="bc"), epoch=epoch)
    registry.set_alias("doors", alias, manifest.model_no, why="test")
    doors.game._bots.step(0.0)


def learner(doors: Doors, config: LearnerServiceConfig = CONFIG) -> LearnerRole:
    registry = open_deployment(doors.data).registry
    return LearnerRole(doors.data, registry, config=config, check=check_model)


def test_even_converges_to_the_average_person_and_easy_to_the_lower_half(doors: Doors):
    release(doors, seer())
    assert doors.mean(20, skill="hard") == ROUNDS
    for _ in range(30):
        for player, wisdom in PEOPLE.items():
            doors.play(player, wisdom=wisdom)
    with learner(doors) as role:
        skills = doors.learn(role)
        assert skills["even"]["noise"] == 0.25, "the default, until it was played"
        assert skills["even"]["target"] == pytest.approx(5.5, abs=0.4)
        assert skills["easy"]["target"] == pytest.approx(4.0, abs=0.5)
        for _ in range(16):
            doors.mean(15, skill="even")
            doors.mean(10, skill="easy")
            skills = doors.learn(role)
    goals = {skill: skills[skill]["target"] for skill in ("easy", "even")}
    assert doors.mean(300, skill="even") == pytest.approx(goals["even"], abs=0.5)
    # Random valid doors score 5, and no bot plays below that, however bad the people are.
    assert skills["easy"]["noise"] > skills["even"]["noise"] > 0.5
    assert doors.mean(300, skill="easy") == pytest.approx(5.0, abs=0.4)
    assert doors.mean(20) == ROUNDS, "a game that asks for nothing gets the bot as released"
    catalogue = open_deployment(doors.data).registry.catalogue("doors")
    assert catalogue.number < 30, "noise is published rarely"


def test_a_bot_below_the_average_person_is_even_as_released(doors: Doors):
    release(doors, constant_policy(0, SPEC, "categorical"))
    for _ in range(10):
        doors.play("ada", wisdom=1.0)
        doors.play("bob", wisdom=0.9)
    doors.mean(25)
    with learner(doors) as role:
        for _ in range(4):
            doors.mean(10, skill="even")
            doors.mean(10, skill="easy")
            skills = doors.learn(role)
    assert {skill["noise"] for skill in skills.values()} == {0.0}


def test_episodes_at_a_skill_or_a_temperature_never_enter_the_gate(doors: Doors):
    release(doors, seer())
    release(doors, seer(), "canary")
    with learner(doors) as role:
        doors.mean(30, skill="even")
        doors.mean(30, temperature=100.0)
        doors.learn(role)
        status = role.status()["games"]["doors"]
        assert (status["canary_episodes"], status["returns"]) == (0, {})
        assert status["skills"]["even"]["episodes"] == 15, "the newest half is shown"
        doors.mean(30, skill="hard")
        doors.learn(role)
        played = role.status()["games"]["doors"]["returns"]
        assert sum(row["episodes"] for row in played.values()) == 30
        assert {row["mean"] for row in played.values()} == {float(ROUNDS)}


def test_episodes_in_which_a_bot_explores_never_enter_the_gate(doors: Doors):
    release(doors, seer())
    release(doors, seer(), "canary")
    with learner(doors, replace(CONFIG, explore_share=0.5)) as role:
        doors.play("ada", wisdom=1.0)
        doors.learn(role)
        scores = [doors.play("bot") for _ in range(100)]
        doors.learn(role)
        status = role.status()["games"]["doors"]
    played = status["returns"].values()
    assert sum(row["episodes"] for row in played) == pytest.approx(50, abs=20)
    assert {row["mean"] for row in played} == {float(ROUNDS)}, "only those as released"
    assert np.mean(scores) < ROUNDS - 0.1, "a tenth of the decisions of an exploring bot are random"
    assert {skill["episodes"] for skill in status["skills"].values()} == {0}
    stored = open_deployment(doors.data).registry.catalogue("doors").noise[SPEC.schema]
    assert stored.explore_share == 0.5


def test_status_shows_the_noise_and_the_returns_of_each_skill(doors: Doors):
    release(doors, seer())
    for _ in range(5):
        doors.play("ada", wisdom=1.0)
        doors.play("bob", wisdom=0.0)
    doors.mean(4, skill="even")
    with learner(doors) as role:
        doors.learn(role)
        text = _skills(role.status()["games"]["doors"])
    assert text.startswith("even ")
    assert text.endswith(" in its last 2 episodes (target 5, noise now 0.25)")
