"""The learner role: one process that turns a deployment's stored experience into bots, without any
game.

    store ─► tally ─► schedule ─► course (bc, dqn) ─► release ─► gate ─► champion

It only reads the store and writes models and checkpoints; a learner that starts later takes over
and fences this one.

Run as `python -m understudy.platform.learner_process DATA [CONFIG]`, where CONFIG is the file that
`up` wrote, it reports lines of JSON and ends when its standard input closes; with 4 when another
learner has taken over: starting it again would only take turns with the other.
"""

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import structlog

from understudy.backends.addresses import open_store
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.backends.specs import RegistrySpecs
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Fenced, StorageFull, Unreachable
from understudy.core.log import make_folder, write_file
from understudy.core.names import game_name_of_env
from understudy.learn.compile_cache import use_compile_cache
from understudy.models.registry import Registry
from understudy.platform.children import FENCED, report, reporting, run_role, stop_with_parent
from understudy.platform.config import Config
from understudy.release.game_learner import GameLearner, LearnerServiceConfig, ServiceContext
from understudy.release.gatekeeper import CheckModel, Gatekeeper
from understudy.release.model_check import check_apart
from understudy.release.store_stats import StoreStats
from understudy.stores.view import StoreView
from understudy.stores.window import Window
from understudy.training.follower import StoreFollower

_log = structlog.get_logger("understudy.learner")
_IDLE_S = 0.05
_NEW_GAMES_EVERY_S = 0.5


class LearnerRole:
    """Everything between a store and its games' champions; a context manager."""

    def __init__(
        self,
        data: DataFolder,
        registry: Registry,
        *,
        config: LearnerServiceConfig | None = None,
        clock: Clock | None = None,
        check: CheckModel = check_apart,
    ) -> None:
        self._data = data
        self._registry = registry
        self._folder = data.root / "learner"
        self.config = config or LearnerServiceConfig()
        self._clock = clock or SystemClock()
        self._keeper = Gatekeeper(
            registry, bounds=self.config.bounds, budget=self.config.budget, check=check
        )
        self._owner = f"learner {os.getpid()} on {socket.gethostname()}"
        self._follower: StoreFollower | None = None
        self._tally: StoreStats | None = None
        self._games: dict[str, GameLearner] = {}
        self._next_games_s = self._next_save_s = 0.0
        self._is_fenced = False
        self._waits_for = ""
        self._status: dict[str, Any] = {}
        self._look_around()

    def step(self) -> bool:
        """One piece of work for every game; whether there was any. Fenced once another learner
        has taken over."""
        if self._tally is None and not self._open():
            return False
        assert self._tally is not None
        did = self._tally.follow()
        try:
            self._meet_games(self._tally)
            for game in self._games.values():
                did |= game.step()
        except Fenced:
            self._is_fenced = True
            raise
        if self._clock.monotonic() >= self._next_save_s:
            self._save_tally()
        self._look_around()
        return did

    def run(self, stop: Event) -> None:
        """Repeat `step` until `stop` is set; Fenced ends it."""
        while not stop.is_set():
            try:
                did = self.step()
            except StorageFull as error:
                _log.warning(
                    "disk_full",
                    error=str(error),
                    next="free some space; learning goes on by itself",
                )
                stop.wait(1.0)
                continue
            except Unreachable as error:
                if not self._waits_for:
                    _log.warning(
                        "models_not_reachable", error=str(error), next="nothing: it is asked again"
                    )
                self._waits_for = str(error)
                self._status = {**self._status, "storage_error": self._waits_for}
                stop.wait(1.0)
                continue
            if self._waits_for:
                self._waits_for = ""
                self._look_around()
            if not did:
                stop.wait(_IDLE_S)

    def status(self) -> dict[str, Any]:
        """Where every game stands, as of the last step; may be asked by any thread."""
        return self._status

    def _look_around(self) -> None:
        games = {name: game.status() for name, game in self._games.items()}
        sums = {what: sum(game[what] for game in games.values()) for what in ("steps", "updates")}
        self._status = {
            "owner": self._owner,
            "games": games,
            "storage_error": self._waits_for,
            **sums,
        }

    # --- games ------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Whether there is a store by now; what was learned from another one is set aside.

        The arrival numbers of another store mean nothing in this one.
        """
        if not self._data.has_store():
            return False
        with StoreView(self._data.store) as view:
            here = str(view.identity)
        before = self._folder / "store.txt"
        if before.exists() and (other := before.read_text()) != here:
            aside = self._folder.with_name(f"learner-{other}")
            numbered = (aside.with_name(f"{aside.name}-{number}") for number in itertools.count(2))
            aside = next(name for name in itertools.chain([aside], numbered) if not name.exists())
            _log.warning("store_changed", before=other, now=here, kept=str(aside))
            self._folder.rename(aside)
        if (
            not self._folder.exists()
            and (known := self._folder.with_name(f"learner-{here}")).exists()
        ):
            known.rename(self._folder)
        make_folder(self._folder)
        write_file(before, here.encode())
        self._follower = StoreFollower(self._data.store)
        tally = StoreStats(self._follower)
        path = self._folder / "tally.json"
        if path.exists():
            try:
                tally.restore(json.loads(path.read_bytes()))
            except (ValueError, KeyError, TypeError) as error:
                _log.warning(
                    "tally_not_readable", error=repr(error)[:200], next="the store is counted again"
                )
                fresh = StoreStats(
                    self._follower
                )  # before the other leaves, which would close the store
                tally.close()
                tally = fresh
        self._tally = tally
        return True

    def _meet_games(self, tally: StoreStats) -> None:
        if self._clock.monotonic() < self._next_games_s:
            return
        self._next_games_s = self._clock.monotonic() + max(
            _NEW_GAMES_EVERY_S, 10 * self._registry.look_every_s
        )
        assert self._follower is not None
        means = ServiceContext(
            self._data,
            self._registry,
            self._keeper,
            self._follower,
            tally,
            self.config,
            self._clock,
        )
        for name in self._registry.games():
            if name in tally.schemas and name not in self._games:
                self._games[name] = GameLearner(name, means, owner=self._owner)
                _log.info("game", game=name, epoch=self._games[name].epoch)

    def _save_tally(self) -> None:
        self._next_save_s = self._clock.monotonic() + self.config.checkpoint_every_s
        assert self._tally is not None
        write_file(self._folder / "tally.json", json.dumps(self._tally.state()).encode())

    def close(self) -> None:
        """Keep what was learned, unless it is another's by now; may be called twice."""
        for game in self._games.values():
            if not self._is_fenced:
                game.save()
            game.close()
        if self._tally is not None:
            if not self._is_fenced:
                self._save_tally()
            self._tally.close()
        self._games = {}
        self._tally = None
        self._follower = None

    def __enter__(self) -> "LearnerRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the role as a process of its own -------------------------------------------------------------


