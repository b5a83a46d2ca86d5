"""The learner role: trains bots from a deployment's stored experience, without running any game.

    store ─► stats ─► schedule ─► training (bc, iql, dqn) ─► release ─► gate ─► champion

It only reads the store and writes models and checkpoints; a learner that starts later takes over
and fences this one.

Run as `python -m understudy.platform.learner_process DATA [CONFIG]`, where CONFIG is the file that
`up` wrote. It prints its status as JSON lines and exits when its standard input closes. Exit code 4
means that another learner has taken over; it is not restarted, as that would fence the other one.
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
from typing import TYPE_CHECKING, Any

import structlog

from understudy.backends.addresses import open_store
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.backends.local import open_view, open_window
from understudy.backends.specs import RegistrySpecs
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Corrupt, Fenced, StorageFull, Unreachable
from understudy.core.log import make_folder, write_file
from understudy.core.names import game_name_of_env
from understudy.core.wording import shortened
from understudy.experience.intake import deployment_key
from understudy.experience.ticket import TicketSeal
from understudy.learn.compile_cache import use_compile_cache
from understudy.models.registry import Registry
from understudy.platform.children import FENCED, report, reporting, run_role, stop_with_parent
from understudy.platform.config import Config
from understudy.release.game_learner import GameLearner
from understudy.release.game_training import LearnerServiceConfig, ServiceContext
from understudy.release.gatekeeper import CheckModel, Gatekeeper
from understudy.release.model_check import check_in_subprocess
from understudy.release.store_stats import StoreStats
from understudy.training.follower import StoreFollower

if TYPE_CHECKING:
    from understudy.stores.window import Window

_log = structlog.get_logger("understudy.learner")
_IDLE_S = 0.05
_NEW_GAMES_EVERY_S = 0.5


class LearnerRole:
    """Trains and releases bots for every game of a store; a context manager."""

    def __init__(
        self,
        data: DataFolder,
        registry: Registry,
        *,
        config: LearnerServiceConfig | None = None,
        clock: Clock | None = None,
        check: CheckModel = check_in_subprocess,
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
        self._stats: StoreStats | None = None
        self._games: dict[str, GameLearner] = {}
        self._next_games_s = self._next_save_s = 0.0
        self._is_fenced = False
        self._storage_error = ""
        self._status: dict[str, Any] = {}
        self._update_status()

    def step(self, stop: Event | None = None) -> bool:
        """Do a unit of work for every game; return whether there was any.

        While a game's first bot is trained, the trainings of games that have one are paused. Once
        `stop` is set, no other game's work begins. Raises Fenced once another learner has taken
        over.
        """
        if self._stats is None and not self._open():
            return False
        assert self._stats is not None
        has_worked = self._stats.follow()
        try:
            if self._add_games(self._stats):
                self._update_status()  # the first step of a game may take long
            trains_first_bot = False
            for game in sorted(self._games.values(), key=lambda game: game.has_bot):
                if stop is not None and stop.is_set():
                    break
                has_game_worked = game.step(may_train=not (game.has_bot and trains_first_bot))
                trains_first_bot |= has_game_worked and not game.has_bot
                has_worked |= has_game_worked
        except Fenced:
            self._is_fenced = True
            raise
        if self._clock.monotonic() >= self._next_save_s:
            self._save_stats()
        self._update_status()
        return has_worked

    def run(self, stop: Event) -> None:
        """Repeat `step` until `stop` is set; Fenced if another learner takes over."""
        while not stop.is_set():
            try:
                has_worked = self.step(stop)
            except StorageFull as error:
                _log.warning(
                    "disk_full",
                    error=str(error),
                    next="free some space; learning resumes by itself",
                )
                stop.wait(1.0)
                continue
            except Unreachable as error:
                if not self._storage_error:
                    _log.warning(
                        "models_not_reachable", error=str(error), next="none: the learner retries"
                    )
                self._storage_error = str(error)
                self._status = {**self._status, "storage_error": self._storage_error}
                stop.wait(1.0)
                continue
            if self._storage_error:
                self._storage_error = ""
                self._update_status()
            if not has_worked:
                stop.wait(_IDLE_S)

    def status(self) -> dict[str, Any]:
        """Return the status of every game as of the last step; may be called by any thread."""
        return self._status

    def _update_status(self) -> None:
        games = {name: game.status() for name, game in self._games.items()}
        sums = {what: sum(game[what] for game in games.values()) for what in ("steps", "updates")}
        self._status = {
            "owner": self._owner,
            "games": games,
            # Every step of the store that `games` took into account.
            "read_steps": 0 if self._stats is None else self._stats.n_steps,
            "storage_error": self._storage_error,
            **sums,
        }

    # --- games ------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Open the store and return whether it exists.

        If the progress on disk belongs to another store, its folder is renamed and a new one is
        started: arrival numbers of another store have no meaning in this one.
        """
        if not self._data.has_store():
            return False
        with open_view(self._data.store) as view:
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
            and (earlier := self._folder.with_name(f"learner-{here}")).exists()
        ):
            earlier.rename(self._folder)
        make_folder(self._folder)
        write_file(before, here.encode())
        self._follower = StoreFollower(self._data.store, clock=self._clock)
        seal = TicketSeal(deployment_key(self._data.root))
        stats = StoreStats(self._follower, seal)
        path = self._folder / "store_stats.json"
        if path.exists():
            try:
                stats.restore(json.loads(path.read_bytes()))
            except (ValueError, KeyError, TypeError) as error:
                _log.warning(
                    "store_stats_not_readable",
                    error=repr(error)[:200],
                    next="the store is counted again",
                )
                # Created before the old one is closed: the last one closed also closes the store.
                fresh = StoreStats(self._follower, seal)
                stats.close()
                stats = fresh
        self._stats = stats
        return True

    def _add_games(self, stats: StoreStats) -> bool:
        """Add games that were recorded for the first time; return whether there were any."""
        if self._clock.monotonic() < self._next_games_s:
            return False
        n_before = len(self._games)
        self._next_games_s = self._clock.monotonic() + max(
            _NEW_GAMES_EVERY_S, 10 * self._registry.poll_every_s
        )
        assert self._follower is not None
        context = ServiceContext(
            self._data,
            self._registry,
            self._keeper,
            self._follower,
            stats,
            self.config,
            self._clock,
        )
        for name in self._registry.games():
            if name in stats.schemas and name not in self._games:
                try:
                    self._games[name] = GameLearner(name, context, owner=self._owner)
                except Corrupt as error:
                    _log.error("game_not_learned", game=name, error=shortened(str(error), 500))
                    continue
                _log.info("game", game=name, epoch=self._games[name].epoch)
        return len(self._games) > n_before

    def _save_stats(self) -> None:
        self._next_save_s = self._clock.monotonic() + self.config.checkpoint_every_s
        assert self._stats is not None
        write_file(self._folder / "store_stats.json", json.dumps(self._stats.state()).encode())

    def close(self) -> None:
        """Save all progress, unless another learner has taken over; may be called twice."""
        for game in self._games.values():
            if not self._is_fenced:
                game.save()
            game.close()
        if self._stats is not None:
            if not self._is_fenced:
                self._save_stats()
            self._stats.close()
        self._games = {}
        self._stats = None
        self._follower = None

    def __enter__(self) -> "LearnerRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the role as a process of its own -------------------------------------------------------------


