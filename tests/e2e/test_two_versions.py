"""Two versions of a game, with different observations, through the whole platform.

Each has its own bot: an update takes no bot from installs of the old version, and a version that
was registered but not played changes nothing.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from understudy.backends.deployment import open_deployment
from understudy.client.connect import Address, ClientConfig, Game, connect
from understudy.client.http import HttpLink
from understudy.client.sender import SenderConfig
from understudy.experience.game import GameSpec, game_spec
from understudy.models.catalogue import Catalogue
from understudy.platform.config import Config, GatewaySection, LearnerSection
from understudy.platform.platform import Platform

GAME = "two-versions"
ACTIONS = ["left", "right"]
OLD = game_spec(GAME, obs=2, actions=ACTIONS)
NEW = game_spec(GAME, obs=3, actions=ACTIONS)
UNPLAYED = game_spec(GAME, obs=4, actions=ACTIONS)
FIRST_STEPS = 200
TIMEOUT_S = 120.0


class Stage:
    """A platform, and installs of the game that play on it."""

    def __init__(self, folder: Path, platform: Platform) -> None:
        self._folder = folder
        self._platform = platform
        self._registry = open_deployment(platform.data).registry
        self._rng = np.random.default_rng(0)
        self.wait(lambda: platform.supervisor.is_ready, "the platform is ready")
        assert platform.url is not None
        assert platform.keys is not None
        self.address = Address(platform.url, platform.keys.key)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited {TIMEOUT_S:.0f} s, and still not: {what}"
            self._platform.supervisor.step()
            time.sleep(0.02)

    def install(self, name: str, spec: GameSpec) -> Game:
        config = ClientConfig(spool=self._folder / name, sender=SenderConfig(linger_s=0.1))
        address = self.address
        return connect(spec, url=address.url, key=address.key, consent="granted", config=config)

    def play(self, game: Game, spec: GameSpec, n_episodes: int) -> None:
        """A person plays episodes of ten steps."""
        (space,) = spec.obs.values()
        for _ in range(n_episodes):
            with game.episode("ada") as episode:
                for _ in range(10):
                    obs = self._rng.normal(size=space.shape).astype(np.float32)
                    episode.acted(obs, int(obs[0] > 0))
                    episode.reward(1.0)
                episode.end()

    def bot_of(self, game: Game, spec: GameSpec) -> str:
        """The bot that decides in a new episode of this install."""
        (space,) = spec.obs.values()
        with game.episode("bot", consent="denied") as episode:
            assert episode.act(np.zeros(space.shape, np.float32)) in (0, 1)
            return episode.model

    def catalogue(self) -> Catalogue:
        return self._registry.catalogue(GAME)


def test_each_version_of_a_game_keeps_its_own_bot(tmp_path: Path):
    """May take over 20 seconds: one platform trains the first bots of two versions."""
    config = Config(
        data=str(tmp_path / "D"),
        gateway=GatewaySection(port=0),
        # No candidates: only first bots matter here.
        learner=LearnerSection(first_steps=FIRST_STEPS, bc_updates=64, growth=1_000.0),
    )
    with Platform(config, on_state_change=lambda *_: None) as platform:
        stage = Stage(tmp_path, platform)
        old = stage.install("old", OLD)
        stage.play(old, OLD, 30)
        stage.wait(lambda: old.wait_for_bot(0.05), "the old version has a bot")
        assert stage.bot_of(old, OLD) == f"{GAME}/1"

        # A version that was registered but not played.
        with contextlib.closing(HttpLink(stage.address, GAME)) as link:
            link.register(UNPLAYED)
        with stage.install("unplayed", UNPLAYED) as unplayed:
            assert not unplayed.wait_for_bot(0.5)
            assert stage.bot_of(unplayed, UNPLAYED) == ""
        with stage.install("later", OLD) as later:
            stage.wait(lambda: later.wait_for_bot(0.05), "the old version's bot is still served")
            assert stage.bot_of(later, OLD) == f"{GAME}/1"

        # The new version has no bot yet, which is no error, and then one of its own.
        new = stage.install("new", NEW)
        assert not new.wait_for_bot(0.5)
        assert (new.stats().refused_bots, new.stats().last_bot_error) == (0, "")
        stage.play(new, NEW, 30)
        stage.wait(lambda: new.wait_for_bot(0.05), "the new version has a bot")
        assert stage.bot_of(new, NEW) == f"{GAME}/2"

        now = stage.catalogue()
        assert now.model_of("champion", OLD.schema) == 1
        assert now.model_of("champion", NEW.schema) == 2
        assert now.model_of("champion", UNPLAYED.schema) == 0
        assert now.model_of("champion") == 2, "without a schema it is the newest"

        # Both play on, in running games, after a restart, and in new installs.
        assert stage.bot_of(old, OLD) == f"{GAME}/1"
        old.close()
        new.close()
        for name, spec, bot in (
            ("old", OLD, f"{GAME}/1"),
            ("new-install-of-old", OLD, f"{GAME}/1"),
            ("new-install-of-new", NEW, f"{GAME}/2"),
            ("new", OLD, f"{GAME}/1"),  # downgraded: the folder has the new version's bot
        ):
            with stage.install(name, spec) as game:
                stage.wait(functools.partial(game.wait_for_bot, 0.05), f"{name} has a bot")
                assert stage.bot_of(game, spec) == bot
                assert game.stats().refused_bots == 0