class WindowFiller:
    """Fills a window until `stop` is set; a context manager that raises, at its end, what the
    thread died of.

    A learner must not go on with old data: what ends the thread sets `stop` as well, and the
    supervisor starts the role again. A store that is away for a while ends nothing; `fields` tells.
    """

    def __init__(self, window: Window, stop: Event) -> None:
        self._window = window
        self._stop = stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        try:
            self._window.run(self._stop)
        except BaseException as error:
            self._error = error
            self._stop.set()

    def fields(self) -> dict[str, Any]:
        """What a role reports about it: how much was copied, and why nothing is at present, if
        so."""
        return {"window": {"items": self._window.items, "error": self._window.trouble}}

    def __enter__(self) -> "WindowFiller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


Fields = Callable[[], dict[str, Any]]
"""What else a report says."""


def main(data: DataFolder, config: Config) -> int:
    """Learn as a config says until the parent asks to stop; the process's exit code."""
    stop = stop_with_parent()
    registry = open_deployment(data, models=config.models.url).registry
    simulator = config.learner.simulator
    service = LearnerServiceConfig(
        learn_from=config.learn_from,
        schedule=config.schedule,
        bounds=config.bounds,
        envs={str(game_name_of_env(simulator)): simulator} if simulator else {},
    )
    with _copied(data, config, registry, stop) as (folder, fields):
        return learn(folder, registry, service, stop, fields=fields)


@contextlib.contextmanager
def _copied(
    data: DataFolder, config: Config, registry: Registry, stop: Event
) -> Iterator[tuple[DataFolder, Fields]]:
    """The folder to learn from; where experience is kept elsewhere, with a copy of it that grows
    while this lasts."""
    if not config.store.url:
        yield data, dict
        return
    folder = DataFolder(data.root, store_name="window")
    specs = RegistrySpecs(registry)
    keep_s = config.store.window_hours * 3600 or None
    with (
        contextlib.closing(open_store(config.store.url, specs=specs)) as remote,
        Window(remote, folder.store, specs=specs, keep_s=keep_s) as window,
        WindowFiller(window, stop) as follower,
    ):
        yield folder, follower.fields


def learn(
    data: DataFolder,
    registry: Registry,
    config: LearnerServiceConfig,
    stop: Event,
    *,
    fields: Fields = dict,
) -> int:
    """Learn from the store of a data folder until `stop` is set; the process's exit code."""
    use_compile_cache()
    fenced = ""
    with LearnerRole(data, registry, config=config) as role:

        def status() -> dict[str, Any]:
            return role.status() | {"is_ready": True} | fields()

        with reporting(status):
            try:
                role.run(stop)
            except Fenced as error:
                fenced = str(error)
                stop.set()
        report({**status(), "fenced": fenced})
    if fenced:
        sys.stderr.write(f"{fenced}\n")
    return FENCED if fenced else 0


if __name__ == "__main__":
    raise SystemExit(run_role(main))
