"""simulate: stream, ingest and real recorders in real processes, with everything they promised in a ledger."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from understudy.app.crowd.player import PlayerSettings, command
from understudy.app.data import DataFolder
from understudy.app.roles.children import Child, python_module
from understudy.app.stats import stats
from understudy.core.errors import ConfigError, UnderstudyError

MAX_PROCESSES = 4
_STOP_S = 30.0
_CLOSE_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """What to simulate."""

    env_id: str
    players: int = 4
    seconds: float = 10.0
    seed: int = 0
    rate: float = 0.0
    """Steps a second and player; 0 means as fast as they go."""
    linger_s: float = 1.0
    ingest: bool = True
    env_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.players <= 10_000:
            raise ConfigError(f"--players is {self.players}; give a number from 1 to 10000")
        if not 0 < self.seconds <= 7 * 86_400:
            raise ConfigError(f"--seconds is {self.seconds}; give a number above 0, such as 10")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; give a number from 0")
        if not 0 <= self.rate < 1e9 or not 0 < self.linger_s < 1e9:
            raise ConfigError(f"--rate {self.rate}, --linger {self.linger_s}: give a rate from 0 and a linger above 0")


@dataclass(frozen=True, slots=True)
class Progress:
    """How a simulation stands."""

    elapsed_s: float
    recorded_steps: int
    acked_steps: int
    stored_steps: int
    lag_s: float
    players_alive: int
    ingest_alive: bool


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """How a simulation ended."""

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


def check_env(config: SimulateConfig) -> None:
    """Make the env once, so that a wrong id or keyword is refused before anything starts."""
    from understudy.act.vector import make_env
    from understudy.core.game import spec_from_gymnasium

    env = make_env(config.env_id, config.env_kwargs)
    try:
        spec_from_gymnasium(env)
    finally:
        env.close()


class Simulation:
    """The processes of one simulation; a context manager that leaves none behind."""

    def __init__(self, data: DataFolder, config: SimulateConfig) -> None:
        check_env(config)
        data.root.mkdir(parents=True, exist_ok=True)
        self._data, self._config = data, config
        self._steps_before = stats(data)["steps"]
        self.uses_running_ingest = config.ingest and data.has_writer()
        self._ingest = self._start_ingest() if config.ingest and not self.uses_running_ingest else None
        self._ingest_restarts, self._stored_before = 0, 0
        self.players = [Child(f"players-{at}", command(settings)) for at, settings in enumerate(self._shares())]
        self._began_s = time.monotonic()

    def _start_ingest(self) -> Child:
        return Child("ingest", python_module("understudy.app.roles.ingest", str(self._data.root)))

    def _shares(self) -> Iterator[PlayerSettings]:
        config = self._config
        count = min(config.players, MAX_PROCESSES)
        names = [f"simulated-{config.seed}-{at}" for at in range(config.players)]
        for at in range(count):
            yield PlayerSettings(
                data=str(self._data.root), env_id=config.env_id, players=names[at::count], seconds=config.seconds,
                seed=config.seed + 104_729 * at, rate=config.rate, linger_s=config.linger_s,
                env_kwargs=config.env_kwargs,
            )  # fmt: skip

    @property
    def children(self) -> list[Child]:
        return [*self.players, *([self._ingest] if self._ingest else [])]

    def progress(self) -> Progress:
        """Numbers as the processes last reported them."""
        stored = self._ingest.latest if self._ingest else {}
        recorded = sum(child.latest.get("recorded", 0) for child in self.players)
        if not recorded:
            self._began_s = time.monotonic()  # still starting
        return Progress(
            elapsed_s=time.monotonic() - self._began_s,
            recorded_steps=recorded,
            acked_steps=sum(child.latest.get("acked", 0) for child in self.players),
            stored_steps=self._stored_before + stored.get("stored", 0),
            lag_s=stored.get("lag_s", 0.0),
            players_alive=sum(child.exit_code is None for child in self.players),
            ingest_alive=self._ingest is not None and self._ingest.exit_code is None,
        )

    def run(self, show: Callable[[Progress], None], *, every_s: float = 0.1) -> SimulateResult:
        """Wait for the players, then let ingest store the rest."""
        while any(child.exit_code is None for child in self.players):
            self._watch_ingest()
            show(self.progress())
            time.sleep(every_s)
        for child in self.players:
            child.wait(1.0)
        if self._ingest is not None:
            self._ingest.stop()
            deadline = time.monotonic() + _STOP_S
            while self._ingest.wait(every_s) is None and time.monotonic() < deadline:
                show(self.progress())
        show(self.progress())
        return self._result()

    def _watch_ingest(self) -> None:
        if self._ingest is None or self._ingest.exit_code is None:
            return
        if self._ingest_restarts >= 5:
            raise UnderstudyError(f"the ingest process ends again and again:\n{self._ingest.errors}")
        self._stored_before += self._ingest.latest.get("stored", 0)
        self._ingest_restarts += 1
        self._ingest = self._start_ingest()

    def _result(self) -> SimulateResult:
        last = [child.latest for child in self.players]
        failed = [child for child in self.players if child.exit_code not in (0, -9, -15, -2)]
        if failed:
            raise UnderstudyError(f"{failed[0].name} failed:\n{failed[0].errors}")
        latencies = np.array([ms for one in last for ms in one.get("latencies_ms", [])] or [0.0])
        progress = self.progress()
        refusals = self._ingest.latest.get("refusals", {}) if self._ingest else {}
        dropped = sum(one.get("dropped", 0) for one in last)
        return SimulateResult(
            recorded_steps=progress.recorded_steps,
            acked_steps=progress.acked_steps,
            stored_steps=stats(self._data)["steps"] - self._steps_before,
            dropped_steps=dropped,
            unsent_steps=max(0, progress.recorded_steps - progress.acked_steps - dropped),
            steps_per_s=round(progress.acked_steps / max(min(progress.elapsed_s, self._config.seconds), 0.001), 1),
            ack_p50_ms=round(float(np.percentile(latencies, 50)), 3),
            ack_p99_ms=round(float(np.percentile(latencies, 99)), 3),
            refused_frames=sum(refusals.values()),
            died=sum(not one.get("done") for one in last),
            ingest_restarts=self._ingest_restarts,
        )

    def kill(self) -> None:
        """Kill every process at once, as a power cut of the machine's processes would."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait(5.0)

    def close(self) -> None:
        """Ask everybody to stop, and kill who has not within a few seconds."""
        for child in self.children:
            child.stop()
        deadline = time.monotonic() + _CLOSE_S
        for child in self.children:
            if child.wait(max(0.0, deadline - time.monotonic())) is None:
                child.kill()
                child.wait(5.0)

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