class WindowFiller:
    """Context manager that fills a window in a thread, and raises the thread's error on exit.

    A learner must not continue with old data: an error in the thread also sets `stop`, and the
    supervisor restarts the role. A store that is unreachable for a while is not an error; `fields`
    reports it.
    """

    def __init__(self, window: "Window", stop: Event) -> None:
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
        """Return the fields of the role's report: items copied, and the current error, if any."""
        return {"window": {"items": self._window.items, "error": self._window.error}}

    def __enter__(self) -> "WindowFiller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


Fields = Callable[[], dict[str, Any]]
"""Returns further fields for the role's report."""


def main(data: DataFolder, config: Config) -> int:
    """Learn with a config until the parent requests a stop; return the process's exit code."""
    stop = stop_with_parent()
    registry = open_deployment(data, models=config.models.url).registry
    simulator = config.learner.simulator
    service = LearnerServiceConfig(
        learn_from=config.learn_from,
        schedule=config.schedule,
        bounds=config.bounds,
        settings=config.algorithm_settings,
        envs={str(game_name_of_env(simulator)): simulator} if simulator else {},
        explore_share=config.learner.explore_share,
    )
    with _local_experience(data, config, registry, stop) as (folder, fields):
        return learn(folder, registry, service, stop, fields=fields)


@contextlib.contextmanager
def _local_experience(
    data: DataFolder, config: Config, registry: Registry, stop: Event
) -> Iterator[tuple[DataFolder, Fields]]:
    """Yield a folder with a local store to learn from, and report fields.

    A remote store is copied to that folder continuously.
    """
    if not config.store.url:
        yield data, dict
        return
    folder = DataFolder(data.root, store_name="window")
    specs = RegistrySpecs(registry)
    keep_s = config.store.window_hours * 3600 or None
    with (
        contextlib.closing(open_store(config.store.url, specs=specs)) as remote,
        open_window(remote, folder.store, specs=specs, keep_s=keep_s) as window,
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
    """Learn from a data folder's store until `stop` is set; return the process's exit code."""
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
