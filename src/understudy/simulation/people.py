"""Simulated people: play a game through the real client, in processes of their own, with a ledger.

Run as `python -m understudy.simulation.people`, with settings as JSON in the first line of its
standard input. It prints a line of JSON a few times a second and stops when its standard input
closes, so that it never outlives its parent.
"""

import json
import math
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from understudy.act.vector import make_env
from understudy.backends.data import DataFolder, stats
from understudy.client.connect import Address, ClientConfig, Game, connect, local_link
from understudy.client.episode import Episode, Recorder
from understudy.client.http import HttpLink
from understudy.client.sender import SenderConfig
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.experience.game import spec_from_gymnasium
from understudy.games import rally
from understudy.games.rally import Ints
from understudy.platform.children import Child, python_module, report, stop_with_parent
from understudy.ports import Link
from understudy.simulation.ledger import LedgerLink

MAX_PROCESSES = 4
BOT_SHARE = 0.5
"""The share of episodes that a person in a single-player env leaves to the bot."""
SKILLS = tuple(rally.SKILLS[name] for name in ("beginner", "casual", "good", "beginner", "casual"))
"""Skills of the people who play rally, in turn; more of them are weak than strong."""
_REPORT_EVERY_S = 0.1
_SHORTEST_WAIT_S = 0.002
"""At higher rates, several rounds follow each wait, which avoids busy waiting."""
_STOP_S = 30.0


# --- People ---------------------------------------------------------------------------------------


class Person(Protocol):
    """A simulated player; each step makes one decision and records `rows_per_step` rows."""

    rows_per_step: int
    points: dict[str, list[int]]
    """Points won by the bot and points played, against this person, by bot name."""

    def step(self) -> None: ...
    def view(self) -> dict[str, Any]:
        """Return the state to draw."""
        ...


class Tester:
    """A script that takes random actions in an env, through a recorder."""

    rows_per_step = 1

    def __init__(self, env: "gymnasium.Env[Any, Any]", recorder: Recorder, seed: int) -> None:
        self._env = env
        self._recorder = recorder
        self._seed = seed
        self.points: dict[str, list[int]] = {}
        env.action_space.seed(seed)
        self._begin()

    def _begin(self) -> None:
        obs, _ = self._env.reset(seed=self._seed)
        self._seed += 1_000_003
        self._recorder.reset(obs)

    def step(self) -> None:
        action = self._env.action_space.sample()
        obs, reward, terminated, truncated, _ = self._env.step(action)
        self._recorder.step(action, float(reward), obs, terminated, truncated, by="script")
        if terminated or truncated:
            self._begin()

    def view(self) -> dict[str, Any]:
        return {}


class Solo:
    """A person of some skill in a single-player env, who leaves some episodes to the bot."""

    rows_per_step = 1

    def __init__(
        self,
        game: Game,
        name: str,
        env_id: str,
        rng: np.random.Generator,
        *,
        bot_share: float = BOT_SHARE,
        choose: Callable[[Any], Any] | None = None,
    ) -> None:
        """`choose` returns the person's action for an observation; the default has some skill."""
        self._game = game
        self._name = name
        self._rng = rng
        self._bot_share = bot_share
        self._choose = choose or self._try
        self._env = make_env(env_id)
        self._env.action_space.seed(int(rng.integers(1 << 31)))
        self._knows_cartpole = env_id == "CartPole-v1"
        # From people who mostly explore to people who play well.
        self._skill = float(rng.uniform(0.45, 0.9))
        self.points: dict[str, list[int]] = {}
        self._begin()

    def _try(self, obs: Any) -> Any:
        if self._rng.random() < self._skill and self._knows_cartpole:
            # Beginners push towards the side where the pole leans, whatever its speed.
            return int(obs[2] > 0)
        return self._env.action_space.sample()

    def _begin(self) -> None:
        self._obs, info = self._env.reset(seed=int(self._rng.integers(1 << 30)))
        self._action_mask = info.get("action_mask")
        self._is_bots = bool(self._rng.random() < self._bot_share)
        self._episode: Episode = self._game.episode(self._name)

    def step(self) -> None:
        episode = self._episode
        obs = self._obs
        action_mask = self._action_mask
        if self._is_bots:
            action = episode.act(obs, action_mask=action_mask, otherwise=self._choose)
        else:
            action = self._choose(obs)
            episode.acted(obs, action, action_mask=action_mask)
        self._obs, reward, terminated, truncated, info = self._env.step(action)
        self._action_mask = info.get("action_mask")
        episode.reward(float(reward))
        if terminated or truncated:
            episode.end(self._obs, action_mask=self._action_mask, truncated=not terminated)
            self._begin()

    def view(self) -> dict[str, Any]:
        return {}


