"""The closed loop in a minute: simulated people play, a learner trains bots, the bots play too.

    people ─► client ─► gateway ─► stream ─► ingest ─► store ─► learner
        ─► registry ─► gate ─► the next bot plays

Every part is the real one; roles and people run in processes of their own. At the end, the loop
evaluates the first and the last bot on the same held-out seeds, and checks every acknowledgement
against the stored bytes.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from understudy.act.evaluate import evaluate
from understudy.act.vector import make_envs
from understudy.backends.addresses import create_stream, init_store, open_store, open_stream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.backends.specs import RegistrySpecs
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.names import game_name_of_env
from understudy.core.statistics import Estimate, mean
from understudy.dev.recipes import BUCKET
from understudy.dev.servers import (
    Server,
    aws_location,
    default_folder,
    host_location,
    server_status,
    start,
)
from understudy.games.rally import GAME_ID, OPPONENT
from understudy.ingest.specs import SpecFolder
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.platform.config import (
    Config,
    GateSection,
    GatewaySection,
    IngestSection,
    LearnerSection,
    ModelsSection,
    StoreSection,
    StreamSection,
)
from understudy.platform.platform import Platform, RoleStatus
from understudy.platform.play_page import PAGES, page_address, play_key
from understudy.simulation.people import Groups, PeopleSettings
from understudy.simulation.verify import Verification, verify, verify_remote_store

Killable = Literal["learner", "ingest", "gateway"]
KILLABLE: tuple[Killable, ...] = ("learner", "ingest", "gateway")
SERVES = 400
"""Number of serves that evaluate a champion of rally, against one scripted opponent."""
EPISODES = 100
_TICK_S = 0.1
_READY_S = _STARTED_S = 120.0


# --- Backends -------------------------------------------------------------------------------------

PARTS: Mapping[str, Mapping[str, str]] = {
    "stream": {"file": "", "kinesis": "kinesalite", "kafka": "kafka"},
    "store": {"local": "", "cassandra": "cassandra"},
    "models": {"folder": "", "s3": "s3"},
}
"""The local server that each option needs, or "" for none. Kinesis is kinesalite, which handles
more load than kinesis-local; it is weak at resharding, which is not needed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """The backends of the loop, as options of `PARTS` or as URLs."""

    stream: str = "file"
    store: str = "local"
    models: str = "folder"
    ingest: str = "native"

    def __post_init__(self) -> None:
        for name, servers_by_option in PARTS.items():
            value = getattr(self, name)
            if value not in servers_by_option and "://" not in value:
                raise ConfigError(
                    f"--{name} is {value!r}; pass one of {', '.join(servers_by_option)}, or a URL"
                )
        if self.ingest == "spark" and self.store == "local":
            raise ConfigError(
                "--ingest spark writes with many processes, but a local store allows one writer; "
                "pass --store cassandra"
            )


@contextmanager
def running(
    backends: Backends, data: Path, scratch: Path, announce: Callable[[str], None]
) -> Iterator[Config]:
    """Yield the config of a platform on these backends; servers started here stop at the end.

    On servers that were already running, a stream, a keyspace and a folder remain, each named demo
    plus a random suffix. A backend that cannot be opened fails before the data folder is written.
    """
    if backends.ingest == "spark":
        from understudy.ingest.spark import require_spark  # imported late: seldom needed

        require_spark()
    with ExitStack() as opened:
        servers: dict[str, Server] = {}
        for part, servers_by_option in PARTS.items():
            if name := servers_by_option.get(getattr(backends, part)):
                servers[name] = _server(name, scratch, opened, announce)
        suffix = secrets.token_hex(4)
        stream, store, models = (
            address(getattr(backends, part), servers, suffix) for part in PARTS
        )
        if stream:
            open_stream(stream, DataFolder(data)).close()
        if store:
            open_store(store, specs=SpecFolder(DataFolder(data).games)).close()
        yield Config(
            data=str(data),
            gateway=GatewaySection(port=0),
            gate=GateSection(first_share=0.5),
            # A minute is too short for iql and long clones; and bots that play as often wrong as
            # people leave room for a visible improvement. dqn improves by the play of its own bots.
            learner=LearnerSection(
                bc_updates=512,
                improve_with="dqn",
                improve_steps=1,
                temperature=1.0,
                people_share=0.0,
            ),
            stream=StreamSection(url=stream),
            store=StoreSection(url=store),
            models=ModelsSection(url=models),
            ingest=IngestSection(engine="spark" if backends.ingest == "spark" else "native"),
        )


