"""The whole platform on one machine: its roles as supervised processes, its development keys, and a
game to paste.

DATA/roles/NAME.json      how a role stands, written every second: what `understudy status` reads
DATA/roles/NAME.lock      held as long as a process runs this role here
"""

import contextlib
import dataclasses
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment, open_deployment
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, Refused
from understudy.core.log import FileLock, make_folder, write_file
from understudy.experience.intake import deployment_key
from understudy.platform.children import FENCED, WRONG_USE, Child, python_module
from understudy.platform.config import Config, write_config

GAME = """import understudy

game = understudy.connect("my-game", obs=2, actions=["left", "right"])
for number in range(60):
    episode, place = game.episode(), 0.0
    for step in range(50):
        obs = [place, step / 50]
        if number % 2:  # the bot decides; at random until there is one
            action = episode.act(obs)
        else:  # a person decided: here somebody who likes the middle
            action = 1 if place < 0 else 0
            episode.acted(obs, action)
        place += 0.1 if action == 1 else -0.1
        episode.reward(-abs(place))
    episode.end([place, 1.0])
game.close()
"""
"""A game of one's own in a few lines; run once, it brings enough steps of people for a first
bot."""

_TICK_S = 0.05
_WRITE_EVERY_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0
_STEADY_S = 20.0
"""A role that has run this long is well: its next crash is its first."""
_RATED = ("requests", "frames", "stored", "updates")

Command = Callable[[Mapping[str, Any]], Sequence[str]]
"""A role's command line; it is given what the role reported last, so that a gateway comes back
on its port."""


# --- supervising roles ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a supervisor must know about a role."""

    name: str
    command: Command
    drains_s: float
    """How long it may take to finish its work before it is ended."""
    is_needed: bool = True
    """Whether the platform is ready only when this role is."""
    stops_after: tuple[str, ...] = ()
    """Roles that must have ended before this one is asked to stop."""
    gives_way_with: int | None = None
    """The exit code by which it says that another process does its work now: then it is not
    started again."""


@dataclass(slots=True)
class RoleStatus:
    """How a role stands."""

    role: Role
    child: Child | None = None
    state: str = "starting"
    """starting, running, waiting (for its restart), stopping or ended."""
    since_s: float = 0.0
    restarts: int = 0
    last_error: str = ""
    started_s: float = 0.0
    due_s: float = 0.0
    pause_s: float = 0.0
    """How long it waited for its restart the last time."""
    crashes: int = 0
    """In a row."""
    last_report: Mapping[str, Any] = field(default_factory=dict)
    samples: deque[tuple[float, Mapping[str, Any]]] = field(default_factory=lambda: deque(maxlen=6))

    @property
    def report(self) -> Mapping[str, Any]:
        if self.child is not None and self.child.latest:
            self.last_report = self.child.latest
        return self.last_report

    @property
    def is_alive(self) -> bool:
        return self.child is not None and self.child.exit_code is None

    def rates(self) -> dict[str, float]:
        """Counts a second over the last samples."""
        if len(self.samples) < 2:
            return {}
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        passed_s = max(last_s - first_s, 1e-9)
        return {
            name: round(max(0.0, last[name] - first[name]) / passed_s, 2)
            for name in _RATED
            if name in first and name in last
        }

    def to_json(self, now_s: float) -> dict[str, Any]:
        return {
            "role": self.role.name,
            "state": self.state,
            "pid": self.child.pid if self.child is not None and self.is_alive else None,
            "since_s": round(self.since_s, 3),
            "restarts": self.restarts,
            "last_error": self.last_error,
            "at_s": round(now_s, 3),
            "supervisor": os.getpid(),
            "report": dict(self.report),
            "rates": self.rates(),
        }


Tell = Callable[[RoleStatus, str], None]
"""Hears what happens to a role, in words for people."""


