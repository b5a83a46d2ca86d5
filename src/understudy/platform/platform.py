"""The whole platform on one machine: supervised role processes, development keys, a sample game.

DATA/roles/NAME.json      status of a role, written every second and read by `understudy status`
DATA/roles/NAME.lock      locked as long as a supervisor runs this role in this folder
DATA/roles/config-*.json  the resolved config, for the role processes
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

import msgspec

from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment, open_deployment
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, Refused
from understudy.core.log import FileLock, is_locked, make_folder, write_file
from understudy.core.wording import shortened
from understudy.experience.intake import deployment_key
from understudy.platform.children import FENCED, USAGE_ERROR, Child, python_module
from understudy.platform.config import Config, write_config

GAME = """import understudy

game = understudy.connect("balance", obs=2, actions=["left", "right"])
for number in range(60):
    episode, place = game.episode(), 0.0
    for step in range(50):
        obs = [place, step / 50]
        if number % 2:  # the bot decides; at random until there is one
            action = episode.act(obs)
        else:  # a person decided: this one prefers the middle
            action = 1 if place < 0 else 0
            episode.acted(obs, action)
        place += 0.1 if action == 1 else -0.1
        episode.reward(-abs(place))
    episode.end([place, 1.0])
game.close()
"""
"""A minimal game; one run records enough steps of people for a first bot."""

_TICK_S = 0.05
_WRITE_EVERY_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0
_STEADY_S = 20.0
"""After it has run for this time, a role's crash count restarts at 0."""
_SILENT_S = 5.0
"""After this time without a report, a role is shown as silent."""
_HUNG_S = 12.0
"""After this time without a report, a role is killed and restarted. Roles report from a thread of
their own, so a busy one, such as a learner that compiles, is not silent."""
_HUNG_START_S = 120.0
"""The same for a role that has never reported: it may still be importing its modules."""
_LONGEST_TICK_S = 1.0
"""The most time between two steps that counts as silence: while a supervisor is suspended, or waits
for a busy machine, it cannot receive reports."""
_RATED = ("requests", "frames", "stored", "updates")

Command = Callable[[Mapping[str, Any]], Sequence[str]]
"""Returns a role's command line, given its last report, which has the port of a gateway."""


# --- supervising roles ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Settings of a role for the supervisor."""

    name: str
    command: Command
    drain_s: float
    """How long it may take to finish its work before it is killed."""
    is_needed: bool = True
    """Whether the platform is ready only when this role is ready."""
    stops_after: tuple[str, ...] = ()
    """Roles that must have ended before this one is stopped."""
    drains_at_start: bool = False
    """Whether it has work to finish even if it is stopped before its first report."""
    takeover_exit_code: int | None = None
    """Exit code which means that another process took over its work: it is not restarted."""


@dataclass(slots=True)
class RoleStatus:
    """Status of a role."""

    role: Role
    child: Child | None = None
    state: str = "starting"
    """starting, running, silent, waiting (for its restart), stopping or ended."""
    since_s: float = 0.0
    restarts: int = 0
    last_error: str = ""
    running_s: float = 0.0
    """When its process first reported, which ends its start."""
    due_s: float = 0.0
    pause_s: float = 0.0
    """The delay before its last restart."""
    crashes: int = 0
    """Consecutive crashes."""
    heartbeats: int = 0
    """Reports of its process that were seen."""
    silent_s: float = 0.0
    """How long its process has reported nothing."""
    why_killed: str = ""
    """Why the supervisor killed its process; empty if it did not."""
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
        """Return the rates of the role's counters per second, over the stored samples."""
        if len(self.samples) < 2:
            return {}
        first_s, first = self.samples[0]
        last_s, last = self.samples[-1]
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
            "report_age_s": round(self.silent_s, 3),
            "rates": self.rates(),
        }


OnStateChange = Callable[[RoleStatus, str], None]
"""Called with a message for users when the state of a role changes."""