def _server(name: str, scratch: Path, opened: ExitStack, announce: Callable[[str], None]) -> Server:
    """Return a running server, or start one that stops with the loop."""
    status = server_status(name, default_folder())
    if status.state == "running" and status.server is not None:
        announce(f"{name} runs at {status.server.address}")
        return status.server
    announce(f"starting {name}")
    server = opened.enter_context(start(name, scratch / name))
    announce(f"{name} runs at {server.address} (process {server.pid})")
    return server


def address(option: str, servers: Mapping[str, Server], suffix: str) -> str:
    """Create the backend for an option of `PARTS` and return its URL; empty for the data folder."""
    match option:
        case "kinesis":
            url = aws_location(servers["kinesalite"], option, f"demo-{suffix}").url
            create_stream(url, partitions=2)
        case "kafka":
            url = host_location(servers[option], option, f"demo-{suffix}").url
            create_stream(url, partitions=2)
        case "cassandra":
            url = host_location(servers[option], option, f"demo_{suffix}", replication="1").url
            init_store(url)
        case "s3":
            url = aws_location(servers[option], option, BUCKET, f"demo-{suffix}").url
        case "file" | "local" | "folder":
            url = ""
        case _:
            url = option
    return url


# --- Evaluation of the bots -----------------------------------------------------------------------


class BotJudge:
    """Evaluates every champion in the same held-out episodes, since the learner has no game."""

    def __init__(self, env_id: str, seed: int) -> None:
        self.is_match = env_id == GAME_ID
        episodes = SERVES if self.is_match else EPISODES
        self.judged_on = (
            f"{SERVES} serves against a {OPPONENT} scripted opponent"
            if self.is_match
            else f"{EPISODES} held-out seeds"
        )
        self._envs = make_envs(
            env_id, episodes, env_kwargs={"opponent": OPPONENT} if self.is_match else {}
        )
        self._seeds = [(1 << 31) + 1_000 * seed + at for at in range(episodes)]
        self.returns: dict[int, Estimate] = {}
        """The mean return of each champion, in order of promotion."""

    def evaluate(self, model_no: int, policy: Policy) -> str:
        """Evaluate a champion; describe its mean return, or its share of points in a match."""
        estimate = mean(evaluate(policy, self._envs, seeds=self._seeds).returns)
        self.returns[model_no] = estimate
        if not self.is_match:
            return (
                f"returns {estimate.value:.0f} ({estimate.low:.0f} to {estimate.high:.0f}) on "
                f"{self.judged_on}"
            )
        won = point_share(estimate)
        return f"wins {won.value:.0%} ({won.low:.0%} to {won.high:.0%}) of {self.judged_on}"

    @property
    def has_improved(self) -> bool:
        """Whether the newest champion's interval is above the first one's."""
        returns = list(self.returns.values())
        if len(returns) < 2 or returns[-1].low is None or returns[0].high is None:
            return False
        return returns[-1].low > returns[0].high


def point_share(points: Estimate) -> Estimate:
    """Convert a mean return of 1 per point won and -1 per point lost to a share of points."""
    ends = (points.value, points.low, points.high)
    return Estimate(*(None if end is None else (1 + end) / 2 for end in ends))  # type: ignore[arg-type]


# --- Result ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """The first and the last bot, and the check of acknowledgements against the stored bytes."""

    first: Estimate | None
    """Mean return of the first champion; None if the loop ended before the first bot."""
    last: Estimate | None
    is_match: bool
    """Whether returns are points won and lost, which can be shown as shares."""
    judged_on: str | None
    """Description of the episodes that evaluated both."""
    improved: bool
    """Whether the last bot's interval is above the first one's."""
    verification: Verification
    model_versions: list[int]
    """Champions in order of promotion."""
    killed: str | None
    restarts: int
    seconds: float
    """Since the start, including startup, which is slow on a busy machine."""

    @property
    def is_sound(self) -> bool:
        """Whether the bots improved and no step was lost or duplicated."""
        has_errors = self.verification.lost_steps or self.verification.duplicate_steps
        return self.improved and not has_errors

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            **_flat("first_return", self.first),
            **_flat("last_return", self.last),
            "improved": self.improved,
            "judged_on": self.judged_on,
            "acked_steps": self.verification.ledger_steps,
            "stored_steps": self.verification.steps,
            # All steps are players': there are no actors, and the learner does not play.
            "steps_from_players": self.verification.steps,
            "lost_steps": self.verification.lost_steps,
            "duplicate_steps": self.verification.duplicate_steps,
            "model_versions": self.model_versions,
            "killed": self.killed,
            "restarts": self.restarts,
            "seconds": self.seconds,
        }
        for name, points in (("first_share", self.first), ("last_share", self.last)):
            fields |= _flat(
                name, point_share(points) if points is not None and self.is_match else None
            )
        return fields