class Supervisor:
    """Starts roles as processes, restarts those that crash, and stops them in an order that loses
    nothing.

    A context manager that leaves no process.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        folder: Path,
        *,
        clock: Clock,
        tell: Tell,
        log: Callable[[str, str], None] | None = None,
    ) -> None:
        """`log` hears each line that a role writes to standard error, with the role's name, from
        a thread."""
        self._folder = folder
        self._clock = clock
        self._tell = tell
        self._log = log
        self._written_s = 0.0
        self.standings = {role.name: RoleStatus(role, since_s=clock.now()) for role in roles}
        with contextlib.ExitStack() as opened:
            for role in roles:
                lock = folder / f"{role.name}.lock"
                opened.enter_context(
                    FileLock(lock, what=f"the {role.name} of {folder.parent}", patience_s=0.5)
                )
            self._opened = opened.pop_all()

    @property
    def is_ready(self) -> bool:
        return all(one.state == "running" for one in self.standings.values() if one.role.is_needed)

    def step(self) -> None:
        """Look after every role once; ConfigError when one cannot work as it is set up."""
        for standing in self.standings.values():
            self._look_after(standing)
        if self._clock.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self._written_s = self._clock.monotonic()
            for standing in self.standings.values():
                standing.samples.append((self._written_s, dict(standing.report)))
                self._write(standing)

    def run(self, stop: Event, each: Callable[[], None] = lambda: None) -> None:
        """Repeat `step`, and what else is due, until `stop` is set."""
        while not stop.is_set():
            self.step()
            each()
            self._clock.wait(stop, _TICK_S)

    # --- one role ---------------------------------------------------------------------------------

    def _look_after(self, standing: RoleStatus) -> None:
        now_s = self._clock.monotonic()
        if standing.child is None:
            if now_s >= standing.due_s and standing.state != "ended":
                name = standing.role.name
                hear = None if self._log is None else partial(self._log, name)
                standing.child = Child(name, standing.role.command(standing.report), on_log=hear)
                standing.started_s = self._clock.monotonic()
                standing.samples.clear()
                standing.state = "starting"
                self._write(standing)
        elif not standing.is_alive:
            self._ended(standing, now_s)
        elif standing.state == "starting" and standing.child.latest:
            self._becomes(standing, "running", f"runs (process {standing.child.pid})")
        elif standing.crashes and now_s - standing.started_s > _STEADY_S:
            standing.crashes = 0

    def _ended(self, standing: RoleStatus, now_s: float) -> None:
        child = standing.child
        assert child is not None
        has_run = bool(standing.report)
        code = child.wait(1.0)
        before = standing.last_error
        reason, last_line = _reason(code, child)
        standing.child = None
        standing.last_error = reason
        if code == WRONG_USE and not has_run:
            raise ConfigError(last_line or f"the {standing.role.name} cannot work as it is set up")
        if code is not None and code == standing.role.gives_way_with:
            self._becomes(standing, "ended", f"gave way and is not started again: {last_line}")
            return
        pause_s = min(_FIRST_PAUSE_S * 2**standing.crashes, _LONGEST_PAUSE_S)
        is_news = reason != before or not standing.crashes
        said = self._why(standing, reason, is_news=is_news)
        standing.crashes += 1
        standing.restarts += 1
        standing.due_s = now_s + pause_s
        said = f"{said}; restart {standing.restarts} in {pause_s:.1f} s"
        if not is_news and pause_s == standing.pause_s:
            said = ""  # it goes on like this: `status` says so, and a line when it runs
        elif pause_s == _LONGEST_PAUSE_S:
            said = f"{said}, and so on until it runs"
        standing.pause_s = pause_s
        self._becomes(standing, "waiting", said)

    def _why(self, standing: RoleStatus, reason: str, *, is_news: bool) -> str:
        """Why a role ended; a reason of many words is said once, however many roles meet it, and
        how often."""
        how, has_words, _ = reason.partition(": ")
        if has_words and not is_news:
            return f"{how} as before"
        others = (one for one in self.standings.values() if one is not standing and one.crashes)
        same = next(
            (
                one.role.name
                for one in others
                if one.state != "running" and one.last_error == reason
            ),
            "",
        )
        return f"{how} as {same} did" if has_words and same else reason

    def _becomes(self, standing: RoleStatus, state: str, said: str) -> None:
        standing.state = state
        standing.since_s = self._clock.now()
        self._write(standing)
        if said:
            self._tell(standing, said)

    def _write(self, standing: RoleStatus) -> None:
        path = self._folder / f"{standing.role.name}.json"
        text = json.dumps(standing.to_json(self._clock.now()))
        temporary = path.with_suffix(".json.tmp")
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except OSError:
            # A full disk must not stop the roles, and is reported all the same: over the old text,
            # which needs no room.
            with contextlib.suppress(OSError), path.open("r+") as file:
                file.write(text.ljust(path.stat().st_size))

    # --- stopping ---------------------------------------------------------------------------------

    def stop(self, at_once: Event | None = None) -> bool:
        """Ask every role to finish, each when those before it have; whether all did, and none
        had to be ended."""
        left = dict(self.standings)
        asked_s: dict[str, float] = {}
        all_finished = True
        while left:
            for name, standing in list(left.items()):
                if standing.child is None or not standing.is_alive:
                    all_finished &= standing.state == "ended" or self._finished(standing)
                    del left[name]
                elif name not in asked_s:
                    if not set(standing.role.stops_after) & left.keys():
                        asked_s[name] = self._clock.monotonic()
                        self._becomes(standing, "stopping", "is asked to finish")
                        standing.child.stop()
                elif (at_once is not None and at_once.is_set()) or (
                    self._clock.monotonic() - asked_s[name] > standing.role.drains_s
                ):
                    standing.child.kill()
            self._clock.wait(Event(), _TICK_S)
        return all_finished

    def _finished(self, standing: RoleStatus) -> bool:
        code = standing.child.wait(5.0) if standing.child else 0
        if standing.child is not None and code:
            standing.last_error, _ = _reason(code, standing.child)
        self._becomes(standing, "ended", "has finished" if not code else standing.last_error)
        return not code

    def close(self) -> None:
        """End whatever still runs, at once."""
        for standing in self.standings.values():
            if standing.child is not None and standing.is_alive:
                standing.child.kill()
                standing.child.wait(5.0)
                standing.state = "ended"
                self._write(standing)
        self._opened.close()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reason(code: int | None, child: Child) -> tuple[str, str]:
    """Why a role ended, and the last line that it wrote to standard error."""
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    *_, last_line = ["", *child.errors.strip().splitlines()]
    return f"{how}: {last_line[:300]}" if last_line and (code or 0) > 0 else how, last_line


# --- the platform ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevelopmentKeys:
    """Keys that `up` makes by itself where only this machine can reach it."""

    key: str
    admin_key: str


def roles_folder(data: DataFolder) -> Path:
    """Where roles' standings are written."""
    return data.root / "roles"


