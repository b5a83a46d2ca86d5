"""The closed loop in a minute: people play, a learner that has no game learns from them, and its bots play with them.

    people ─► client ─► gateway ─► stream ─► ingest ─► store ─► learner ─► registry ─► gate ─► the next bot plays

Every part is the real one, in processes of its own. What the loop promises is measured at its end: the first and the
last bot on the same held-out seeds, and every acknowledgement against the stored bytes.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from understudy.app.addresses import PAGES, page_address
from understudy.app.backends import open_store
from understudy.app.config import Config
from understudy.app.crowd.backends import Backends, standing
from understudy.app.crowd.bot_judge import BotJudge
from understudy.app.crowd.groups import Groups
from understudy.app.crowd.loop_result import LoopResult, NoBot
from understudy.app.crowd.people import PeopleSettings
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.play_web import play_key
from understudy.app.roles.platform import Platform, Standing
from understudy.app.specs import RegistrySpecs
from understudy.app.verify import Verdict, verify, verify_elsewhere
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.names import game_name_of_env
from understudy.games.rally import GAME_ID
from understudy.models.registry import Registry

Killable = Literal["learner", "ingest", "gateway"]
KILLABLE: tuple[Killable, ...] = ("learner", "ingest", "gateway")
_TICK_S = 0.1
_READY_S = _STARTED_S = 120.0
_MIN_S = 30.0
"""So long they play in any case: the second bot is seldom the best one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """What to show."""

    env_id: str = GAME_ID
    people: int = 8
    max_seconds: float = 150.0
    """When to stop, however good the bots are by then, counted from when everything runs."""
    kill: Killable | None = None
    """A role that is killed once the first bot plays; nothing may be lost by it."""
    seed: int = 0
    backends: Backends = field(default_factory=Backends)

    def __post_init__(self) -> None:
        if not 1 <= self.people <= 1_000:
            raise ConfigError(f"--players is {self.people}; give a number from 1 to 1000")
        if not 5 <= self.max_seconds <= 86_400:
            raise ConfigError(f"--seconds is {self.max_seconds}; give at least 5, such as 150")
        if self.kill is not None and self.kill not in KILLABLE:
            raise ConfigError(f"--kill is {self.kill}; give one of {', '.join(KILLABLE)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How the loop stands, for whoever watches."""

    elapsed_s: float
    recorded_steps: int
    acked_steps: int
    stored_steps: int
    phase: str
    champion: int
    canary: int
    updates: int = 0
    """Of the learner."""
    lag_s: float | None = None
    """How long a step takes from the gateway to the store, by the last look."""
    points: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Points that each bot won, and played, by its name; only in a match."""
    view: Mapping[str, Any] = field(default_factory=dict)
    """What one of the players sees, for drawing."""
    play_s: float = 0.0
    """How long everything has run, which is what is limited."""
    said: str = ""
    """Something that just happened, in words; empty most of the time."""


Show = Callable[[Look], None]


class Loop:
    """One closed loop on a data folder; `run` goes from the first step to the measured result."""

    def __init__(
        self, data: DataFolder, config: LoopConfig, show: Show, *, scratch: Path | None = None,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`scratch`: where servers that are started for it have their files; `on_begin`: called once all is checked."""
        self._data, self._config, self._show, self._on_begin = data, config, show, on_begin
        self._scratch = scratch or data.root / "servers"
        self._game = str(game_name_of_env(config.env_id))
        self._said: list[str] = []
        self._began_s = time.monotonic()
        self._all_run_s: float | None = None
        self._killed = False
        self._stored = _Running()

    def run(self) -> LoopResult | NoBot:
        """Play until a bot is clearly better than the first, or time is up; then prove what was promised."""
        backends, judge = self._config.backends, BotJudge(self._config.env_id, self._config.seed)
        with standing(backends, self._data.root, self._scratch, self._say) as settings:
            self._began_s = time.monotonic()
            return self._play(settings, judge)

    def _say(self, said: str) -> None:
        """Something that happens before anything runs."""
        nothing = Look(
            elapsed_s=self._elapsed_s, recorded_steps=0, acked_steps=0, stored_steps=0, phase=said, champion=0, canary=0
        )  # fmt: skip
        self._show(replace(nothing, said=said))

    def _play(self, settings: Config, judge: BotJudge) -> LoopResult | NoBot:
        opened = open_deployment(self._data, models=settings.models.url)
        registry = opened.registry
        self._on_begin()
        with Platform(settings, tell=self._tell) as platform:
            self._wait_until_ready(platform)
            if self._config.env_id in PAGES:
                address = page_address(platform.url or "", self._game, key=play_key(opened, self._game))
                self._said.append(f"play along in a browser: {address}")
            people = self._people(platform)
            try:
                self._watch(platform, people, registry, judge)
            finally:
                people.stop()
            platform.supervisor.stop()
            restarts = sum(one.restarts for one in platform.supervisor.standings.values())
        return self._result(judge, self._prove(settings, registry), restarts)

    def _prove(self, settings: Config, registry: Registry) -> Verdict:
        if not settings.store.url:
            return verify(self._data, config=settings)
        with closing(open_store(settings.store.url, specs=RegistrySpecs(registry))) as store:
            return verify_elsewhere(self._data, store, live=False)

    def _people(self, platform: Platform) -> Groups:
        assert platform.keys is not None
        assert platform.url is not None
        config = self._config
        common = PeopleSettings(
            data=str(self._data.root), url=platform.url, key=platform.keys.key, env_id=config.env_id, names=[],
            seed=config.seed,
        )  # fmt: skip
        return Groups(common, config.people)

    def _tell(self, standing: Standing, said: str) -> None:
        if standing.state in ("waiting", "running") and self._killed:
            self._said.append(f"{standing.role.name} {said}")

    def _wait_until_ready(self, platform: Platform) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not platform.supervisor.is_ready:
            if time.monotonic() > deadline_s:
                raise UnderstudyError(f"the platform was not ready within {_READY_S:.0f} s; try `understudy doctor`")
            platform.supervisor.step()
            time.sleep(_TICK_S / 2)

    def _watch(self, platform: Platform, people: Groups, registry: Registry, judge: BotJudge) -> None:
        while self._play_s < self._config.max_seconds:
            platform.supervisor.step()
            has_learner = bool(platform.supervisor.standings["learner"].report)
            if self._all_run_s is None and (has_learner or self._elapsed_s > _STARTED_S):
                self._all_run_s = (
                    time.monotonic()
                )  # on a slow machine starting up takes long, and says nothing about the bots
            people.check()
            champion = registry.catalogue(self._game).points_to("champion")
            if champion and champion not in judge.models:
                found = judge.look(champion, registry.policy(self._game, champion))
                self._said.append(f"{self._game}/{champion} is champion: {judge.words(found)}")
                self._kill_if_due(platform)
            self._look(platform, people, registry)
            has_shown = judge.has_improved and (self._config.kill is None or self._killed)
            if has_shown and self._play_s >= _MIN_S:
                return
            time.sleep(_TICK_S)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def _play_s(self) -> float:
        """How long everything has run."""
        return 0.0 if self._all_run_s is None else time.monotonic() - self._all_run_s

    def _kill_if_due(self, platform: Platform) -> None:
        child = platform.supervisor.standings[self._config.kill].child if self._config.kill else None
        if child is not None and not self._killed:
            self._killed = True
            self._said.append(f"kill -9 of the {self._config.kill} (process {child.pid})")
            child.kill()

    def _look(self, platform: Platform, people: Groups, registry: Registry) -> None:
        standings = platform.supervisor.standings
        learner, ingest = standings["learner"].report, standings["ingest"].report
        now, game = registry.catalogue(self._game), learner.get("games", {}).get(self._game, {})
        look = Look(
            elapsed_s=self._elapsed_s, recorded_steps=people.total("recorded"), acked_steps=people.total("acked"),
            stored_steps=self._stored.total(ingest.get("stored", 0)), updates=int(learner.get("updates", 0)),
            phase=f"{game['phase']}: {game['why']}" if game else "the learner is starting",
            champion=now.points_to("champion"), canary=now.points_to("canary"), lag_s=ingest.get("lag_s"),
            points=people.points(), view=people.view(), play_s=self._play_s,
        )  # fmt: skip
        for said in [*self._said, ""]:
            self._show(replace(look, said=said))
        self._said.clear()

    def _result(self, judge: BotJudge, verdict: Verdict, restarts: int) -> LoopResult | NoBot:
        seconds = round(self._elapsed_s, 1)
        if not judge.models:
            return NoBot(
                max_seconds=self._config.max_seconds, seconds=seconds, kill=self._config.kill, verdict=verdict,
                restarts=restarts,
            )  # fmt: skip
        return LoopResult(
            first=judge.first, last=judge.last, is_match=judge.is_match, judged_on=judge.told,
            improved=judge.has_improved, verdict=verdict, model_versions=judge.models,
            killed=self._config.kill if self._killed else None, restarts=restarts, seconds=seconds,
        )  # fmt: skip


class _Running:
    """A count that a process begins again when it is restarted, as one that goes on."""

    def __init__(self) -> None:
        self._before, self._last = 0, 0

    def total(self, count: int) -> int:
        if count < self._last:
            self._before += self._last
        self._last = count
        return self._before + count
