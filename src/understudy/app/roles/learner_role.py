"""The learner role: one process that turns a deployment's stored experience into bots, without any game.

    store ─► tally ─► schedule ─► course (bc, dqn) ─► release ─► gate ─► champion

It only reads the store and writes models and checkpoints; whoever starts later takes over, and this one is fenced.
"""

import itertools
import json
import os
import socket
from pathlib import Path
from threading import Event
from typing import Any

import structlog

from understudy.app.data import DataFolder
from understudy.app.service.game_learner import GameLearner, LearnerServiceConfig, Means
from understudy.app.service.gatekeeper import CheckModel, Gatekeeper
from understudy.app.service.model_check import check_apart
from understudy.app.service.tally import Tally
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Fenced, StorageFull, Unreachable
from understudy.core.log import make_folder, write_file
from understudy.engines.follower import StoreFollower
from understudy.models.registry import Registry
from understudy.stores.view import StoreView

_log = structlog.get_logger("understudy.learner")
_IDLE_S = 0.05
_NEW_GAMES_EVERY_S = 0.5


class LearnerRole:
    """Everything between a store and its games' champions; a context manager."""

    def __init__(
        self, data: DataFolder, registry: Registry, *, config: LearnerServiceConfig | None = None,
        clock: Clock | None = None, check: CheckModel = check_apart,
    ) -> None:  # fmt: skip
        self._data, self._registry, self._folder = data, registry, data.root / "learner"
        self.config, self._clock = config or LearnerServiceConfig(), clock or SystemClock()
        self._keeper = Gatekeeper(registry, bounds=self.config.bounds, budget=self.config.budget, check=check)
        self._owner = f"learner {os.getpid()} on {socket.gethostname()}"
        self._follower: StoreFollower | None = None
        self._tally: Tally | None = None
        self._games: dict[str, GameLearner] = {}
        self._next_games_s = self._next_save_s = 0.0
        self._is_fenced = False
        self._waits_for = ""
        self._status: dict[str, Any] = {}
        self._look_around()

    def step(self) -> bool:
        """One piece of work for every game; whether there was any. Fenced once another learner has taken over."""
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
        """Repeat `step` until told to stop; Fenced ends it."""
        while not stop.is_set():
            try:
                did = self.step()
            except StorageFull as error:
                _log.warning("disk_full", error=str(error), next="free some space; learning goes on by itself")
                stop.wait(1.0)
                continue
            except Unreachable as error:
                if not self._waits_for:
                    _log.warning("models_not_reachable", error=str(error), next="nothing: it is asked again")
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
        self._status = {"owner": self._owner, "games": games, "storage_error": self._waits_for, **sums}

    # --- games ------------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Whether there is a store by now."""
        if not self._data.has_store():
            return False
        self._bind()
        self._follower = StoreFollower(self._data.store)
        tally = Tally(self._follower)
        path = self._folder / "tally.json"
        if path.exists():
            try:
                tally.restore(json.loads(path.read_bytes()))
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("tally_not_readable", error=repr(error)[:200], next="the store is counted again")
                fresh = Tally(self._follower)  # before the other leaves, which would close the store
                tally.close()
                tally = fresh
        self._tally = tally
        return True

    def _bind(self) -> None:
        """Set aside what was learnt from another store: its arrival numbers mean nothing in this one."""
        with StoreView(self._data.store) as view:
            here = str(view.identity)
        before = self._folder / "store.txt"
        if before.exists() and (other := before.read_text()) != here:
            aside = _free(self._folder.with_name(f"learner-{other}"))
            _log.warning("store_changed", before=other, now=here, kept=str(aside))
            self._folder.rename(aside)
        if not self._folder.exists() and (known := self._folder.with_name(f"learner-{here}")).exists():
            known.rename(self._folder)
        make_folder(self._folder)
        write_file(self._folder / "store.txt", here.encode())

    def _meet_games(self, tally: Tally) -> None:
        if self._clock.monotonic() < self._next_games_s:
            return
        self._next_games_s = self._clock.monotonic() + max(_NEW_GAMES_EVERY_S, 10 * self._registry.look_every_s)
        assert self._follower is not None
        means = Means(self._data, self._registry, self._keeper, self._follower, tally, self.config, self._clock)
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
        self._games, self._tally, self._follower = {}, None, None

    def __enter__(self) -> "LearnerRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free(folder: Path) -> Path:
    """A name that nothing has, this one if it can be."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([folder], others) if not name.exists())