class Platform:
    """A platform that is being run; a context manager that leaves no process."""

    def __init__(
        self,
        config: Config,
        *,
        tell: Tell,
        log: Callable[[str, str], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config.check()
        self.data = config.folder
        folder = roles_folder(self.data)
        make_folder(folder)
        opened = open_deployment(self.data, models=config.models.url)
        deployment_key(self.data.root)
        self._config_file = folder / f"config-{'-'.join(config.roles)}.json"
        # First the locks: where these roles run already, nothing of theirs is touched.
        self.supervisor = Supervisor(
            self._roles(), folder, clock=clock or SystemClock(), tell=tell, log=log
        )
        with contextlib.ExitStack() as failing:
            failing.callback(self.supervisor.close)
            write_config(config, self._config_file)
            self.keys = (
                development_keys(opened) if config.is_local and "gateway" in config.roles else None
            )
            failing.pop_all()

    @property
    def url(self) -> str | None:
        """Where the gateway listens, when there is one and it is ready."""
        standing = self.supervisor.standings.get("gateway")
        return standing.report.get("url") if standing else None

    def ready_line(self) -> dict[str, str | None]:
        """What a program is told when the platform is ready."""
        keys = self.keys
        return {
            "url": self.url,
            "admin_key": keys.admin_key if keys else None,
            "key": keys.key if keys else None,
        }

    def _roles(self) -> list[Role]:
        known = {
            "gateway": Role(name="gateway", command=self._gateway, drains_s=30.0),
            # What the gateway acknowledged last is stored, too.
            "ingest": Role(
                name="ingest",
                command=self._module("ingest"),
                drains_s=120.0,
                stops_after=("gateway",),
            ),
            "learner": Role(
                name="learner",
                command=self._module("learner_process"),
                drains_s=120.0,
                is_needed=False,
                gives_way_with=FENCED,
            ),
        }
        return [known[name] for name in dict.fromkeys(self.config.roles)]

    def _module(self, name: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
        return lambda _: python_module(
            f"understudy.platform.{name}", str(self.data.root), str(self._config_file)
        )

    def _gateway(self, report: Mapping[str, Any]) -> Sequence[str]:
        if report.get("port") and not self.config.gateway.port:
            # Any port would do the first time; after a crash games look for it where it was.
            gateway = dataclasses.replace(self.config.gateway, port=int(report["port"]))
            self.config = dataclasses.replace(self.config, gateway=gateway)
            write_config(self.config, self._config_file)
        return self._module("gateway_process")(report)

    def close(self) -> None:
        self.supervisor.close()
        with contextlib.suppress(OSError):
            self._config_file.unlink()

    def __enter__(self) -> "Platform":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def development_keys(deployment: Deployment) -> DevelopmentKeys:
    """The folder's development keys: the same ones at every start, new ones when those were
    revoked."""
    path = deployment.data.root / "development.json"
    keys = deployment.keys
    with contextlib.suppress(OSError, ValueError, TypeError, Refused):
        found = DevelopmentKeys(**json.loads(path.read_text()))
        keys.follow()
        keys.check(found.key)
        keys.check(found.admin_key)
        return found
    key, _ = keys.create(["play", "work", "read"], registers=True, label="development")
    admin, _ = keys.create(["admin"], registers=True, label="development, admin")
    write_file(path, json.dumps({"key": key, "admin_key": admin}).encode(), mode=0o600)
    return DevelopmentKeys(key, admin)