class Match:
    """A person and the current bot on a rally court, serve after serve; both are recorded.

    The person's number determines the seat and the skill.
    """

    rows_per_step = 2

    def __init__(self, game: Game, name: str, number: int, rng: np.random.Generator) -> None:
        if game.spec.game != rally.GAME_ID:
            raise ConfigError(
                f"{game.spec.game} has one seat, and a match needs two; play rally instead"
            )
        self._game = game
        self._name = name
        self._rng = rng
        self._seat = number // 2 % 2
        self._skill = SKILLS[number % len(SKILLS)]
        self._match = str(uuid.UUID(bytes=rng.bytes(16), version=4))
        self.points: dict[str, list[int]] = {}
        self._score = [0, 0]
        self._serve()

    def _serve(self) -> None:
        self._seed = int(self._rng.integers(1 << 31))
        self._decisions = 0
        self.court = rally.serve(self._seed)
        self._person = self._episode(self._seat, "bot")
        self._bot = self._episode(1 - self._seat, "person")

    def _episode(self, seat: int, opponent: str) -> Episode:
        return self._game.episode(
            self._name, seat=seat, opponents=(opponent,), match=self._match, seed=self._seed
        )

    def step(self) -> None:
        court = self.court
        seat = self._seat
        drawn = int(self._rng.integers(1 << 32))
        person_action = rally.scripted(Ints, rally.seat_view(court, seat), self._skill, drawn)
        self._person.acted(rally.observation(court, seat), person_action)
        bot_action = int(self._bot.act(rally.observation(court, 1 - seat)))
        self.court, point = rally.step(
            Ints,
            court,
            *((person_action, bot_action) if seat == 0 else (bot_action, person_action)),
        )
        self._decisions += 1
        reward = float(point if seat == 0 else -point)
        self._person.reward(reward)
        self._bot.reward(-reward)
        if point or self._decisions >= rally.MAX_DECISIONS:
            self._end(reward)

    def _end(self, reward: float) -> None:
        for episode, seat, won in (
            (self._person, self._seat, reward),
            (self._bot, 1 - self._seat, -reward),
        ):
            result = "win" if won > 0 else "loss" if won < 0 else None
            episode.end(rally.observation(self.court, seat), truncated=reward == 0, result=result)
        if reward and self._bot.model:
            points = self.points.setdefault(self._bot.model, [0, 0])
            points[0] += reward < 0
            points[1] += 1
        self._score[0] += reward > 0
        self._score[1] += reward < 0
        self._serve()

    def view(self) -> dict[str, Any]:
        return {"court": list(self.court), "seat": self._seat, "score": list(self._score)}


# --- A process of people --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeopleSettings:
    """Settings of a process of people."""

    data: str
    """Folder of their spool and ledger, and of the stream they record into without `url`."""
    env_id: str
    names: list[str]
    url: str = ""
    """The gateway they play through, with bots; without it, testers record into the data folder."""
    key: str = ""
    first_number: int = 0
    """Number of the first person; numbers determine skills and seats."""
    seed: int = 0
    rate: float = 150.0
    """Decisions per second and person; 0 means no limit."""
    seconds: float = math.inf
    linger_s: float = 0.25
    env_kwargs: dict[str, Any] = field(default_factory=dict)


def play_rounds(
    play: Callable[[], None],
    report_progress: Callable[[int], None],
    *,
    stop: threading.Event,
    rate: float,
    seconds: float = math.inf,
) -> int:
    """Play `rate` rounds a second (0: no limit) and report; return the number of rounds."""
    began_s = report_s = time.monotonic()
    played = 0
    while not stop.is_set() and (now_s := time.monotonic()) - began_s < seconds:
        if now_s >= report_s:
            report_s = now_s + _REPORT_EVERY_S
            report_progress(played)
        if rate and played > (now_s - began_s) * rate:
            stop.wait(max(_SHORTEST_WAIT_S, min(0.5 / rate, 0.05)))
            continue
        play()
        played += 1
    return played