class Supervisor:
    """Starts roles as processes, restarts them after crashes, and stops them without data loss.

    A context manager that leaves no process running.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        folder: Path,
        *,
        clock: Clock,
        on_state_change: OnStateChange,
        log: Callable[[str, str], None] | None = None,
    ) -> None:
        """`log` gets a role's name and each line of its standard error, from a thread."""
        self._folder = folder
        self._clock = clock
        self._on_state_change = on_state_change
        self._log = log
        self._written_s = 0.0
        self._stepped_s = clock.monotonic()
        self.statuses = {role.name: RoleStatus(role, since_s=clock.now()) for role in roles}
        with contextlib.ExitStack() as opened:
            for role in roles:
                lock = folder / f"{role.name}.lock"
                opened.enter_context(
                    FileLock(lock, what=f"the {role.name} of {folder.parent}", timeout_s=0.5)
                )
            self._opened = opened.pop_all()

    @property
    def is_ready(self) -> bool:
        needed = (status for status in self.statuses.values() if status.role.is_needed)
        return all(status.state == "running" for status in needed)

    def step(self) -> None:
        """Start, restart or update every role; ConfigError if the settings of one are invalid."""
        passed_s = self._passed_s()
        for status in self.statuses.values():
            self._update(status, passed_s)
        if self._clock.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self._written_s = self._clock.monotonic()
            for status in self.statuses.values():
                status.samples.append((self._written_s, dict(status.report)))
                self._write(status)

    def run(self, stop: Event, each: Callable[[], None] = lambda: None) -> None:
        """Repeat `step` and `each` until `stop` is set."""
        while not stop.is_set():
            self.step()
            each()
            self._clock.wait(stop, _TICK_S)

    def _passed_s(self) -> float:
        """Return the seconds since the last call, without those of a suspended supervisor."""
        before_s = self._stepped_s
        self._stepped_s = self._clock.monotonic()
        return min(self._stepped_s - before_s, _LONGEST_TICK_S)

    # --- one role ---------------------------------------------------------------------------------

    def _update(self, status: RoleStatus, passed_s: float) -> None:
        now_s = self._clock.monotonic()
        if status.child is None:
            if now_s >= status.due_s and status.state != "ended":
                name = status.role.name
                on_log = None if self._log is None else partial(self._log, name)
                status.child = Child(name, status.role.command(status.report), on_log=on_log)
                status.samples.clear()
                status.heartbeats = 0
                status.silent_s = 0.0
                status.why_killed = ""
                status.state = "starting"
                self._write(status)
        elif not status.is_alive:
            self._ended(status, now_s)
        elif status.state == "starting" and status.child.latest:
            status.running_s = now_s
            self._set_state(status, "running", f"runs (process {status.child.pid})")
        else:
            if status.state != "starting" and now_s - status.running_s > _STEADY_S:
                status.crashes = 0
            self._listen(status, passed_s)

    def _listen(self, status: RoleStatus, passed_s: float) -> None:
        """Count how long a live role has been silent, and kill it when that is too long."""
        child = status.child
        assert child is not None
        if child.heartbeats != status.heartbeats:
            status.heartbeats = child.heartbeats
            status.silent_s = 0.0
            if status.state == "silent":
                self._set_state(status, "running", "reports again")
            return
        status.silent_s += passed_s
        limit_s = _HUNG_S if status.heartbeats else _HUNG_START_S
        if status.silent_s >= limit_s:
            status.why_killed = f"reported nothing for {limit_s:.0f} s and was killed"
            child.kill()
        elif status.silent_s >= _SILENT_S and status.state == "running":
            self._set_state(
                status,
                "silent",
                f"has reported nothing for {status.silent_s:.0f} s; it is restarted after "
                f"{limit_s:.0f} s",
            )

    def _ended(self, status: RoleStatus, now_s: float) -> None:
        child = status.child
        assert child is not None
        has_run = bool(status.report)
        code = child.wait(1.0)
        before = status.last_error
        reason, last_line = _reason(code, child)
        reason = status.why_killed or reason
        status.child = None
        status.last_error = reason
        if code == USAGE_ERROR and not has_run:
            raise ConfigError(
                last_line
                or f"the settings of the {status.role.name} are invalid; check them with "
                "'understudy config check'"
            )
        if code is not None and code == status.role.takeover_exit_code:
            self._set_state(status, "ended", f"was replaced and is not restarted: {last_line}")
            return
        pause_s = min(_FIRST_PAUSE_S * 2**status.crashes, _LONGEST_PAUSE_S)
        is_news = reason != before or not status.crashes
        message = self._why(status, reason, is_news=is_news)
        status.crashes += 1
        status.restarts += 1
        status.due_s = now_s + pause_s
        message = f"{message}; restart {status.restarts} in {pause_s:.1f} s"
        if not is_news and pause_s == status.pause_s:
            message = ""  # unchanged: `status` shows it, and a message follows when it runs
        elif pause_s == _LONGEST_PAUSE_S:
            message = f"{message}, and so on until it runs"
        status.pause_s = pause_s
        self._set_state(status, "waiting", message)

    def _why(self, status: RoleStatus, reason: str, *, is_news: bool) -> str:
        """Return why a role ended; an error that was already shown, for any role, is shortened."""
        how, has_details, _ = reason.partition(": ")
        if has_details and not is_news:
            return f"{how} as before"
        others = (other for other in self.statuses.values() if other is not status)
        same = next(
            (
                other.role.name
                for other in others
                if other.crashes and other.state != "running" and other.last_error == reason
            ),
            "",
        )
        return f"{how} as {same} did" if has_details and same else reason

    def _set_state(self, status: RoleStatus, state: str, message: str) -> None:
        status.state = state
        status.since_s = self._clock.now()
        self._write(status)
        if message:
            self._on_state_change(status, message)

    def _write(self, status: RoleStatus) -> None:
        path = self._folder / f"{status.role.name}.json"
        text = json.dumps(status.to_json(self._clock.now()))
        temporary = path.with_suffix(".json.tmp")
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except OSError:
            # A full disk must not stop the roles. The report overwrites the old text, which needs
            # no space.
            with contextlib.suppress(OSError), path.open("r+") as file:
                file.write(text.ljust(path.stat().st_size))

    # --- stopping ---------------------------------------------------------------------------------

    def stop(self, at_once: Event | None = None) -> bool:
        """Stop all roles in order; return whether all finished and none was killed.

        Setting `at_once` kills those that are still running. A role that is still starting is
        killed too, unless it has work to finish: a learner may need half a minute to start.
        """
        running = dict(self.statuses)
        asked_s: dict[str, float] = {}
        unstarted: set[str] = set()
        all_finished = True
        while running:
            passed_s = self._passed_s()
            for name, status in list(running.items()):
                if status.child is None or not status.is_alive:
                    is_unstarted = name in unstarted
                    all_finished &= status.state == "ended" or self._finished(status, is_unstarted)
                    del running[name]
                elif name not in asked_s:
                    if not set(status.role.stops_after) & running.keys():
                        asked_s[name] = self._clock.monotonic()
                        if status.state == "starting" and not status.role.drains_at_start:
                            unstarted.add(name)
                            status.child.kill()
                        self._set_state(status, "stopping", "is stopping")
                        status.child.stop()
                elif (at_once is not None and at_once.is_set()) or (
                    self._clock.monotonic() - asked_s[name] > status.role.drain_s
                ):
                    status.child.kill()
                else:
                    self._listen(status, passed_s)
            self._clock.wait(Event(), _TICK_S)
        return all_finished

    def _finished(self, status: RoleStatus, is_unstarted: bool) -> bool:
        code = status.child.wait(5.0) if status.child else 0
        code = 0 if is_unstarted else code
        if status.child is not None and code:
            reason, _ = _reason(code, status.child)
            status.last_error = status.why_killed or reason
        self._set_state(status, "ended", "has finished" if not code else status.last_error)
        return not code

    def close(self) -> None:
        """Kill all processes that still run."""
        for status in self.statuses.values():
            if status.child is not None and status.is_alive:
                status.child.kill()
                status.child.wait(5.0)
                status.state = "ended"
                self._write(status)
        self._opened.close()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reason(code: int | None, child: Child) -> tuple[str, str]:
    """Return why a role ended, and the last line of its standard error."""
    how = (
        f"was killed by signal {-code}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    *_, last_line = ["", *child.errors.strip().splitlines()]
    if last_line and (code or 0) > 0:
        how = f"{how}: {shortened(last_line, 1000)}"
    return how, last_line


# --- the state of roles, for other processes ------------------------------------------------------


def roles_folder(data: DataFolder) -> Path:
    """Return the folder of the roles' status files."""
    return data.root / "roles"


def read_roles(data: DataFolder, now_s: float) -> list[dict[str, Any]]:
    """Return the state of every role that was started in a data folder, as JSON fields.

    `report_age_s` is the age of the role's last sign of life. A role is `silent` if that is too
    long ago, or if its supervisor no longer writes its status. It is `not running` if it was
    stopped, and `ended` if it ended in another way, such as with its supervisor.
    """
    paths = sorted(roles_folder(data).glob("*.json"))
    return [_read_role(path, now_s) for path in paths if path.with_suffix(".lock").exists()]


class _SavedRole(msgspec.Struct):
    """What a supervisor writes of a role."""

    role: str
    state: str = "unknown"
    pid: int | None = None
    since_s: float = 0.0
    restarts: int = 0
    last_error: str = ""
    at_s: float = 0.0
    report: dict[str, Any] = {}
    report_age_s: float = 0.0
    rates: dict[str, float] = {}


def _read_role(path: Path, now_s: float) -> dict[str, Any]:
    saved = _SavedRole(path.stem)
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        saved = msgspec.convert(json.loads(path.read_bytes()), _SavedRole)
    is_watched = is_locked(path.with_suffix(".lock"))
    written_s = max(0.0, now_s - saved.at_s)
    is_stale = is_watched and written_s > _SILENT_S
    age_s = saved.report_age_s + written_s
    was_stopped = saved.state in ("ended", "unknown")
    state = saved.state if is_watched else "not running" if was_stopped else "ended"
    last_error = saved.last_error
    if not is_watched and not was_stopped:
        last_error = "its supervisor was killed; start it again with understudy up"
    elif is_stale:
        state = "silent"
        last_error = f"its supervisor has written no status for {written_s:.0f} s"
    elif state == "silent":
        last_error = (
            f"it has reported nothing for {age_s:.0f} s, and will be restarted if it stays silent"
        )
    alive = state in ("starting", "running", "stopping")
    lag_s = None
    if state in ("running", "stopping") or (state == "silent" and not is_stale):
        lag_s = saved.report.get("lag_s")
        # What has entered the stream since the last report is not known to be stored.
        lag_s = lag_s + age_s if lag_s is not None and state == "silent" else lag_s
    return {
        "role": saved.role,
        "alive": alive,
        "state": state,
        "pid": saved.pid if is_watched else None,
        "since_s": saved.since_s,
        "restarts": saved.restarts,
        "last_error": last_error,
        "rates": saved.rates if alive else {},
        "report": saved.report,
        "report_age_s": round(age_s, 3) if is_watched else None,
        "lag_s": None if lag_s is None else round(lag_s, 4),
    }


# --- the platform ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevelopmentKeys:
    """Keys that `up` creates if only this machine can reach the gateway."""

    key: str
    admin_key: str


class Platform:
    """A running platform; a context manager that leaves no process running."""

    def __init__(
        self,
        config: Config,
        *,
        on_state_change: OnStateChange,
        log: Callable[[str, str], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config.check()
        self.data = config.folder
        # First: a folder that is not usable stays as it is.
        opened = open_deployment(self.data, models=config.models.url)
        folder = roles_folder(self.data)
        make_folder(folder)
        deployment_key(self.data.root)
        self._config_file = folder / f"config-{'-'.join(config.roles)}.json"
        # Locks first: if these roles run already, none of their files is changed.
        self.supervisor = Supervisor(
            self._roles(),
            folder,
            clock=clock or SystemClock(),
            on_state_change=on_state_change,
            log=log,
        )
        with contextlib.ExitStack() as failing:
            failing.callback(self.supervisor.close)
            write_config(config, self._config_file)
            self.keys = development_keys(opened) if config.is_local else None
            failing.pop_all()

    @property
    def url(self) -> str | None:
        """The gateway's URL, once it is ready."""
        status = self.supervisor.statuses.get("gateway")
        return status.report.get("url") if status else None

    def ready_line(self) -> dict[str, str | None]:
        """Return the fields that `up` prints for programs when the platform is ready."""
        keys = self.keys
        return {
            "url": self.url,
            "admin_key": keys.admin_key if keys else None,
            "key": keys.key if keys else None,
        }

    def _roles(self) -> list[Role]:
        roles = {
            "gateway": Role(name="gateway", command=self._gateway, drain_s=30.0),
            # Stops after the gateway, so that frames acknowledged last are stored.
            "ingest": Role(
                name="ingest",
                command=self._module("ingest"),
                drain_s=120.0,
                drains_at_start=True,
                stops_after=("gateway",),
            ),
            "learner": Role(
                name="learner",
                command=self._module("learner_process"),
                drain_s=120.0,
                is_needed=False,
                takeover_exit_code=FENCED,
            ),
        }
        return [roles[name] for name in dict.fromkeys(self.config.roles)]

    def _module(self, name: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
        return lambda _: python_module(
            f"understudy.platform.{name}", str(self.data.root), str(self._config_file)
        )

    def _gateway(self, report: Mapping[str, Any]) -> Sequence[str]:
        if report.get("port") and not self.config.gateway.port:
            # Any free port is used the first time; after a crash, games expect the same one.
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
    """Return the folder's development keys: the same at every start, new ones if revoked."""
    path = deployment.data.root / "development.json"
    keys = deployment.keys
    with contextlib.suppress(OSError, ValueError, TypeError, Refused):
        saved = DevelopmentKeys(**json.loads(path.read_text()))
        keys.follow()
        keys.check(saved.key)
        keys.check(saved.admin_key)
        return saved
    key, _ = keys.create(["play", "work", "read"], registers=True, label="development")
    admin, _ = keys.create(["admin"], registers=True, label="development, admin")
    write_file(path, json.dumps({"key": key, "admin_key": admin}).encode(), mode=0o600)
    return DevelopmentKeys(key, admin)