def _flat(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return an estimate and its interval as three rounded fields."""
    stem = name.removesuffix("_return")
    if estimate is None:
        return {name: None, f"{stem}_low": None, f"{stem}_high": None}
    low, high = (estimate.value if end is None else end for end in (estimate.low, estimate.high))
    return {
        name: round(estimate.value, 4),
        f"{stem}_low": round(low, 4),
        f"{stem}_high": round(high, 4),
    }


# --- The loop -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Settings of a closed loop."""

    env_id: str = GAME_ID
    people: int = 8
    max_seconds: float = 150.0
    """Longest time to play, counted from the moment when all roles run."""
    min_seconds: float = 30.0
    """Shortest time to play, unless `max_seconds` is less: the second bot is seldom the best."""
    kill: Killable | None = None
    """A role to kill once the first bot plays; no step may be lost."""
    seed: int = 0
    backends: Backends = field(default_factory=Backends)

    def __post_init__(self) -> None:
        if not 1 <= self.people <= 1_000:
            raise ConfigError(f"--players is {self.people}; pass a number from 1 to 1000")
        if not 5 <= self.max_seconds <= 86_400:
            raise ConfigError(
                f"--seconds is {self.max_seconds}; pass a number from 5 to 86400, such as 150"
            )
        if not 0 <= self.min_seconds <= 86_400:
            raise ConfigError(
                f"min_seconds is {self.min_seconds}; pass a number from 0 to 86400, such as 30"
            )
        if not 0 <= self.seed <= 1_000_000:
            raise ConfigError(f"--seed is {self.seed}; pass a number from 0 to 1000000")
        if self.kill is not None and self.kill not in KILLABLE:
            raise ConfigError(f"--kill is {self.kill}; pass one of {', '.join(KILLABLE)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProgress:
    """Progress of the loop, for display."""

    elapsed_s: float
    recorded_steps: int
    acked_steps: int
    stored_steps: int
    phase: str
    champion: int
    canary: int
    updates: int = 0
    """Updates of the learner."""
    lag_s: float | None = None
    """How long a step takes from the gateway to the store, as last reported."""
    points: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Points won and points played, by bot name; only in a match."""
    view: Mapping[str, Any] = field(default_factory=dict)
    """The view of one of the players, for drawing."""
    play_s: float = 0.0
    """Time since all roles started to run, to which the time limit applies."""
    message: str = ""
    """Message about an event; empty most of the time."""


Show = Callable[[LoopProgress], None]


class Loop:
    """A closed loop on a data folder; `run` plays it and returns the measured result."""

    def __init__(
        self,
        data: DataFolder,
        config: LoopConfig,
        show: Show,
        *,
        scratch: Path | None = None,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`scratch`: folder for servers that it starts; `on_begin`: called after all checks."""
        self._data = data
        self._config = config
        self._show = show
        self._on_begin = on_begin
        self._scratch = scratch or data.root / "servers"
        self._game = str(game_name_of_env(config.env_id))
        self._messages: list[str] = []
        self._began_s = time.monotonic()
        self._all_run_s: float | None = None
        self._killed = False
        self._stored_before = self._stored = 0
        """Steps stored by earlier ingest processes, and by the current one as last reported."""

    def run(self) -> LoopResult:
        """Play until a bot clearly beats the first one or time is up, then verify the store."""
        judge = BotJudge(self._config.env_id, self._config.seed)
        with running(self._config.backends, self._data.root, self._scratch, self._say) as settings:
            self._began_s = time.monotonic()
            opened = open_deployment(self._data, models=settings.models.url)
            self._on_begin()
            with Platform(settings, on_state_change=self._report_state) as platform:
                self._wait_until_ready(platform)
                if self._config.env_id in PAGES:
                    page = page_address(
                        platform.url or "", self._game, key=play_key(opened, self._game)
                    )
                    self._messages.append(f"play along in a browser: {page}")
                people = self._people(platform)
                try:
                    self._watch(platform, people, opened.registry, judge)
                finally:
                    people.stop()
                platform.supervisor.stop()
                restarts = sum(role.restarts for role in platform.supervisor.statuses.values())
            if settings.store.url:
                with closing(
                    open_store(settings.store.url, specs=RegistrySpecs(opened.registry))
                ) as store:
                    verification = verify_remote_store(self._data, store, live=False)
            else:
                verification = verify(self._data, config=settings)
            returns: list[Estimate | None] = list(judge.returns.values()) or [None]
            return LoopResult(
                first=returns[0],
                last=returns[-1],
                is_match=judge.is_match,
                judged_on=judge.judged_on if judge.returns else None,
                improved=judge.has_improved,
                verification=verification,
                model_versions=list(judge.returns),
                killed=self._config.kill if self._killed else None,
                restarts=restarts,
                seconds=round(time.monotonic() - self._began_s, 1),
            )

    def _say(self, message: str) -> None:
        """Show a message before any role runs."""
        elapsed_s = time.monotonic() - self._began_s
        self._show(
            LoopProgress(
                elapsed_s=elapsed_s,
                recorded_steps=0,
                acked_steps=0,
                stored_steps=0,
                phase=message,
                champion=0,
                canary=0,
                message=message,
            )
        )

    def _people(self, platform: Platform) -> Groups:
        """Start the people in two processes."""
        assert platform.keys is not None
        assert platform.url is not None
        config = self._config
        middle = (config.people + 1) // 2
        return Groups(
            "people",
            [
                PeopleSettings(
                    data=str(self._data.root),
                    url=platform.url,
                    key=platform.keys.key,
                    env_id=config.env_id,
                    names=[f"person-{number}" for number in numbers],
                    first_number=numbers.start,
                    seed=config.seed + at,
                )
                for at, numbers in enumerate((range(middle), range(middle, config.people)))
                if numbers
            ],
        )

    def _report_state(self, status: RoleStatus, message: str) -> None:
        if status.state in ("waiting", "running") and self._killed:
            self._messages.append(f"{status.role.name} {message}")

    def _wait_until_ready(self, platform: Platform) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not platform.supervisor.is_ready:
            if time.monotonic() > deadline_s:
                raise UnderstudyError(
                    f"the platform was not ready within {_READY_S:.0f} s; find the cause with "
                    "'understudy doctor'"
                )
            platform.supervisor.step()
            time.sleep(_TICK_S / 2)

    @property
    def _play_s(self) -> float:
        """Time since all roles started to run."""
        return 0.0 if self._all_run_s is None else time.monotonic() - self._all_run_s

    def _watch(
        self, platform: Platform, people: Groups, registry: Registry, judge: BotJudge
    ) -> None:
        while self._play_s < self._config.max_seconds:
            platform.supervisor.step()
            has_learner = bool(platform.supervisor.statuses["learner"].report)
            if self._all_run_s is None and (
                has_learner or time.monotonic() - self._began_s > _STARTED_S
            ):
                # Startup can be slow, and must not use up the time limit.
                self._all_run_s = time.monotonic()
            people.check()
            champion = registry.catalogue(self._game).model_of("champion")
            if champion and champion not in judge.returns:
                score = judge.evaluate(champion, registry.policy(self._game, champion))
                self._messages.append(f"{self._game}/{champion} is champion: {score}")
                self._kill_if_due(platform)
            self._look(platform, people, registry)
            has_shown = judge.has_improved and (self._config.kill is None or self._killed)
            if has_shown and self._play_s >= self._config.min_seconds:
                return
            time.sleep(_TICK_S)

    def _kill_if_due(self, platform: Platform) -> None:
        child = platform.supervisor.statuses[self._config.kill].child if self._config.kill else None
        if child is not None and not self._killed:
            self._killed = True
            self._messages.append(f"kill -9 of the {self._config.kill} (process {child.pid})")
            child.kill()

    def _look(self, platform: Platform, people: Groups, registry: Registry) -> None:
        statuses = platform.supervisor.statuses
        learner = statuses["learner"].report
        ingest = statuses["ingest"].report
        now = registry.catalogue(self._game)
        game = learner.get("games", {}).get(self._game, {})
        phase = game.get("why", "the learner is starting")
        if game.get("phase"):
            phase = f"{game['phase']}: {phase}"
        if (stored := ingest.get("stored", 0)) < self._stored:
            self._stored_before += self._stored  # a restarted ingest counts from 0 again
        self._stored = stored
        points: dict[str, tuple[int, int]] = {}
        for child in people.children:
            for bot, (won, played) in child.latest.get("points", {}).items():
                before = points.get(bot, (0, 0))
                points[bot] = before[0] + won, before[1] + played
        progress = LoopProgress(
            elapsed_s=time.monotonic() - self._began_s,
            recorded_steps=people.total("recorded"),
            acked_steps=people.total("acked"),
            stored_steps=self._stored_before + stored,
            updates=int(learner.get("updates", 0)),
            phase=phase,
            champion=now.model_of("champion"),
            canary=now.model_of("canary"),
            lag_s=ingest.get("lag_s"),
            points=points,
            view=dict(people.children[0].latest.get("view", {})),
            play_s=self._play_s,
        )
        for message in [*self._messages, ""]:
            self._show(replace(progress, message=message))
        self._messages.clear()