def play_on(
    game: Game,
    ledger: LedgerLink,
    people: Sequence[Person],
    *,
    rate: float,
    seconds: float = math.inf,
    close_s: float = 10.0,
) -> None:
    """In a child process: play and report until time is up or the parent stops it, then flush."""
    rows = sum(person.rows_per_step for person in people)

    def play() -> None:
        for person in people:
            person.step()

    def report_progress(played: int, **more: Any) -> None:
        points: dict[str, list[int]] = {}
        for person in people:
            for bot, (won, of) in person.points.items():
                total = points.setdefault(bot, [0, 0])
                total[0] += won
                total[1] += of
        counts = game.stats()
        report(
            {
                "recorded": played * rows,
                "acked": ledger.acked_steps,
                "dropped": counts.dropped_steps,
                "failed_sends": counts.failed_sends,
                "last_error": counts.last_error,
                "bot": counts.bot,
                "last_bot_error": counts.last_bot_error,
                "refused_bots": counts.refused_bots,
                "points": points,
                "view": people[0].view(),
                **more,
            }
        )

    played = play_rounds(play, report_progress, stop=stop_with_parent(), rate=rate, seconds=seconds)
    flushed = game.close(timeout_s=close_s)
    latencies_ms = np.round(np.asarray(ledger.latencies_s) * 1000, 3).tolist()
    report_progress(played, done=True, flushed=flushed, latencies_ms=latencies_ms)


def main(settings: PeopleSettings) -> None:
    """Connect, create these people, and play."""
    data = DataFolder(Path(settings.data))
    is_served = bool(settings.url)
    spec = spec_from_gymnasium(make_env(settings.env_id, settings.env_kwargs))
    link: Link = (
        HttpLink(Address(settings.url, settings.key), spec.game)
        if is_served
        else local_link(data.root, spec, SystemClock())
    )
    ledger = LedgerLink(link, data.ledger)
    sender = SenderConfig(linger_s=settings.linger_s)
    config = ClientConfig(link=ledger, spool=data.spool, sender=sender)
    game = connect(spec, consent="granted", config=config)
    chances = np.random.default_rng(settings.seed).spawn(len(settings.names))
    people: list[Person] = []
    for at, name in enumerate(settings.names):
        if not is_served:
            env = make_env(settings.env_id, settings.env_kwargs)
            people.append(Tester(env, game.recorder(name), settings.seed + 7919 * at))
        elif settings.env_id == rally.GAME_ID:
            people.append(Match(game, name, settings.first_number + at, chances[at]))
        else:
            people.append(Solo(game, name, settings.env_id, chances[at]))
    close_s = 20.0 if is_served else 10.0
    play_on(game, ledger, people, rate=settings.rate, seconds=settings.seconds, close_s=close_s)


class Groups:
    """Processes of people, each with a client and a ledger of its own."""

    def __init__(self, name: str, shares: Iterable[PeopleSettings]) -> None:
        command = python_module("understudy.simulation.people")
        self.children = [
            Child(f"{name} {at}", command, first_line=json.dumps(asdict(share)))
            for at, share in enumerate(shares)
        ]

    def total(self, name: str) -> int:
        return sum(int(child.latest.get(name, 0)) for child in self.children)

    def check(self, fine: Sequence[int | None] = (None, 0)) -> None:
        """Raise if a process ended with an exit code that is not in `fine`."""
        for child in self.children:
            if child.exit_code not in fine:
                raise UnderstudyError(f"{child.name} failed: {child.errors.strip()}")

    def stop(self, timeout_s: float = 40.0, *, also: Sequence[Child] = ()) -> None:
        """Stop the processes once they have sent their frames; kill them after the timeout."""
        children = [*self.children, *also]
        for child in children:
            child.stop()
        deadline_s = time.monotonic() + timeout_s
        for child in children:
            if child.wait(max(0.0, deadline_s - time.monotonic())) is None:
                child.kill()
                child.wait(5.0)


# --- simulate: testers, a stream and ingest -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Settings of a simulation."""

    env_id: str
    players: int = 4
    seconds: float = 10.0
    seed: int = 0
    rate: float = 0.0
    """Steps per second and player; 0 means no limit."""
    linger_s: float = 1.0
    ingest: bool = True
    env_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.players <= 10_000:
            raise ConfigError(f"--players is {self.players}; pass a number from 1 to 10000")
        if not 0 < self.seconds <= 7 * 86_400:
            raise ConfigError(
                f"--seconds is {self.seconds}; pass a number above 0 and up to 604800 (a week)"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; pass a number of at least 0")
        if not 0 <= self.rate < 1e9 or not 0 < self.linger_s < 1e9:
            raise ConfigError(
                f"--rate {self.rate}, --linger {self.linger_s}: pass a rate of at least 0 and a "
                "linger above 0"
            )

    def shares(self, data: DataFolder) -> Iterator[PeopleSettings]:
        """Yield the settings of each process of players."""
        count = min(self.players, MAX_PROCESSES)
        names = [f"simulated-{self.seed}-{at}" for at in range(self.players)]
        for at in range(count):
            yield PeopleSettings(
                data=str(data.root),
                env_id=self.env_id,
                names=names[at::count],
                seconds=self.seconds,
                seed=self.seed + 104_729 * at,
                rate=self.rate,
                linger_s=self.linger_s,
                env_kwargs=self.env_kwargs,
            )


@dataclass(frozen=True, slots=True)
class SimulationProgress:
    """Progress of a simulation."""

    elapsed_s: float
    recorded_steps: int
    acked_steps: int
    stored_steps: int
    lag_s: float
    players_alive: int
    ingest_alive: bool


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """Result of a simulation."""

    recorded_steps: int
    acked_steps: int
    stored_steps: int
    dropped_steps: int
    unsent_steps: int
    steps_per_s: float
    ack_p50_ms: float
    ack_p99_ms: float
    refused_frames: int
    died: int
    ingest_restarts: int


class Simulation:
    """Context manager that runs testers, and ingest unless it runs already, in real processes."""

    def __init__(self, data: DataFolder, config: SimulateConfig) -> None:
        # Created here once, so that an invalid id or keyword fails before any process starts.
        env = make_env(config.env_id, config.env_kwargs)
        try:
            spec_from_gymnasium(env)
        finally:
            env.close()
        data.root.mkdir(parents=True, exist_ok=True)
        self._data = data
        self._config = config
        self._steps_before = stats(data)["steps"]
        self.uses_running_ingest = config.ingest and data.has_writer()
        self._ingest = (
            self._start_ingest() if config.ingest and not self.uses_running_ingest else None
        )
        self._ingest_restarts = 0
        self._stored_before = 0
        self._players = Groups("players", config.shares(data))
        self._began_s = time.monotonic()

    def _start_ingest(self) -> Child:
        return Child("ingest", python_module("understudy.platform.ingest", str(self._data.root)))

    def progress(self) -> SimulationProgress:
        """Return the figures that the processes last reported."""
        stored = self._ingest.latest if self._ingest else {}
        recorded = self._players.total("recorded")
        if not recorded:
            self._began_s = time.monotonic()  # still starting
        return SimulationProgress(
            elapsed_s=time.monotonic() - self._began_s,
            recorded_steps=recorded,
            acked_steps=self._players.total("acked"),
            stored_steps=self._stored_before + stored.get("stored", 0),
            lag_s=stored.get("lag_s", 0.0),
            players_alive=sum(child.exit_code is None for child in self._players.children),
            ingest_alive=self._ingest is not None and self._ingest.exit_code is None,
        )

    def run(
        self, show: Callable[[SimulationProgress], None], *, every_s: float = 0.1
    ) -> SimulateResult:
        """Wait for the players, restarting ingest if it ends, then let ingest store the rest."""
        while any(child.exit_code is None for child in self._players.children):
            if self._ingest is not None and self._ingest.exit_code is not None:
                if self._ingest_restarts >= 5:
                    raise UnderstudyError(
                        f"the ingest process keeps exiting; correct what its output reports:\n"
                        f"{self._ingest.errors}"
                    )
                self._stored_before += self._ingest.latest.get("stored", 0)
                self._ingest_restarts += 1
                self._ingest = self._start_ingest()
            show(self.progress())
            time.sleep(every_s)
        for child in self._players.children:
            child.wait(1.0)
        if self._ingest is not None:
            self._ingest.stop()
            deadline = time.monotonic() + _STOP_S
            while self._ingest.wait(every_s) is None and time.monotonic() < deadline:
                show(self.progress())
        progress = self.progress()
        show(progress)
        self._players.check((0, -9, -15, -2))
        last = [child.latest for child in self._players.children]
        latencies_ms = np.array(
            [ms for child in last for ms in child.get("latencies_ms", [])] or [0.0]
        )
        dropped = self._players.total("dropped")
        return SimulateResult(
            recorded_steps=progress.recorded_steps,
            acked_steps=progress.acked_steps,
            stored_steps=stats(self._data)["steps"] - self._steps_before,
            dropped_steps=dropped,
            unsent_steps=max(0, progress.recorded_steps - progress.acked_steps - dropped),
            steps_per_s=round(
                progress.acked_steps / max(min(progress.elapsed_s, self._config.seconds), 0.001), 1
            ),
            ack_p50_ms=round(float(np.percentile(latencies_ms, 50)), 3),
            ack_p99_ms=round(float(np.percentile(latencies_ms, 99)), 3),
            refused_frames=sum(self._ingest.latest.get("refusals", {}).values())
            if self._ingest
            else 0,
            died=sum(not child.get("done") for child in last),
            ingest_restarts=self._ingest_restarts,
        )

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *_: object) -> None:
        self._players.stop(8.0, also=[self._ingest] if self._ingest else [])


if __name__ == "__main__":
    try:
        main(PeopleSettings(**json.loads(sys.stdin.readline())))
    except (UnderstudyError, OSError) as error:
        sys.exit(str(error))
